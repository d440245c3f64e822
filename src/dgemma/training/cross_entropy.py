"""Cross-entropy and soft embeddings that never hold [all positions, vocabulary]."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dgemma.model.head import Head

# Shapes: n = positions, words = vocabulary.

# Numbers of one block of logits. 6 M are 25 MB in fp32, which the allocator keeps between blocks: larger ones
# go back to the system each time, and their pages are cleared anew (3.5 times as slow, docs/lab-notes.md).
USUAL_LOGITS = 6 << 20
MAX_LOGITS = 32 << 20
MIN_ROWS = 128  # fewer rows would read a large vocabulary's weights too often


def block_rows(head: Head) -> int:
    """Positions whose logits are held at once."""
    usual, most = (size // head.vocab_size for size in (USUAL_LOGITS, MAX_LOGITS))
    return max(1, usual, min(MIN_ROWS, most))


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
