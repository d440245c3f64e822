"""A trace as a sequence of pictures: what stands at each position after each step, and how sure it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dgemma.trace.trace import CENTINATS, Trace, TraceCommit, TraceRequest, TraceStep
from dgemma.trace.visible import visible

State = Literal["noise", "accepted", "pinned", "final", "corrected"]
# At most so many nats: sure, likely, unsure; above: open. ln 2 is a toss-up between two tokens.
SURE, LIKELY, UNSURE = 0.1, 0.7, 2.0


@dataclass(frozen=True)
class Cell:
    """A position: the token that the model would write there.

    state: "noise": the canvas holds noise there; "accepted": a token that was drawn; "pinned": given;
      "final": committed; "corrected": committed, and written by the causal pass in place of the draft's.
    """

    text: str
    nats: float
    state: State
    is_changed: bool = False  # another token than after the step before

    @property
    def ends_line(self) -> bool:
        """A line's end that is at least likely: others come and go with each step."""
        return self.text.endswith("\u21b5") and self.level < 2

    @property
    def level(self) -> int:
        """From 0, sure, to 3, open."""
        return sum(self.nats > limit for limit in (SURE, LIKELY, UNSURE))


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A canvas after a step, or what was committed of it; `before` is the text of the answer before it."""

    canvas: int
    step: int
    num_steps: int  # of this canvas
    at_ms: float
    before: str
    cells: tuple[Cell, ...]
    is_commit: bool = False
    is_whole: bool = False  # all that was committed of an answer whose drafts were verified

    @property
    def title(self) -> str:
        if self.is_whole:
            kept = sum(cell.state == "final" for cell in self.cells)
            return f"{kept} tokens of drafts, {len(self.cells) - kept} by the causal pass"
        if self.is_commit:
            corrected = any(cell.state == "corrected" for cell in self.cells)
            accepted = sum(cell.state == "final" for cell in self.cells)
            if corrected:
                return f"canvas {self.canvas + 1}, verified: {accepted} accepted, 1 by the causal pass"
            return f"canvas {self.canvas + 1}, final, {self.num_steps} steps"
        sure = sum(cell.level == 0 for cell in self.cells)
        share = round(100 * sure / len(self.cells)) if self.cells else 100
        return f"canvas {self.canvas + 1}, step {self.step}/{self.num_steps}, {share} % sure"


def make_frames(trace: Trace, request: TraceRequest) -> list[Frame]:
    """Every step of a request, and every commit after the steps of its canvas."""
    frames: list[Frame] = []
    before: list[str] = []
    steps_of: dict[int, list[TraceStep]] = {}
    for step in request.steps:
        steps_of.setdefault(step.canvas, []).append(step)
    commits: dict[int, list[TraceCommit]] = {}
    for commit in request.commits:
        commits.setdefault(commit.canvas, []).append(commit)
    ends = () if request.request.params.ignore_end else request.request.params.end_tokens
    for canvas in sorted(steps_of.keys() | commits.keys()):
        own, text = steps_of.get(canvas, []), "".join(before)
        last: TraceStep | None = None
        for step in own:
            frames.append(
                Frame(
                    canvas=canvas,
                    step=step.step,
                    num_steps=len(own),
                    at_ms=step.at_ms,
                    before=text,
                    cells=_cells(trace, step, last, ends),
                )
            )
            last = step
        for commit in commits.get(canvas, []):
            frames.append(
                Frame(
                    canvas=canvas,
                    step=len(own),
                    num_steps=len(own),
                    at_ms=own[-1].at_ms if own else 0.0,
                    before="".join(before),
                    cells=_committed(trace, commit, ends),
                    is_commit=True,
                )
            )
            before += [trace.text(token) for token in commit.tokens if token not in ends]
    if any(commit.accepted is not None for commit in request.commits):
        cells = [cell for commit in request.commits for cell in _committed(trace, commit, ends)]
        last_frame = frames[-1]
        whole = replace(last_frame, before="", cells=tuple(cells), is_commit=True, is_whole=True)
        frames.append(whole)
    return frames


def _cells(trace: Trace, step: TraceStep, last: TraceStep | None, ends: tuple[int, ...]) -> tuple[Cell, ...]:
    accepted, pinned = dict(zip(step.accepted, step.drawn, strict=True)), set(step.pinned)
    found = []
    for at, token in enumerate(step.argmax):
        if token in ends:  # nothing after the end is part of the answer
            break
        state: State = "pinned" if at in pinned else "accepted" if at in accepted else "noise"
        found.append(
            Cell(
                text=visible(trace.text(token)),
                nats=step.entropy[at] / CENTINATS,
                state=state,
                is_changed=last is not None and last.argmax[at] != token,
            )
        )
    return tuple(found)


def _committed(trace: Trace, commit: TraceCommit, ends: tuple[int, ...]) -> tuple[Cell, ...]:
    return tuple(
        Cell(
            text=visible(trace.text(token)),
            nats=0.0,
            # A token that is written left to right has taken no steps and no draft.
            state="final"
            if (commit.steps > 0 if commit.accepted is None else at < commit.accepted)
            else "corrected",
        )
        for at, token in enumerate(commit.tokens)
        if token not in ends
    )
