"""From a checkpoint's quantized weights to ours: piece by piece, straight to the place and device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dgemma.checkpoint.quantized.entries import CodedEntry, Piece
from dgemma.checkpoint.quantized.meaning import codes_of
from dgemma.checkpoint.safetensors_file import TensorEntry, read_into
from dgemma.errors import CheckpointError
from dgemma.model.codes import Codes

_DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


def read_coded(
    entry: CodedEntry, device: torch.device, on_bytes: Callable[[int], None] = lambda count: None
) -> Codes:
    """The whole weight on `device`. Beside it memory holds one piece: a matrix, or an expert's half."""
    out, inner = entry.piece_shape
    whole: Codes | None = None
    for number, piece in enumerate(entry.pieces):
        codes = _read_piece(entry, piece, out, inner)
        if whole is None:
            whole = _room(codes, entry.shape, device)
        for name, part in whole.parts.items():
            part.view(-1, *part.shape[-1:])[number * out : (number + 1) * out].copy_(codes.parts[name])
        on_bytes(sum(tensor.nbytes for tensor in piece.entries.values()))
    assert whole is not None
    return whole


def _room(piece: Codes, shape: tuple[int, ...], device: torch.device) -> Codes:
    parts = {
        name: torch.empty((*shape[:-1], part.shape[-1]), dtype=part.dtype, device=device)
        for name, part in piece.parts.items()
    }
    return piece.with_parts(parts)


def _read_piece(entry: CodedEntry, piece: Piece, out: int, inner: int) -> Codes:
    parts = {name: read_tensor(found) for name, found in piece.entries.items()}
    try:
        return codes_of(entry.form, parts, out, inner)
    except CheckpointError as error:
        raise CheckpointError(f"{piece.module}: {error}") from None


def read_tensor(entry: TensorEntry) -> Tensor:
    tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
    if entry.nbytes:
        read_into(entry, tensor.view(-1).view(torch.uint8).numpy())
    return tensor
