"""Running top-k over blocks of the vocabulary, and the logit floors of `top_k` and `top_p` sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Shapes: rows = canvases, canvas = positions, n = tokens kept.

NUCLEUS = 1024
"""`top_p` sampling searches its nucleus among this many tokens."""


class TopK(NamedTuple):
    """The n most likely tokens, most likely first; both [rows, canvas, n]."""

    tokens: Tensor
    logits: Tensor  # scaled; minus the log mass they are log-probabilities


class RunningTopK:
    """The `count` most likely tokens of the blocks added so far."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.tokens: Tensor | None = None  # [rows, canvas, n]
        self.logits: Tensor  # [rows, canvas, n], descending

    def add(self, scaled: Tensor, tokens: slice) -> None:
        top = scaled.topk(min(self.count, scaled.shape[-1]), dim=-1)
        self._take(top.values, top.indices + tokens.start)

    def _take(self, logits: Tensor, tokens: Tensor) -> None:
        if self.tokens is not None:
            logits = torch.cat((self.logits, logits), dim=-1)
            tokens = torch.cat((self.tokens, tokens), dim=-1)
        # Stable: of equal logits the smaller token id stays first.
        logits, order = logits.sort(dim=-1, descending=True, stable=True)
        self.logits = logits[..., : self.count]
        self.tokens = tokens.gather(-1, order)[..., : self.count]

    def of(self, tokens: Tensor, logits: Tensor) -> RunningTopK:
        """One with these tokens."""
        other = RunningTopK(self.count)
        other.tokens, other.logits = tokens, logits
        return other

    @staticmethod
    def join(parts: Sequence[RunningTopK]) -> TopK:
        first = parts[0]
        for part in parts[1:]:
            assert part.tokens is not None
            first._take(part.logits, part.tokens)
        assert first.tokens is not None
        return TopK(first.tokens, first.logits)


def truncation_floor(top_k_tokens: TopK, log_mass: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """The smallest scaled logit [rows, canvas] that may still be sampled."""
    logits = top_k_tokens.logits
    kept = torch.full_like(log_mass, logits.shape[-1] - 1, dtype=torch.int64)
    if top_k is not None:
        kept = kept.clamp(max=top_k - 1)
    if top_p is not None:
        # A token stays while those before it have not reached p. The first always stays, also where p is
        # so small that fp32 rounds it to 0.
        shares = (logits - log_mass[..., None]).exp()
        before = shares.cumsum(-1) - shares
        kept = torch.minimum(kept, (before < top_p).sum(-1) - 1).clamp(min=0)
    return logits.gather(-1, kept[..., None]).squeeze(-1)
