"""Computes what was decided: one pass over the weights for everybody. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.model.context import Fresh
from dgemma.model.row_contexts import RowPast, join_rows
from dgemma.model.stack import DenoisePart, EncodePart, Stack


@dataclass(frozen=True)
class Piece:
    """Tokens that join a row's context."""

    tokens: Sequence[int]
    past: RowPast
    canvas: RowPast | None = None  # of a canvas right behind it that is refined now: with a gap for `tokens`


@dataclass(frozen=True)
class Encoded:
    """What came of a piece: row `row` of `fresh`, behind `skip` tokens of padding."""

    hidden: Tensor  # [tokens, hidden]: behind each of its tokens
    fresh: Fresh
    row: int
    skip: int


@dataclass(frozen=True)
class Canvases:
    """Canvases to be refined together."""

    tokens: Tensor  # [rows, canvas]
    soft: Tensor  # [rows, canvas, hidden]
    pasts: Sequence[RowPast]


@torch.inference_mode()
def forward(
    stack: Stack, pieces: Sequence[Piece], canvases: Canvases | None
) -> tuple[list[Encoded], Tensor | None]:
    """-> what each piece gave, and the hidden states of the canvases [rows, canvas, hidden]."""
    device = stack.norm.weight.device
    block = stack.execution.encode_block if stack.execution.exact else 1
    skips = [piece.past.length % block for piece in pieces]
    widths = [-(-(s + len(p.tokens)) // block) * block for s, p in zip(skips, pieces, strict=True)]
    # Pieces of one width stand in rows without padding.
    groups = [[i for i, w in enumerate(widths) if w == width] for width in dict.fromkeys(widths)]
    parts: list[EncodePart | DenoisePart] = []
    for group in groups:
        rows = [pieces[i] for i in group]
        lead, counts = tuple(skips[i] for i in group), tuple(len(row.tokens) for row in rows)
        tokens = torch.zeros(len(group), widths[group[0]], dtype=torch.int64)
        for number, (row, skip, count) in enumerate(zip(rows, lead, counts, strict=True)):
            tokens[number, skip : skip + count] = torch.tensor(row.tokens)
        context = join_rows([row.past for row in rows], device, [row.canvas for row in rows])
        parts.append(EncodePart(tokens.to(device), context, lead, counts))
    if canvases is not None:
        parts.append(DenoisePart(canvases.tokens, join_rows(canvases.pasts, device), canvases.soft))
    results = stack.forward(parts) if parts else []
    encoded: dict[int, Encoded] = {}
    for group, (hidden, fresh) in zip(groups, results, strict=False):
        for number, i in enumerate(group):
            end = skips[i] + len(pieces[i].tokens)
            encoded[i] = Encoded(hidden[number, skips[i] : end], fresh, number, skips[i])
    in_order = [encoded[i] for i in range(len(pieces))]
    return in_order, None if canvases is None else results[-1][0]
