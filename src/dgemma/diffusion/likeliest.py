"""The likeliest words met so far, and the floors that `top_k` and `top_p` draw from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dgemma.diffusion.reading import Likeliest

# Shapes: rows = canvases, canvas = positions, n = likeliest words kept.

NUCLEUS = 1024
"""`top_p` looks for its nucleus among so many words."""


class RunningLikeliest:
    """The `count` likeliest words of the blocks given so far."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.words: Tensor | None = None  # [rows, canvas, n]
        self.logits: Tensor  # [rows, canvas, n], falling

    def add(self, scaled: Tensor, words: slice) -> None:
        top = scaled.topk(min(self.count, scaled.shape[-1]), dim=-1)
        self._take(top.values, top.indices + words.start)

    def _take(self, logits: Tensor, words: Tensor) -> None:
        if self.words is not None:
            logits = torch.cat((self.logits, logits), dim=-1)
            words = torch.cat((self.words, words), dim=-1)
        # Stable: of equal words the one with the smaller number stays ahead.
        logits, order = logits.sort(dim=-1, descending=True, stable=True)
        self.logits = logits[..., : self.count]
        self.words = words.gather(-1, order)[..., : self.count]

    @staticmethod
    def join(parts: Sequence[RunningLikeliest]) -> Likeliest:
        first = parts[0]
        for part in parts[1:]:
            assert part.words is not None
            first._take(part.logits, part.words)
        assert first.words is not None
        return Likeliest(first.words, first.logits)


def truncation_floor(
    likeliest: Likeliest, log_mass: Tensor, top_k: int | None, top_p: float | None
) -> Tensor:
    """The smallest scaled logit [rows, canvas] that may still be drawn."""
    logits = likeliest.logits
    kept = torch.full_like(log_mass, logits.shape[-1] - 1, dtype=torch.int64)
    if top_k is not None:
        kept = kept.clamp(max=top_k - 1)
    if top_p is not None:
        # A word stays while those before it have not reached p. The first always does, also where p is so
        # small that fp32 takes it for 0.
        shares = (logits - log_mass[..., None]).exp()
        before = shares.cumsum(-1) - shares
        kept = torch.minimum(kept, (before < top_p).sum(-1) - 1).clamp(min=0)
    return logits.gather(-1, kept[..., None]).squeeze(-1)
