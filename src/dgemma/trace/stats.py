"""What traces say about how canvases settle."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dgemma.trace.trace import Trace, TraceStep

LAST_SHARE = 0.05  # of the positions: how long do the last ones take?


@dataclass(frozen=True, kw_only=True)
class CanvasStats:
    """One canvas. A position settles at the step after which its argmax stays the same.

    revisions: changes of the argmax after the first step, per position.
    late_revisions: those in the second half of the steps.
    settled_at: the step at which each position settles.
    steps_for_the_last: steps after all but a twentieth of the positions have settled.
    """

    steps: int
    positions: int
    revisions: float
    late_revisions: float
    settled_at: tuple[int, ...]
    steps_for_the_last: int

    @property
    def share_for_the_last(self) -> float:
        return self.steps_for_the_last / self.steps


@dataclass(frozen=True, kw_only=True)
class TraceStats:
    """Means over all canvases of some traces.

    left_to_right: the rank correlation of a position's place and its settling step: 1 is left to right, 0 any
      order, -1 right to left.
    settled_by: share of the positions settled by each tenth of the steps.
    """

    canvases: int
    steps: float
    revisions: float
    late_revisions: float
    share_for_the_last: float
    left_to_right: float
    settled_by: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def canvas_stats(steps: Sequence[TraceStep]) -> CanvasStats | None:
    """None: every position is pinned."""
    pinned = set(steps[0].pinned)
    free = [at for at in range(len(steps[0].argmax)) if at not in pinned]
    if not free:
        return None
    changes = [
        [
            number
            for number in range(1, len(steps))
            if steps[number].argmax[at] != steps[number - 1].argmax[at]
        ]
        for at in free
    ]
    settled_at = tuple(1 + max(own, default=0) for own in changes)
    middle = len(steps) / 2
    all_but_last = sorted(settled_at)[max(0, int(len(free) * (1 - LAST_SHARE)) - 1)]
    return CanvasStats(
        steps=len(steps),
        positions=len(free),
        revisions=sum(map(len, changes)) / len(free),
        late_revisions=sum(number >= middle for own in changes for number in own) / len(free),
        settled_at=settled_at,
        steps_for_the_last=len(steps) - all_but_last,
    )


def trace_stats(traces: Iterable[Trace]) -> TraceStats | None:
    """None: there is no canvas."""
    found = [
        stats
        for trace in traces
        for request in trace.requests
        for steps in request.canvases
        if (stats := canvas_stats(steps)) is not None
    ]
    if not found:
        return None
    mean = statistics.fmean
    return TraceStats(
        canvases=len(found),
        steps=mean(one.steps for one in found),
        revisions=mean(one.revisions for one in found),
        late_revisions=mean(one.late_revisions for one in found),
        share_for_the_last=mean(one.share_for_the_last for one in found),
        left_to_right=mean(_order(one.settled_at) for one in found),
        settled_by=tuple(
            mean(sum(10 * at <= tenth * one.steps for at in one.settled_at) / one.positions for one in found)
            for tenth in range(1, 11)
        ),
    )


def _order(settled_at: Sequence[int]) -> float:
    """Spearman's correlation of places and settling steps; 0 where all settle at once."""
    if len(set(settled_at)) < 2:
        return 0.0
    return statistics.correlation(range(len(settled_at)), _ranks(settled_at))


def _ranks(values: Sequence[int]) -> list[float]:
    """Equal values share the mean of their ranks."""
    places: dict[int, list[int]] = {}
    for rank, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(rank)
    return [statistics.fmean(places[value]) for value in values]
