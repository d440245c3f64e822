"""The temperature of each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Schedule(Protocol):
    def __call__(self, steps_left: Tensor, num_steps: int) -> Tensor:
        """fp32 temperature for `steps_left` (num_steps at the first step, 1 at the last)."""
        ...


@dataclass(frozen=True, kw_only=True)
class LinearSchedule:
    """From t_max at the first step towards t_min, which is never quite reached."""

    t_min: float = 0.4
    t_max: float = 0.8

    def __call__(self, steps_left: Tensor, num_steps: int) -> Tensor:
        return self.t_min + (self.t_max - self.t_min) * (steps_left / num_steps)
