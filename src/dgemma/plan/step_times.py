"""How long a step of an engine takes, by what it computes: from a data sheet, or measured here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dgemma.bench.devices import Device
from dgemma.bench.predict import engine_step_seconds
from dgemma.model.config import ModelConfig

# Contexts and prompts are rounded to these: a step's time depends little on them, and is asked for often.
_CONTEXT_UNIT, _ENCODED_UNIT = 256, 64


class StepTimes(Protocol):
    def seconds(self, rows: int, encoded: int, context: int) -> float:
        """rows: canvases, or left-to-right sequences. encoded: prompt and committed tokens. context: mean."""
        ...


@dataclass
class PredictedTimes:
    """By the cost model of `dgemma bench --predict`. causal: a left-to-right model of the same size."""

    config: ModelConfig
    device: Device
    weight_format: str
    causal: bool = False
    _known: dict[tuple[int, int, int], float] = field(default_factory=dict, repr=False)

    def seconds(self, rows: int, encoded: int, context: int) -> float:
        key = rows, -(-encoded // _ENCODED_UNIT), -(-context // _CONTEXT_UNIT)
        if key not in self._known:
            self._known[key] = engine_step_seconds(
                self.config,
                self.device,
                self.weight_format,
                canvases=0 if self.causal else rows,
                causal=rows if self.causal else 0,
                encoded=key[1] * _ENCODED_UNIT,
                context=key[2] * _CONTEXT_UNIT,
            )
        return self._known[key]


@dataclass(frozen=True)
class MeasuredTimes:
    """Of an engine that was measured: a step by its canvases, and what encoding tokens adds.

    by_rows: pairs of canvases and seconds, in order; between them it is linear.
    """

    by_rows: Sequence[tuple[float, float]]
    encode_s: float  # what encoding anything adds to a step of canvases
    token_s: float  # each encoded token
    encode_alone_s: float = 0.0  # a step without canvases

    def seconds(self, rows: int, encoded: int, context: int) -> float:
        found = self._of_rows(rows) if rows else self.encode_alone_s
        return found + (self.encode_s * (rows > 0) + encoded * self.token_s if encoded else 0.0)

    def _of_rows(self, rows: int) -> float:
        counts = [count for count, _ in self.by_rows]
        at = min(max(bisect_left(counts, rows), 1), len(counts) - 1)
        (low, low_s), (high, high_s) = self.by_rows[at - 1], self.by_rows[at]
        return low_s + (rows - low) * (high_s - low_s) / (high - low)
