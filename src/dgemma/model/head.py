"""The vocabulary end of the stack, whole or a tile of words at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.model.weight import ALL, Matrix

# Shapes: hidden states are [rows, tokens, hidden], words = the vocabulary or the tile asked for.


@dataclass(frozen=True)
class Head:
    """The tied embedding as it is used behind the last layer."""

    embedding: Matrix
    logit_cap: float
    embedding_scale: float

    @property
    def vocab_size(self) -> int:
        return self.embedding.out_features

    def products(self, hidden: Tensor, words: slice = ALL) -> Tensor:
        """Bare products [rows, tokens, words] in the model's dtype."""
        return self.embedding.multiply(hidden, words)

    def logits(self, hidden: Tensor, words: slice = ALL) -> Tensor:
        """Soft-capped fp32 logits [rows, tokens, words]."""
        return torch.tanh(self.products(hidden, words).float() / self.logit_cap) * self.logit_cap

    def mix(self, shares: Tensor, words: slice = ALL) -> Tensor:
        """The embeddings of `words` weighed by `shares` [rows, tokens, words], not scaled yet."""
        return self.embedding.mix_rows(shares.to(self.embedding.dtype), words)
