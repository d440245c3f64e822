"""Replace a part of the sampler: keep the draws of every other position, and see what that costs in steps.

python examples/own_acceptance.py my-model
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

import dgemma


@dataclass(frozen=True)
class EveryOther:
    """Accept even positions whatever their confidence, odd ones when they are nearly certain."""

    at_most: float = 0.01

    def __call__(self, unsure: Tensor, free: Tensor) -> Tensor:
        even = torch.arange(unsure.shape[-1], device=unsure.device) % 2 == 0
        return free & (even | (unsure <= self.at_most))


def main(path: str) -> None:
    lm = dgemma.load(path)
    samplers = {
        "the reference's rule": dgemma.Sampler(num_steps=12),
        "every other position": dgemma.Sampler(num_steps=12, accept=EveryOther()),
    }
    for name, sampler in samplers.items():
        answer = lm.generate("The sea is", max_tokens=64, seed=1, sampler=sampler)
        print(f"{name}: steps {answer.steps}, {answer.tokens_per_forward:.1f} tokens per forward")


if __name__ == "__main__":
    main(sys.argv[1])
