"""When a canvas is settled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

# Shapes: rows = canvases.


class Stop(Protocol):
    def __call__(self, unchanged: Tensor, entropy: Tensor, free: Tensor) -> Tensor:
        """True [rows] where a canvas is settled.

        `unchanged` [rows]: for how many steps the guess has stayed the same; `entropy` and `free`
        [rows, canvas]: only free positions count.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class StableAndConfident:
    """The guess equals that of each of the last `stability` steps, and the mean entropy is low."""

    stability: int = 1
    confidence: float = 0.005

    def __call__(self, unchanged: Tensor, entropy: Tensor, free: Tensor) -> Tensor:
        mean = (entropy * free).sum(-1) / free.sum(-1).clamp(min=1)
        return (unchanged >= self.stability) & (mean < self.confidence)
