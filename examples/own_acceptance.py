"""Replace a rule of the sampler: accept every draw, and see what that saves in steps and costs in text.

python examples/own_acceptance.py bundled:text
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from torch import Tensor

import dgemma


@dataclass(frozen=True)
class AcceptAll:
    """Accept what was sampled at every free position; the reference renoises where it is unsure."""

    def __call__(self, unsure: Tensor, free: Tensor) -> Tensor:
        return free


def main(path: str) -> None:
    lm = dgemma.load(path)
    samplers = {
        "the reference's rule": dgemma.Sampler(num_steps=48),
        "accept all": dgemma.Sampler(num_steps=48, accept=AcceptAll()),
    }
    for name, sampler in samplers.items():
        answer = lm.generate("The file ", max_tokens=64, seed=1, sampler=sampler)
        print(f"{name}: steps {answer.steps}, {answer.tokens_per_forward:.1f} tokens per forward")
        print(f"  {answer.text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
