"""The vocabulary end of a step: our walk against the reference's own operations, in turn, bf16 weights.

    python -m benchmarks.vocabulary_end

Head, soft-cap, scaling, draw, entropies, argmax and soft embedding for one canvas of 256 positions over
262,144 words. Memory is the growth of the process's peak while one of them runs, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import write
from dgemma.bench.timing import alternate, ratios, spread
from dgemma.model.linear import PlainLinear
from dgemma.model.transformer import Head
from dgemma.sampling.rng import noise_key
from dgemma.sampling.vocab_scan import BLOCK, ScanOptions, scan_vocab

WORDS, POSITIONS = 262_144, 256


def make(hidden_size: int) -> tuple[Head, Tensor]:
    torch.manual_seed(0)
    matrix = PlainLinear(WORDS, hidden_size, dtype=torch.bfloat16, device=torch.device("cpu"))
    for start in range(0, WORDS, 4096):  # in pieces: making the weights must not set the peak
        matrix.weight[start : start + 4096] = torch.randn(4096, hidden_size) * 0.1
    hidden = torch.randn(1, POSITIONS, hidden_size, dtype=torch.bfloat16)
    return Head(matrix, 30.0, hidden_size**0.5), hidden


def ours(head: Head, hidden: Tensor, tile: int = BLOCK, compiled: bool = False) -> Callable[[], Any]:
    place = noise_key([1], [0], [0], torch.device("cpu"))
    options = ScanOptions(compiled=compiled)
    return lambda: scan_vocab(hidden, head, torch.tensor([0.7]), place, options, tile=tile)


def fused(head: Head, hidden: Tensor) -> Callable[[], Any]:
    run = ours(head, hidden, compiled=True)
    run()  # compiling is not the step's
    return run


def reference(head: Head, hidden: Tensor) -> Callable[[], Any]:
    """What the reference's generate does after its decoder, operation by operation."""
    weight = head.embedding.weight
    assert isinstance(weight, Tensor)

    def run() -> tuple[Tensor, ...]:
        logits = torch.nn.functional.linear(hidden, weight).to(torch.float32)
        logits = torch.tanh(logits / 30.0) * 30.0
        logits = logits / torch.tensor(0.7)
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
        drawn = torch.multinomial(probabilities.view(-1, WORDS), num_samples=1)
        guess = logits.argmax(-1)
        entropy = torch.distributions.Categorical(logits=logits).entropy()  # acceptance
        again = torch.distributions.Categorical(logits=logits).entropy()  # stopping
        feedback = logits.to(torch.bfloat16).softmax(dim=-1, dtype=torch.float32).to(torch.bfloat16)
        soft = torch.matmul(feedback, weight) * head.embedding_scale
        return drawn, guess, entropy, again, soft

    return run


CHILD = """
import sys, torch
from benchmarks.vocabulary_end import fused, make, ours, reference
from dgemma.bench.memory import peak_growth_bytes
head, hidden = make(int(sys.argv[1]))
with torch.inference_mode():
    run = {"plain": ours, "fused": fused, "reference": reference}[sys.argv[2]](head, hidden)
    small = torch.randn(64, 64).bfloat16(); small @ small   # the library's own buffers are not the step's
    print(peak_growth_bytes(run, hidden.device))
"""


def peak_bytes(hidden_size: int, way: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(hidden_size), way], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    findings = {}
    for hidden_size in (1024, 2816):
        head, hidden = make(hidden_size)
        seconds = alternate(
            {
                "fused walk": fused(head, hidden),
                "plain walk": ours(head, hidden),
                "plain walk, tile 16384": ours(head, hidden, 4 * BLOCK),
                "reference": reference(head, hidden),
            },
            args.rounds,
        )
        findings[f"hidden {hidden_size}"] = {
            "seconds": {name: spread(values) for name, values in seconds.items()},
            "against the fused walk": ratios(seconds, "fused walk"),
            "against the plain walk": ratios(seconds, "plain walk"),
            "peak extra bytes": {w: peak_bytes(hidden_size, w) for w in ("plain", "fused", "reference")},
        }
        print(json.dumps(findings[f"hidden {hidden_size}"]["seconds"]), flush=True)
    write("vocabulary_end", {"what": "one canvas of 256, 262,144 words, bf16", "findings": findings})


if __name__ == "__main__":
    main()
