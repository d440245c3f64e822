"""Which positions of a canvas keep their draw, by how confident each is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dgemma.diffusion.reading import Reading

# Shapes: all [rows, canvas]. `free` is False where a position is fixed from outside.


class Score(Protocol):
    def __call__(self, reading: Reading) -> Tensor:
        """How unsure a position is: smaller is surer."""
        ...


class Acceptance(Protocol):
    def __call__(self, unsure: Tensor, free: Tensor) -> Tensor:
        """True where the drawn token is kept; only free positions count."""
        ...


@dataclass(frozen=True)
class EntropyScore:
    def __call__(self, reading: Reading) -> Tensor:
        return reading.entropy


@dataclass(frozen=True)
class SurpriseScore:
    """Minus the log-probability of the guess."""

    def __call__(self, reading: Reading) -> Tensor:
        return reading.log_mass - reading.top_logit


@dataclass(frozen=True, kw_only=True)
class EntropyBound:
    """The reference's: the surest positions whose summed entropy, without their largest, stays within
    `bound`. That bounds their mutual information, so they may be drawn independently. At least one."""

    bound: float = 0.1

    def __call__(self, unsure: Tensor, free: Tensor) -> Tensor:
        ordered, order = torch.where(free, unsure, float("inf")).sort(-1)
        kept = (ordered.cumsum(-1) - ordered) <= self.bound
        return torch.zeros_like(kept).scatter(-1, order, kept) & free


@dataclass(frozen=True, kw_only=True)
class ConfidenceThreshold:
    """Every position at most this unsure; the surest one at least."""

    at_most: float

    def __call__(self, unsure: Tensor, free: Tensor) -> Tensor:
        masked = torch.where(free, unsure, float("inf"))
        surest = torch.zeros_like(free).scatter(-1, masked.argmin(-1, keepdim=True), True)
        return ((masked <= self.at_most) | surest) & free


@dataclass(frozen=True, kw_only=True)
class FixedCount:
    """The surest `count` positions."""

    count: int

    def __call__(self, unsure: Tensor, free: Tensor) -> Tensor:
        order = torch.where(free, unsure, float("inf")).sort(-1).indices
        rank = torch.arange(unsure.shape[-1], device=unsure.device).expand_as(order)
        return torch.zeros_like(free).scatter(-1, order, rank < self.count) & free
