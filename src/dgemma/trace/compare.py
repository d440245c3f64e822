"""Where two traces part: the first step and position, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dgemma.params import GenerationParams
from dgemma.trace.trace import CENTINATS, Trace, TraceCommit, TraceRequest, TraceStep


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The first thing that differs."""

    what: str  # "argmax", "accepted", "drawn", "steps", "commit", "text", "requests", "canvas length"
    first: Any
    second: Any
    request: int = 0
    canvas: int | None = None
    step: int | None = None
    position: int | None = None  # of the canvas
    count: int = 0  # positions of this step that differ in it
    entropy: tuple[float, float] | None = None  # of this position in both, in nats

    def __str__(self) -> str:
        names = ("request", "canvas", "step", "position")
        at = ", ".join(f"{name} {getattr(self, name)}" for name in names if getattr(self, name) is not None)
        return f"{at}: {self.what} {self.first!r} against {self.second!r}"


@dataclass(frozen=True, kw_only=True)
class TraceDiff:
    """How two traces differ.

    about: facts of model, machine and versions, and options of requests, that differ: name, first, second.
    entropy: the largest difference of entropies before they part, in nats.
    steps: compared and equal.
    """

    about: tuple[tuple[str, Any, Any], ...] = ()
    parting: Parting | None = None
    entropy: float = 0.0
    steps: int = 0

    @property
    def is_same(self) -> bool:
        """Token for token; facts and options may differ."""
        return self.parting is None


def compare(first: Trace, second: Trace) -> TraceDiff:
    facts = tuple(_different_facts(first, second))
    steps, entropy = 0, 0
    if len(first.requests) != len(second.requests):
        counts = Parting(what="requests", first=len(first.requests), second=len(second.requests))
        return TraceDiff(about=facts, parting=counts)
    for number, (own, other) in enumerate(zip(first.requests, second.requests, strict=True)):
        for a, b in zip(own.steps, other.steps, strict=False):
            if (parting := _parting(number, a, b)) is not None:
                return TraceDiff(about=facts, parting=parting, entropy=entropy / CENTINATS, steps=steps)
            steps += 1
            entropy = max([entropy, *(abs(x - y) for x, y in zip(a.entropy, b.entropy, strict=True))])
        if (end := _different_end(number, own, other)) is not None:
            return TraceDiff(about=facts, parting=end, entropy=entropy / CENTINATS, steps=steps)
    return TraceDiff(about=facts, entropy=entropy / CENTINATS, steps=steps)


def _different_facts(first: Trace, second: Trace) -> Iterator[tuple[str, Any, Any]]:
    own, other = _flat(first.about), _flat(second.about)
    for name in own | other:
        if own.get(name) != other.get(name) and name != "made":
            yield name, own.get(name), other.get(name)
    for number, (a, b) in enumerate(zip(first.requests, second.requests, strict=False)):
        where = f"request {number}: " if len(first.requests) > 1 else ""
        for part in fields(GenerationParams):
            values = getattr(a.request.params, part.name), getattr(b.request.params, part.name)
            # A deadline changes no token, unless it ends the answer, which is seen there.
            if values[0] != values[1] and part.name != "deadline_s":
                yield f"{where}{part.name}", *values
        for name in ("seed", "prompt", "pinned", "adapter", "logit_bias"):
            values = getattr(a.request, name), getattr(b.request, name)
            if values[0] != values[1]:
                yield f"{where}{name}", *values
        if a.constraint != b.constraint:
            yield f"{where}response format", a.constraint, b.constraint
    yield from _different_text(first, second)


def _different_text(first: Trace, second: Trace) -> Iterator[tuple[str, Any, Any]]:
    """The first token of the first trace that the two tokenizers spell differently."""
    common = first.texts.keys() & second.texts.keys()
    changed = {token for token in common if first.texts[token] != second.texts[token]}
    for place, tokens in _tokens(first) if changed else ():
        for position, token in enumerate(tokens):
            if token in changed:
                name = f"text of token {token} ({len(changed)} such), first at {place}, position {position}"
                yield name, first.texts[token], second.texts[token]
                return


def _tokens(trace: Trace) -> Iterator[tuple[str, Sequence[int]]]:
    """All tokens of a trace in their order, with their places."""
    for number, request in enumerate(trace.requests):
        yield f"request {number}, prompt", request.request.prompt
        for step in request.steps:
            yield f"request {number}, canvas {step.canvas}, step {step.step}", step.argmax


def _flat(about: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(about, dict):
        return {name: about}
    found: dict[str, Any] = {}
    for key, value in about.items():
        found |= _flat(value, f"{name} {key}".strip())
    return found


def _parting(number: int, a: TraceStep, b: TraceStep) -> Parting | None:
    place = {"request": number, "canvas": a.canvas, "step": a.step}
    if (a.canvas, a.step) != (b.canvas, b.step):
        return Parting(what="step", first=(a.canvas, a.step), second=(b.canvas, b.step), request=number)
    if len(a.argmax) != len(b.argmax):
        return Parting(what="canvas length", first=len(a.argmax), second=len(b.argmax), request=number)
    for what, own, other in (
        ("argmax", dict(enumerate(a.argmax)), dict(enumerate(b.argmax))),
        ("drawn", dict(zip(a.accepted, a.drawn, strict=True)), dict(zip(b.accepted, b.drawn, strict=True))),
    ):
        places = sorted(at for at in own.keys() | other.keys() if own.get(at) != other.get(at))
        if places:
            at = places[0]
            return Parting(
                what=what,
                first=own.get(at),
                second=other.get(at),
                position=at,
                count=len(places),
                entropy=(a.entropy[at] / CENTINATS, b.entropy[at] / CENTINATS),
                **place,
            )
    return None


def _different_end(number: int, a: TraceRequest, b: TraceRequest) -> Parting | None:
    if len(a.steps) != len(b.steps):
        return Parting(what="number of steps", first=len(a.steps), second=len(b.steps), request=number)
    for own, other in zip(a.commits, b.commits, strict=False):
        if own != other:
            return Parting(
                what="commit", first=_shown(own), second=_shown(other), request=number, canvas=own.canvas
            )
    if len(a.commits) != len(b.commits):
        return Parting(what="number of commits", first=len(a.commits), second=len(b.commits), request=number)
    if (a.answer is None) != (b.answer is None):
        return Parting(what="answer", first=a.answer is not None, second=b.answer is not None, request=number)
    for name in ("tokens", "text", "finish_reason"):
        own_value, other_value = getattr(a.answer, name, None), getattr(b.answer, name, None)
        if own_value != other_value:
            return Parting(what=name, first=own_value, second=other_value, request=number)
    return None


def _shown(commit: TraceCommit) -> tuple[Any, ...]:
    return commit.tokens, commit.steps, commit.accepted
