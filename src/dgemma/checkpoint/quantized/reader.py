"""Read quantized weights of a file into `QuantizedTensor`s, module by module."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dgemma.checkpoint.quantized.schemes import (
    Awq,
    CompressedNvfp4,
    CompressedPacked,
    CompressedScaled,
    GgufBlocks,
    MlxAffine,
    ModelOptNvfp4,
    QuantizationScheme,
)
from dgemma.checkpoint.quantized.tensor_index import QuantizedEntry, QuantizedModule
from dgemma.checkpoint.safetensors_file import TensorEntry, read_into
from dgemma.errors import CheckpointError
from dgemma.model.block_tensor import BLOCK_FORMATS, AnyQuantized, BlockTensor
from dgemma.model.quantized_tensor import QuantizedTensor, QuantKind, pack, unpack

_DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64,
    "U32": torch.uint32,
}  # fmt: skip


def read_quantized(
    entry: QuantizedEntry, device: torch.device, on_bytes: Callable[[int], None] = lambda count: None
) -> AnyQuantized:
    """The whole weight on `device`. Beside it, memory holds one module: a matrix, or half of an expert."""
    out, _ = entry.module_shape
    whole: AnyQuantized | None = None
    for number, module in enumerate(entry.modules):
        qdata = read_module(entry, module)
        if whole is None:
            whole = _allocate(qdata, entry.shape, device)
        for name, part in whole.parts.items():
            part.view(-1, *part.shape[-1:])[number * out : (number + 1) * out].copy_(qdata.parts[name])
        on_bytes(sum(tensor.nbytes for tensor in module.entries.values()))
    assert whole is not None
    return whole


def _allocate(module: AnyQuantized, shape: tuple[int, ...], device: torch.device) -> AnyQuantized:
    parts = {
        name: torch.empty((*shape[:-1], part.shape[-1]), dtype=part.dtype, device=device)
        for name, part in module.parts.items()
    }
    return module.with_parts(parts)


def read_module(entry: QuantizedEntry, module: QuantizedModule) -> AnyQuantized:
    """One of the modules that a weight is stored in: a matrix, or half of an expert."""
    out, inner = entry.module_shape
    parts = {name: read_tensor(found) for name, found in module.entries.items()}
    try:
        return to_quantized_tensor(entry.scheme, parts, out, inner)
    except CheckpointError as error:
        raise CheckpointError(f"{module.module}: {error}") from None


def read_tensor(entry: TensorEntry) -> Tensor:
    tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
    if entry.nbytes:
        read_into(entry, tensor.view(-1).view(torch.uint8).numpy())
    return tensor


Parts = Mapping[str, Tensor]
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the places of columns 0 ... 7 in a word


def to_quantized_tensor(scheme: QuantizationScheme, parts: Parts, out: int, inner: int) -> AnyQuantized:
    """The linear of `out` x `inner` numbers that `parts` hold; its scales are checked."""
    if isinstance(scheme, GgufBlocks):
        return _blocks(scheme, parts["blocks"])
    if isinstance(scheme, MlxAffine):
        kind = QuantKind.INT4 if scheme.bits == 4 else QuantKind.INT8
        for name in ("scales", "biases"):
            _check_finite(scheme, parts[name].float())
        # Little-endian words: their bytes are the values in order, the earlier one in the lower half.
        words = parts["weight"].contiguous().view(torch.uint8)
        return QuantizedTensor(kind, words, parts["scales"], bias=parts["biases"])
    match scheme:
        case ModelOptNvfp4():
            global_scale = parts["weight_scale_2"].reshape(1, 1).expand(out, 1)
            found = QuantizedTensor(
                QuantKind.FLOAT4, parts["weight"], parts["weight_scale"], global_scale=global_scale
            )
        case CompressedNvfp4():
            global_scale = parts["weight_global_scale"].reshape(1, 1).expand(out, 1)
            packed, scale = parts["weight_packed"], parts["weight_scale"]
            found = QuantizedTensor(
                QuantKind.FLOAT4, packed, scale, global_scale=global_scale, global_scale_divides=True
            )
        case CompressedScaled():
            found = _scaled(scheme, parts, out, inner)
        case CompressedPacked():
            found = _packed(scheme, parts, out, inner)
        case Awq():
            found = QuantizedTensor(
                QuantKind.INT4,
                pack(_awq_columns(parts["qweight"], out).t().contiguous()),
                parts["scales"].t().contiguous(),
                zero_point=_awq_columns(parts["qzeros"], out).t().contiguous(),
            )
        case _:
            raise AssertionError(scheme)
    _check_scales(scheme, found)
    return found


def _scaled(scheme: CompressedScaled, parts: Parts, out: int, inner: int) -> QuantizedTensor:
    kind = QuantKind.INT8 if scheme.integers else QuantKind.FLOAT8
    scale = parts["weight_scale"]
    if scheme.block is None:
        return QuantizedTensor(kind, parts["weight"], scale.reshape(-1, 1).expand(out, 1))
    rows, columns = scheme.block
    # The last block may extend past the row: the group length divides both.
    group = math.gcd(columns, inner)
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns // group, 1)
    return QuantizedTensor(kind, parts["weight"], spread[:out, : inner // group].contiguous())


def _packed(scheme: CompressedPacked, parts: Parts, out: int, inner: int) -> QuantizedTensor:
    shape = parts.get("weight_shape")
    if shape is not None and shape.tolist() != [out, inner]:
        raise scheme.refuse(f"weight_shape is {shape.tolist()}, but the model requires {[out, inner]}.")
    # Little-endian words: their bytes are the values in order, with an offset that makes them positive.
    packed = parts["weight_packed"].contiguous().view(torch.uint8)[:, : inner * scheme.bits // 8]
    if scheme.bits == 8:
        return QuantizedTensor(QuantKind.INT8, (packed ^ 128).view(torch.int8), parts["weight_scale"])
    zero_point = None
    if not scheme.symmetric:  # packed along the rows, not along the groups
        # A copy: `contiguous` keeps the strides of a single column, and then no byte view is possible.
        words = parts["weight_zero_point"].t().clone(memory_format=torch.contiguous_format)
        zero_point = unpack(words.view(torch.uint8))[:, :out].t().contiguous()
    return QuantizedTensor(QuantKind.INT4, packed, parts["weight_scale"], zero_point=zero_point)


def _awq_columns(words: Tensor, count: int) -> Tensor:
    """Unpack AWQ words [rows, words] -> the first `count` values of each row, in order."""
    qdata: Tensor = unpack(words.contiguous().view(torch.uint8)).unflatten(-1, (-1, 8))
    return qdata[..., list(_AWQ_ORDER)].flatten(-2)[:, :count]


def _blocks(scheme: GgufBlocks, stored: Tensor) -> AnyQuantized:
    """Q8_0 and Q4_0 in the layout that kernels read; other blocks as they are."""
    if scheme.type.name in BLOCK_FORMATS:
        found = BlockTensor(BLOCK_FORMATS[scheme.type.name], stored)
        _check_finite(scheme, found.scales())
        return found
    blocks = stored.unflatten(-1, (-1, scheme.type.block_bytes))
    scale = blocks[..., :2].clone(memory_format=torch.contiguous_format).view(torch.float16).squeeze(-1)
    _check_finite(scheme, scale.float())
    values = blocks[..., 2:]
    if scheme.type.name == "Q8_0":
        return QuantizedTensor(QuantKind.INT8, values.flatten(-2).view(torch.int8), scale)
    # The first half of a block is in the lower halves of its bytes, the second in the upper ones.
    return QuantizedTensor(QuantKind.INT4, pack(torch.cat((values & 15, values >> 4), -1)).flatten(-2), scale)


def _check_finite(scheme: QuantizationScheme, scales: Tensor) -> None:
    bad = ~scales.isfinite()
    if bad.any():
        raise scheme.refuse(f"a scale is {scales[bad][0].item()}; scales are finite. The file is corrupt.")


def _check_scales(scheme: QuantizationScheme, found: QuantizedTensor) -> None:
    for name, scales in (("a scale", found.scale), ("an outer scale", found.global_scale)):
        if scales is None:
            continue
        numbers = scales.float()
        bad = ~(numbers.isfinite() & (numbers >= 0))
        if scales is found.global_scale:
            bad |= numbers == 0
        if bad.any():
            worst = numbers[bad][0].item()
            raise scheme.refuse(
                f"{name} is {worst}; scales are finite and not negative. The file is corrupt."
            )
