"""An axis of a chart: where a value stands between 0 and 1, and which values get a tick. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LOG_FROM_RATIO = 50.0
_TINY = 1e-100  # counts as 0
_RARE = 0.005  # this share of the values at either end may leave the chart: one spike must not flatten it


@dataclass(frozen=True, kw_only=True)
class Axis:
    """From `low` to `high`, which differ; if `log`, both are positive and at least a decade apart."""

    low: float
    high: float
    log: bool = False
    whole: bool = False
    """Between two whole numbers there is nothing, and no tick."""

    def place(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        if self.log:
            value = max(value, self.low / 10)  # what has no logarithm stands below the chart
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Round values inside, at most about `most`, with their labels."""
        if not self.log:
            return self._linear_ticks(most)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            values = [digit * 10.0**k for k in decades for digit in digits]
            inside = [value for value in values if self.low <= value <= self.high]
            if len(inside) <= most:
                break
        return [(value, label(value, value)) for value in inside[:: math.ceil(len(inside) / most)]]

    def _linear_ticks(self, most: int) -> list[tuple[float, str]]:
        rough = (self.high - self.low) / most
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next((digit * unit for digit in (1, 2, 5) if digit * unit >= rough), 10 * unit)
        step = max(step, 1.0) if self.whole else step
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(k * step, label(k * step, step)) for k in range(first, last + 1)]


def value_axis(values: Sequence[float], *, must_show: Sequence[float] = (), may_log: bool = True) -> Axis:
    """An axis for finite `values`; all of `must_show` are inside."""
    ordered = sorted(values)
    rare = int(len(ordered) * _RARE)
    shown = sorted([*ordered[rare : len(ordered) - rare], *must_show])
    low, high = (shown[0], shown[-1]) if shown else (0.0, 1.0)
    largest = max(-low, high)
    if largest < _TINY:
        return Axis(low=0.0, high=1.0)
    if may_log and low > _TINY and high / low > _LOG_FROM_RATIO:
        room = (high / low) ** 0.05
        return Axis(low=low / room, high=high * room, log=True)
    if 0 <= low < 0.5 * high:  # near enough to 0: heights can then be compared
        return Axis(low=0.0, high=1.06 * high)
    room = 0.06 * (high - low) if high - low > 1e-6 * largest else 0.1 * largest
    return Axis(low=low - room, high=high + room)


def step_axis(first: int, last: int, *, log: bool) -> Axis:
    if first == last:
        return Axis(low=first - 1, high=last + 1, whole=True)
    if log:
        return Axis(low=max(first, 1), high=last, log=True, whole=True)
    return Axis(low=0 if first <= 0.1 * last else first, high=last, whole=True)


def label(value: float, step: float) -> str:
    """`value` as a person writes it, exact to the tick distance `step`."""
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)) + 1e-9)
    resolution = math.floor(math.log10(step) + 1e-9)
    if not -3 <= size < 9:
        mantissa, _, exponent = f"{value:.{max(0, size - resolution)}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    if size >= 6 and resolution >= 5:
        return f"{value / 1e6:.{6 - min(resolution, 6)}f}M"
    if resolution >= 3:
        return f"{value / 1e3:.0f}k"
    return f"{value:,.{max(0, -resolution)}f}"
