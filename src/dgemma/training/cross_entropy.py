"""Cross-entropy and soft embeddings that never hold [all positions, vocabulary]."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dgemma.model.head import Head

# Shapes: n = positions, words = vocabulary.

# Numbers of one block of logits: 32 M are 134 MB in fp32, held a few times over while it is worked on.
MAX_LOGITS = 32 << 20


def block_rows(head: Head, max_logits: int = MAX_LOGITS) -> int:
    """Positions whose logits are held at once."""
    return max(1, max_logits // head.vocab_size)


def cross_entropy(head: Head, hidden: Tensor, targets: Tensor, rows: int) -> Tensor:
    """-log p(target) per position [n] for `hidden` [n, hidden], `rows` positions at a time.

    The logits of a block are made again for the backward pass instead of being kept. If all positions
    fit into one block, they are kept: nothing is gained by making them twice.
    """
    if hidden.shape[0] <= rows:
        return _entropy(head, hidden, targets)
    losses = [
        checkpoint(_entropy, head, part, wanted, use_reentrant=False, preserve_rng_state=False)
        for part, wanted in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat(losses)


def _entropy(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head.logits(hidden), targets, reduction="none")


@torch.no_grad()
def soft_embedding(head: Head, hidden: Tensor, rows: int) -> Tensor:
    """The mean embedding [n, hidden] under the plain soft-capped logits, `rows` positions at a time."""
    dtype = head.embedding.dtype
    parts = [
        # The cast to the weights' dtype before the softmax is the reference's.
        head.mix(head.logits(part).to(dtype).softmax(-1, torch.float32))
        for part in hidden.split(rows)
    ]
    return torch.cat(parts) * head.embedding_scale
