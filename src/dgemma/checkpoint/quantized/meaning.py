"""What the parts of a quantized linear stand for: from a file's tensors to `Codes`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dgemma.checkpoint.quantized.formats import (
    Awq,
    CompressedNvfp4,
    CompressedPacked,
    CompressedScaled,
    Format,
    ModelOptNvfp4,
)
from dgemma.model.codes import CodeKind, Codes, pack, unpack

Parts = Mapping[str, Tensor]
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word the columns 0 ... 7 stand


def codes_of(form: Format, parts: Parts, out: int, inner: int) -> Codes:
    """The linear of `out` x `inner` numbers that `parts` hold, checked."""
    match form:
        case ModelOptNvfp4():
            outer = parts["weight_scale_2"].reshape(1, 1).expand(out, 1)
            found = Codes(CodeKind.FLOAT4, parts["weight"], parts["weight_scale"], outer=outer)
        case CompressedNvfp4():
            outer = parts["weight_global_scale"].reshape(1, 1).expand(out, 1)
            packed, scale = parts["weight_packed"], parts["weight_scale"]
            found = Codes(CodeKind.FLOAT4, packed, scale, outer=outer, outer_divides=True)
        case CompressedScaled():
            found = _scaled(form, parts, out, inner)
        case CompressedPacked():
            found = _packed(form, parts, out, inner)
        case Awq():
            found = Codes(
                CodeKind.INT4,
                pack(_awq_columns(parts["qweight"], out).t().contiguous()),
                parts["scales"].t().contiguous(),
                zero=_awq_columns(parts["qzeros"], out).t().contiguous(),
            )
        case _:
            raise AssertionError(form)
    _check_scales(form, found)
    return found


def _scaled(form: CompressedScaled, parts: Parts, out: int, inner: int) -> Codes:
    kind = CodeKind.INT8 if form.integers else CodeKind.FLOAT8
    scale = parts["weight_scale"]
    if form.block is None:
        return Codes(kind, parts["weight"], scale.reshape(-1, 1).expand(out, 1))
    rows, columns = form.block
    # Where the last block ends outside the row, groups are what divides both.
    group = math.gcd(columns, inner)
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns // group, 1)
    return Codes(kind, parts["weight"], spread[:out, : inner // group].contiguous())


def _packed(form: CompressedPacked, parts: Parts, out: int, inner: int) -> Codes:
    shape = parts.get("weight_shape")
    if shape is not None and shape.tolist() != [out, inner]:
        raise form.refuse(f"weight_shape is {shape.tolist()}, but the model asks for {[out, inner]}.")
    # Little-endian words: their bytes are the codes in order, shifted to be positive.
    packed = parts["weight_packed"].contiguous().view(torch.uint8)[:, : inner * form.bits // 8]
    if form.bits == 8:
        return Codes(CodeKind.INT8, (packed ^ 128).view(torch.int8), parts["weight_scale"])
    zero = None
    if not form.symmetric:  # packed along the rows, not along the groups
        # A copy: `contiguous` leaves a single column's strides as they are, and then bytes cannot be viewed.
        words = parts["weight_zero_point"].t().clone(memory_format=torch.contiguous_format)
        zero = unpack(words.view(torch.uint8))[:, :out].t().contiguous()
    return Codes(CodeKind.INT4, packed, parts["weight_scale"], zero=zero)


def _awq_columns(words: Tensor, count: int) -> Tensor:
    """[rows, words] -> the first `count` codes of each row in order."""
    codes: Tensor = unpack(words.contiguous().view(torch.uint8)).unflatten(-1, (-1, 8))
    return codes[..., list(_AWQ_ORDER)].flatten(-2)[:, :count]


def _check_scales(form: Format, found: Codes) -> None:
    for name, scales in (("a scale", found.scale), ("an outer scale", found.outer)):
        if scales is None:
            continue
        numbers = scales.float()
        bad = ~(numbers.isfinite() & (numbers >= 0))
        if scales is found.outer:
            bad |= numbers == 0
        if bad.any():
            worst = numbers[bad][0].item()
            raise form.refuse(f"{name} is {worst}; scales are finite and not negative. The file is corrupt.")
