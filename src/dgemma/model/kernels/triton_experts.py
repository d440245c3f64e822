"""Products with 4-bit expert weights (MoE) on CUDA, dequantized inside a Triton kernel.

A block of the result is some rows of one expert by some of its outputs. Which expert a block belongs to is
found in the kernel from `ends`, so nothing is read back from the device. A weight is dequantized to the same
bits as by `QuantizedTensor.dequantize`, rounded to the dtype of `x`, and multiplied; sums are fp32.

Never run on a GPU here: it ran in Triton's interpreter, and was compiled for sm_80, 89, 90, 100 and 120.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dgemma.model.quantized_tensor import QuantizedTensor, QuantKind

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

_KINDS = (QuantKind.INT4, QuantKind.FLOAT4)
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Blocks:
    """What one program computes: `rows` by `columns` of the result, `depth` neighbours of a row at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def available() -> bool:
    """Whether Triton is installed."""
    try:
        importlib.import_module("triton")
    except ImportError:
        return False
    return True


def supports(weight: QuantizedTensor) -> bool:
    """Whether the kernel supports this weight."""
    if weight.qdata.device.type != "cuda" or weight.kind not in _KINDS or weight.scale.dtype not in _SCALES:
        return False
    if weight.bias is not None:
        return False
    if len(weight.shape) != 3 or weight.shape[-1] % 32 or weight.shape[-1] % weight.scale.shape[-1]:
        return False
    # A copy of weights that are not contiguous would cost more than the kernel saves.
    return (
        weight.group_len % 16 == 0 and all(p.is_contiguous() for p in weight.parts.values()) and available()
    )


def multiply_grouped(x: Tensor, ends: Tensor, weight: QuantizedTensor) -> Tensor:
    """Each expert's product with its rows, without gradients: [n, in] -> [n, out] in the dtype of `x`.

    `x` is sorted by expert; expert e owns the rows before `ends[e]` (int32) that no earlier expert owns.
    """
    is_float = weight.kind is QuantKind.FLOAT4
    parts = (weight.qdata, weight.scale, weight.zero_point, weight.global_scale)
    result: Tensor = _operation(x.contiguous(), ends, *parts, is_float, weight.global_scale_divides)
    return result


def blocks_for(count: int, experts: int, dtype: torch.dtype) -> Blocks:
    """Blocks for `count` rows: most experts should fit in one, as each block dequantizes its weights again.

    These sizes are not timed. Compiled, they spill no registers. On sm_80, above 32 rows, several warps
    dequantize the same weights.
    """
    rows = min(max(2 * count // experts, 16), 128)
    rows = 1 << (rows - 1).bit_length()
    if dtype == torch.float32:  # no tensor cores
        return Blocks(min(rows, 32), columns=32, depth=32, warps=4, stages=2)
    if rows == 16:
        return Blocks(rows, columns=64, depth=128, warps=4, stages=3)
    return Blocks(rows, columns=128, depth=64, warps=8 if rows == 128 else 4, stages=3)


def constants(
    blocks: Blocks, shape: tuple[int, ...], group_len: int, is_float: bool, outer_divides: bool
) -> dict[str, int]:
    """The compile-time constants of the kernel; `shape` is that of the expert weights."""
    experts, out, inner = shape
    return {
        "experts": experts,
        "lanes": 1 << (experts - 1).bit_length(),
        "out": out,
        "inner": inner,
        "group_len": group_len,
        # The longest power of two in which all neighbours have one scale.
        "unit": min(group_len & -group_len, blocks.depth),
        "is_float": is_float,
        "outer_divides": outer_divides,
        "rows": blocks.rows,
        "columns": blocks.columns,
        "depth": blocks.depth,
    }


def _launch(
    x: Tensor,
    ends: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    outer: Tensor | None,
    is_float: bool,
    outer_divides: bool,
) -> Tensor:
    count, inner = x.shape
    experts, out, _ = codes.shape
    assert codes.shape[-1] * 2 == inner, (codes.shape, inner)
    assert ends.shape == (experts,), (ends.shape, experts)
    assert ends.dtype == torch.int32, ends.dtype
    result = x.new_empty(count, out)
    if count == 0:
        return result
    blocks = blocks_for(count, experts, x.dtype)
    fixed = constants(blocks, (experts, out, inner), inner // scale.shape[-1], is_float, outer_divides)
    # An upper bound: each expert has full blocks and at most one partial block.
    row_blocks = count // blocks.rows + min(experts, count)
    grid = (row_blocks * -(-out // blocks.columns),)
    # sm_80 has no e4m3, so the kernel decodes its bits.
    plain_scale = scale.view(torch.uint8) if scale.dtype == torch.float8_e4m3fn else scale
    with torch.cuda.device_of(x):
        kernel()[grid](
            x, ends, codes, plain_scale, zero, outer, result,
            **fixed, num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
    return result


def _shape_only(x: Tensor, ends: Tensor, codes: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[1])


# A custom torch operator: a compiled graph does not trace into it, and fake tensors have a shape function.
_operation = torch.library.custom_op(
    "dgemma::multiply_four_bit_experts",
    _launch,
    mutates_args=(),
    schema="(Tensor x, Tensor ends, Tensor codes, Tensor scale, Tensor? zero, Tensor? outer, bool is_float, "
    "bool outer_divides) -> Tensor",
)
_operation.register_fake(_shape_only)


@cache
def kernel() -> Any:
    """The kernel, which Triton compiles when it is first launched."""
    global tl  # the kernel refers to this name
    triton = importlib.import_module("triton")
    tl = triton.language
    return triton.jit(_multiply)


def _multiply(  # type: ignore[no-untyped-def]
    x_at, ends_at, codes_at, scale_at, zero_at, outer_at, result_at,
    experts: tl.constexpr, lanes: tl.constexpr, out: tl.constexpr, inner: tl.constexpr,
    group_len: tl.constexpr, unit: tl.constexpr, is_float: tl.constexpr, outer_divides: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    # Blocks are ordered by expert. `lanes` is `experts`, rounded up to a power of two.
    column_blocks: tl.constexpr = (out + columns - 1) // columns
    place = tl.program_id(0) // column_blocks
    every = tl.arange(0, lanes)
    begins = tl.load(ends_at + every - 1, mask=(every > 0) & (every < experts), other=0)
    ends = tl.load(ends_at + every, mask=every < experts, other=0)
    blocks = (ends - begins + rows - 1) // rows
    expert = tl.sum((tl.cumsum(blocks, 0) <= place).to(tl.int32), 0)
    if expert >= experts:
        return
    earlier = tl.sum(tl.where(every < expert, blocks, 0), 0)
    begin = tl.sum(tl.where(every == expert, begins, 0), 0)
    end = tl.sum(tl.where(every == expert, ends, 0), 0)

    row = begin + (place - earlier) * rows + tl.arange(0, rows)
    column = tl.program_id(0) % column_blocks * columns + tl.arange(0, columns)
    is_row = row < end
    is_column = column < out
    long_row = row.to(tl.int64)
    matrix_row = expert.to(tl.int64) * out + column
    groups: tl.constexpr = inner // group_len
    units: tl.constexpr = depth // unit
    if outer_at is not None:
        outer = tl.load(outer_at + matrix_row, mask=is_column, other=1.0)[:, None]

    # Weights are the left operand: a tensor core reads it from registers, where they are dequantized.
    total = tl.zeros((columns, rows), tl.float32)
    for start in range(0, inner, depth):
        across = start + tl.arange(0, depth)
        x = tl.load(
            x_at + long_row[None, :] * inner + across[:, None],
            mask=is_row[None, :] & (across < inner)[:, None],
            other=0.0,
        )  # [depth, rows]
        byte = start // 2 + tl.arange(0, depth // 2)
        pair = tl.load(
            codes_at + matrix_row[:, None] * (inner // 2) + byte[None, :],
            mask=is_column[:, None] & (byte < inner // 2)[None, :],
            other=0,
        )
        code = tl.join(pair & 15, pair >> 4).reshape(columns, units, unit)

        group = (start + unit * tl.arange(0, units)) // group_len
        group_at = matrix_row[:, None] * groups + group[None, :]
        is_group = is_column[:, None] & (group < groups)[None, :]
        scale = tl.load(scale_at + group_at, mask=is_group, other=0)
        if scale.dtype == tl.uint8:
            # The bits of an e4m3 give an fp32 that is 2^120 times too small. NaN is an exception.
            bits = scale.to(tl.uint32)
            wide = ((bits << 24) & 0x80000000) | ((bits << 20) & 0x07F00000)
            factor = wide.to(tl.float32, bitcast=True) * 2.0**120
            factor = tl.where((bits & 127) == 127, float("nan"), factor)
        else:
            factor = scale.to(tl.float32)
        if outer_at is not None:
            factor = tl.div_rn(factor, outer) if outer_divides else factor * outer

        bits = code.to(tl.uint32)
        if is_float:
            # The bits of an e2m1 give an fp32 that is 2^126 times too small.
            wide = ((bits << 28) & 0x80000000) | ((bits << 22) & 0x01C00000)
            number = wide.to(tl.float32, bitcast=True) * 2.0**126
        else:
            # The bits become the last ones of 2^23 + code, which saves a conversion; GPUs convert slowly.
            number = (bits | 0x4B000000).to(tl.float32, bitcast=True)
            if zero_at is None:
                number -= 2.0**23 + 8
            else:
                zero = tl.load(zero_at + group_at, mask=is_group, other=0)
                number -= (zero.to(tl.float32) + 2.0**23)[:, :, None]
        weight = (number * factor[:, :, None]).to(x.dtype).reshape(columns, depth)
        total = tl.dot(weight, x, total, input_precision="ieee")

    at = long_row[None, :] * out + column[:, None]
    tl.store(result_at + at, total.to(result_at.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])
