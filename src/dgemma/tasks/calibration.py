"""Probabilities that mean what they say: one temperature, fitted on labelled examples."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgemma.errors import InputError

Labelled = tuple[Sequence[float], int]
"""Probabilities of a question's choices, and which one was right."""

_BINS = 15
_TINY = 1e-12
_HOTTEST = 100.0
_ENDLESS = 1e18  # no count of examples, and no error, is so large


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """`temperature` above 1: the model was too sure; below: not sure enough."""

    temperature: float = 1.0
    examples: int = 0
    error_before: float | None = None  # expected calibration error on the examples it was fitted on
    error_after: float | None = None

    def apply(self, probabilities: Sequence[float]) -> tuple[float, ...]:
        """The same choice, with another confidence. They sum to 1 again."""
        logs = [math.log(max(p, _TINY)) / self.temperature for p in probabilities]
        top = max(logs)
        total = sum(sorted(math.exp(value - top) for value in logs))
        return tuple(math.exp(value - top) / total for value in logs)

    def save(self, path: str | Path) -> None:
        found = {"kind": "dgemma calibration", "version": 1, **self.__dict__}
        try:
            Path(path).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"the calibration cannot be written to {path}: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        try:
            raw: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path} cannot be read as a calibration: {error}") from None
        if not isinstance(raw, dict) or raw.get("kind") != "dgemma calibration" or raw.get("version") != 1:
            raise InputError(
                f"{path} is not a calibration of version 1; make one with `dgemma decide --fit`."
            )
        heat = raw.get("temperature")
        if (
            not isinstance(heat, int | float)
            or isinstance(heat, bool)
            or not 1 / _HOTTEST <= heat <= _HOTTEST
        ):
            raise InputError(
                f"{path}: temperature is {heat!r}; it must be from {1 / _HOTTEST} to {_HOTTEST}."
            )
        raw_facts = {name: raw.get(name) for name in ("examples", "error_before", "error_after")}
        for name, value in raw_facts.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and abs(value) < _ENDLESS):
                raise InputError(f"{path}: {name} is {value!r}; it must be a number.")
        return cls(
            temperature=float(heat),
            examples=int(raw_facts["examples"] or 0),
            error_before=raw_facts["error_before"],
            error_after=raw_facts["error_after"],
        )


def fit(examples: Sequence[Labelled]) -> Calibration:
    """The temperature under which the right choices are most likely."""
    if len(examples) < 2:
        raise InputError(f"there are {len(examples)} labelled examples; a calibration needs at least 2.")

    def cost(log_heat: float) -> float:
        scaled = Calibration(temperature=math.exp(log_heat))
        return -sum(math.log(max(scaled.apply(p)[right], _TINY)) for p, right in examples)

    low, high = -math.log(_HOTTEST), math.log(_HOTTEST)
    golden = (math.sqrt(5) - 1) / 2
    while high - low > 1e-4:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if cost(left) <= cost(right) else (left, high)
    found = Calibration(temperature=math.exp((low + high) / 2))
    return Calibration(
        temperature=found.temperature,
        examples=len(examples),
        error_before=expected_calibration_error(examples),
        error_after=expected_calibration_error([(found.apply(p), right) for p, right in examples]),
    )


def expected_calibration_error(examples: Sequence[Labelled], bins: int = _BINS) -> float:
    """How far confidence and accuracy are apart, on average over examples, in bins of equal width."""
    groups: dict[int, list[tuple[float, bool]]] = {}
    for probabilities, right in examples:
        sure = max(probabilities)
        hit = probabilities.index(sure) == right if isinstance(probabilities, list | tuple) else False
        groups.setdefault(min(bins - 1, int(sure * bins)), []).append((sure, hit))
    apart = 0.0
    for group in groups.values():
        confidence = sum(sure for sure, _ in group) / len(group)
        accuracy = sum(hit for _, hit in group) / len(group)
        apart += abs(confidence - accuracy) * len(group)
    return apart / max(1, len(examples))
