"""Where a runtime's outputs part from ours: the first tensor that differs, its position, and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

# In fp32, of numbers whose size is about 1 to 30. Rounding gives 1e-5; a mistake gives 1e-2 and more.
TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """The first tensor that differs."""

    name: str  # such as "16/canvas/hidden.3"
    position: int  # of the first row that differs
    difference: float  # the largest in this tensor; of tokens the number of those that differ

    @property
    def place(self) -> str:
        """In words."""
        head, *rest = self.name.split("/")
        if head == "seed":
            return SEEDS[rest[0]]
        if head == "step":
            return f"one step of the sampler: {rest[0]}, position {self.position}"
        if head == "generation":
            kind, *numbers = rest[0].split(".")
            if numbers:
                return (
                    f"generation, canvas {numbers[0]}, step {int(numbers[1]) + 1}, position {self.position}"
                )
            return f"generation, {kind}, position {self.position}"
        what = PASSES[rest[0]].format(length=head)
        part = rest[1]
        where = f"layer {part.removeprefix('hidden.')}" if part.startswith("hidden.") else part
        return f"{what}: {where}, position {self.position}"


SEEDS = {
    "repeat": "seeds: the same request and seed have two answers",
    "other": "seeds: every seed has the same answer",
}
PASSES = {
    "prompt": "the causal pass over {length} tokens",
    "canvas": "a canvas after {length} tokens",
    "conditioned": "a self-conditioned canvas after {length} tokens",
    "commit": "committing a canvas after {length} tokens",
    "next": "the canvas after a committed one, {length} tokens before it",
    "first": "the first token after {length} tokens, by the causal pass",
    "opening": "a canvas of one step after {length} tokens",
}


@dataclass(frozen=True, kw_only=True)
class Conformance:
    """One case of one runtime."""

    case: str
    compared: int
    not_compared: tuple[str, ...]  # outputs that the runtime does not show
    largest: float  # difference of all that is compared
    largest_by_pass: dict[str, float]  # of the logits, where the runtime shows them
    parting: FirstDifference | None
    notes: tuple[str, ...] = ()  # why something is not compared, where the runtime says so

    @property
    def not_compared_kinds(self) -> tuple[str, ...]:
        """In words, without the lengths."""
        return tuple(dict.fromkeys(map(_kind, self.not_compared)))

    @property
    def passed(self) -> bool:
        return self.parting is None and self.compared > 0

    def to_json(self) -> dict[str, Any]:
        place = None if self.parting is None else self.parting.place
        return {**asdict(self), "passed": self.passed, "place": place}


def _kind(name: str) -> str:
    head, *rest = name.split("/")
    if head in ("step", "generation", "seed"):
        return {"step": "one step of the sampler", "generation": "a whole generation", "seed": "seeds"}[head]
    what = {"first": "first tokens", "opening": "canvases of one step"}.get(rest[0], f"pass {rest[0]!r}")
    part = "states of the layers" if rest[1].startswith("hidden.") else rest[1]
    return f"{what}: {part}"


def compare(
    case: str,
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    tolerance: float = TOLERANCE,
    notes: tuple[str, ...] = (),
) -> Conformance:
    """In the order of `expected`, in which what comes later depends on what comes before."""
    parting: FirstDifference | None = None
    largest, compared = 0.0, 0
    by_pass: dict[str, float] = {}
    for name, ours in expected.items():
        theirs = found.get(name)
        if theirs is None:
            continue
        compared += 1
        difference, position = _difference(ours, theirs)
        is_token = not ours.is_floating_point()
        if not is_token:
            largest = max(largest, difference)
        if name.endswith("/logits"):
            kind = name.split("/")[1]
            by_pass[kind] = max(by_pass.get(kind, 0.0), difference)
        if parting is None and difference > (0 if is_token else tolerance):
            parting = FirstDifference(name=name, position=position, difference=difference)
    missing = tuple(name for name in expected if name not in found)
    return Conformance(
        case=case,
        compared=compared,
        not_compared=missing,
        largest=largest,
        largest_by_pass=by_pass,
        parting=parting,
        notes=notes,
    )


def _difference(ours: Tensor, theirs: Tensor) -> tuple[float, int]:
    """The largest difference, and the first position that has a tenth of it; of tokens, how many differ."""
    if ours.shape != theirs.shape:
        length = min(len(ours), len(theirs))
        if ours.is_floating_point() or not length:
            return float("inf"), 0
        wrong = (ours[:length] != theirs[:length]).nonzero()[:, 0]
        return float("inf"), int(wrong[0]) if len(wrong) else length
    if not ours.is_floating_point():
        wrong = (ours != theirs).nonzero()[:, 0]
        return float(len(wrong)), int(wrong[0]) if len(wrong) else 0
    distance = (ours.float() - theirs.float()).abs().nan_to_num(nan=float("inf"))
    rows = distance.flatten(1).amax(1) if distance.ndim > 1 else distance
    largest = float(rows.max())
    return largest, int((rows >= min(largest, torch.finfo(torch.float32).max) * 0.1).nonzero()[0, 0])
