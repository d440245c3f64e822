"""The chunked cross-entropy never holds the logits of all positions.

Measured in a process of its own, which is this file run by itself: after four thousand other tests the
growth of one of them cannot be told (it has read 770 MB there and reads 134 MB alone).
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from dgemma.bench.memory import peak_growth_bytes
from dgemma.model.linear import PlainLinear
from dgemma.model.transformer import Head
from dgemma.training.objective import block_rows, cross_entropy
from sizes import full

POSITIONS, WORDS, HIDDEN = 256, 262_144, 16  # 268 MB of fp32 logits; more with their gradients


def peak_bytes(max_logits: int) -> int | None:
    """What a loss and its gradients need at their peak, holding at most `max_logits` numbers at once."""
    cpu = torch.device("cpu")
    matrix = PlainLinear(WORDS, HIDDEN, dtype=torch.float32, device=cpu)
    torch.nn.init.normal_(matrix.weight, std=0.3)
    matrix.requires_grad_(False)
    head = Head(matrix, 30.0, HIDDEN**0.5)
    rows = max_logits // WORDS

    def run(positions: int = POSITIONS) -> None:
        hidden = torch.randn(positions, HIDDEN, requires_grad=True)
        cross_entropy(head, hidden, torch.zeros(positions, dtype=torch.int64), rows).sum().backward()

    run(8)  # libraries set themselves up
    return peak_growth_bytes(run, cpu)


@pytest.mark.parametrize(("words", "rows"), [(22, 285_975), (6_144, 1_024), (262_144, 128), (1 << 26, 1)])
def test_a_block_is_small_but_reads_a_large_vocabulary_for_many_rows(words: int, rows: int) -> None:
    assert (
        block_rows(Head(PlainLinear(words, 1, dtype=torch.float32, device=torch.device("meta")), 30.0, 1.0))
        == rows
    )


@full
def test_the_vocabulary_is_never_held_for_all_positions() -> None:
    def measured(max_logits: int) -> int:
        asked = [sys.executable, __file__, str(max_logits)]
        # Otherwise glibc keeps freed blocks of less than 32 MB in a heap, where they count as used.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
        done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True)
        return int(done.stdout)

    at_once = measured(POSITIONS * WORDS)
    assert at_once > 500e6  # the measurement sees them
    assert measured(4 << 20) < 0.3 * at_once  # 16 positions at a time


if __name__ == "__main__":
    print(peak_bytes(int(sys.argv[1])))
