"""Tensors in the blocks of GGUF, and how they are dequantized.

Memory holds the blocks as the file does: 256 neighbours (32 in the older formats) with their scales between
the quantized values. Each product dequantizes them. `dequantize` computes in fp32, in the order of ggml's own
functions, and rounds once. Q8_0 and Q4_0 are not here: they become `QuantizedTensor`s, which kernels read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.model.quantized_tensor import QuantizedTensor

# Shapes: blocks are [n, bytes of a block], numbers [n, numbers of a block]; `...` is the experts or nothing.


@dataclass(frozen=True)
class BlockFormat:
    """One format. halves: the places of its fp16 scales in a block."""

    name: str
    block_len: int
    block_bytes: int
    halves: tuple[int, ...]
    decode: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class BlockTensor:
    """A matrix, or the weights of all experts, in blocks; used as a `QuantizedTensor` is."""

    format: BlockFormat
    qdata: Tensor  # [..., out, bytes of a row], uint8

    @property
    def kind(self) -> str:
        return self.format.name

    @property
    def shape(self) -> tuple[int, ...]:
        *outer, row_bytes = self.qdata.shape
        return (*outer, row_bytes // self.format.block_bytes * self.format.block_len)

    @property
    def parts(self) -> dict[str, Tensor]:
        return {"qdata": self.qdata}

    def __getitem__(self, at: int | slice | Tensor) -> BlockTensor:
        """Rows of a matrix, or experts."""
        return BlockTensor(self.format, self.qdata[at])

    def with_parts(self, parts: Mapping[str, Tensor]) -> BlockTensor:
        """The same format with other blocks: other rows, or another device."""
        return BlockTensor(self.format, parts["qdata"])

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dequantized tensor [..., out, in]."""
        blocks = self.qdata.reshape(-1, self.format.block_bytes)
        return self.format.decode(blocks).view(self.shape).to(dtype)

    def scales(self) -> Tensor:
        """The fp16 scales of all blocks, in fp32."""
        blocks = self.qdata.reshape(-1, self.format.block_bytes)
        return torch.stack([_half(blocks, at) for at in self.format.halves])


AnyQuantized = QuantizedTensor | BlockTensor


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at a byte of each block, in fp32: [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """The halves of bytes: of each `run` neighbours first the lower halves, then the upper ones."""
    runs: Tensor = packed.unflatten(-1, (-1, 1, run))
    return torch.cat((runs & 15, runs >> 4), dim=-2).flatten(1)


def _bits(packed: Tensor) -> Tensor:
    """The bits of bytes, lowest first: [n, bytes] -> [n, 8 bytes]."""
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1).flatten(1)


def _decode_q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:], 16) + _half(blocks, 2)


def _decode_q5_0(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 6:], 16) | _bits(blocks[:, 2:6]) << 4
    return _half(blocks, 0) * (values.float() - 16)


def _decode_q5_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 8:], 16) | _bits(blocks[:, 4:8]) << 4
    return _half(blocks, 0) * values + _half(blocks, 2)


def _decode_q4_k(blocks: Tensor) -> Tensor:
    return _scaled_by_32(blocks, _nibbles(blocks[:, 16:], 32))


def _decode_q5_k(blocks: Tensor) -> Tensor:
    high = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None] & 1
    return _scaled_by_32(blocks, _nibbles(blocks[:, 48:], 32) | high.flatten(1) << 4)


def _scaled_by_32(blocks: Tensor, values: Tensor) -> Tensor:
    """`scale * value - minimum`, with a scale and a minimum of six bits for each of 8 x 32 values."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat((first & 63, third & 15 | first >> 2 & 48), dim=1)
    minimum = torch.cat((second & 63, third >> 4 | second >> 2 & 48), dim=1)
    grouped: Tensor = values.unflatten(1, (8, 32)) * (_half(blocks, 0) * scale)[..., None]
    return grouped.sub_((_half(blocks, 2) * minimum)[..., None]).flatten(1)


def _decode_q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128], 64)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    high = blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts[:, None] & 3
    values = (low | high.flatten(1) << 4).float() - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
    grouped: Tensor = values.unflatten(1, (16, 16)).mul_(scale[..., None])
    return grouped.flatten(1)


BLOCK_FORMATS = {
    known.name: known
    for known in (
        BlockFormat("Q4_1", 32, 20, (0, 2), _decode_q4_1),
        BlockFormat("Q5_0", 32, 22, (0,), _decode_q5_0),
        BlockFormat("Q5_1", 32, 24, (0, 2), _decode_q5_1),
        BlockFormat("Q4_K", 256, 144, (0, 2), _decode_q4_k),
        BlockFormat("Q5_K", 256, 176, (0, 2), _decode_q5_k),
        BlockFormat("Q6_K", 256, 210, (208,), _decode_q6_k),
    )
}
