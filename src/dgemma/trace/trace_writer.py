"""Writes trace files: JSON lines, compressed with gzip. `docs/trace.md` describes them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from dgemma.durable_files import write_whole
from dgemma.engine.request import PinnedTokens
from dgemma.params import GenerationParams
from dgemma.structured_output.response_format import (
    ChoiceFormat,
    JsonFormat,
    RegexFormat,
    ResponseFormat,
    ToolCallFormat,
)
from dgemma.trace.trace import Trace, TraceAnswer, TraceCommit, TraceConstraint, TraceRequest, TraceStep

FORMAT, VERSION = "dgemma-trace", 1
Line = dict[str, Any]


def write_trace(trace: Trace, path: str | Path) -> int:
    """-> the size of the file, in bytes."""
    content = trace_bytes(trace)
    write_whole(Path(path), content)
    return len(content)


def trace_bytes(trace: Trace) -> bytes:
    lines = "\n".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) for line in to_lines(trace))
    return gzip.compress(lines.encode("utf-8", "surrogatepass") + b"\n", mtime=0)


def to_lines(trace: Trace) -> Iterator[Line]:
    writer = LineWriter(lambda token: trace.texts.get(token))
    yield writer.head(trace.about)
    for number, request in enumerate(trace.requests):
        yield from writer.request(number, request)
        for step in request.steps:
            yield from writer.step(number, step)
        for commit in request.commits:
            yield from writer.commit(number, commit)
        if request.answer is not None:
            yield from writer.answer(number, request.answer)
    yield from writer.texts(trace.texts)  # of tokens that no line has
    yield writer.end()


class LineWriter:
    """The lines of a trace, one after another, as things happen. Lines of several requests may mix.

    text_of: the text of a token; None: it has none. A token's text comes before the line that it is first in.
    """

    def __init__(self, text_of: Callable[[int], str | None]) -> None:
        self._text_of = text_of
        self._known: set[int] = set()
        self._last: dict[int, TraceStep] = {}  # of each request
        self._num_lines = 0

    def head(self, about: Mapping[str, Any]) -> Line:
        return self._counted({"format": FORMAT, "version": VERSION, "about": dict(about)})

    def request(self, number: int, request: TraceRequest) -> Iterator[Line]:
        yield from self.texts(request.request.prompt)
        yield self._counted({"request": _request_json(number, request)})

    def step(self, number: int, step: TraceStep) -> Iterator[Line]:
        top = [token for pairs in step.logprobs or () for token, _ in pairs]
        yield from self.texts([*step.argmax, *step.drawn, *top])
        last = self._last.get(number)
        self._last[number] = step
        yield self._counted({"step": {"request": number, **_step_json(step, last)}})

    def commit(self, number: int, commit: TraceCommit) -> Iterator[Line]:
        yield from self.texts(commit.tokens)
        own = _without_defaults(commit, TraceCommit(canvas=0, tokens=(), steps=0))
        yield self._counted({"commit": {"request": number, **own}})

    def answer(self, number: int, answer: TraceAnswer) -> Iterator[Line]:
        yield from self.texts(answer.tokens)
        yield self._counted({"answer": {"request": number, **asdict(answer)}})

    def end(self) -> Line:
        """Without it a trace is incomplete."""
        return {"end": {"lines": self._num_lines}}

    def texts(self, tokens: Iterable[int]) -> Iterator[Line]:
        new = sorted(set(tokens) - self._known)
        self._known.update(new)
        texts = {str(token): text for token in new if (text := self._text_of(token)) is not None}
        if texts:
            yield self._counted({"texts": texts})

    def _counted(self, line: Line) -> Line:
        self._num_lines += 1
        return line


def _step_json(step: TraceStep, last: TraceStep | None) -> dict[str, Any]:
    """Of the argmax what has changed since the last step, of the draws what is not the argmax."""
    found: dict[str, Any] = {"canvas": step.canvas, "step": step.step, "at_ms": step.at_ms}
    if last is not None and last.canvas == step.canvas:
        pairs = enumerate(zip(last.argmax, step.argmax, strict=True))
        found["changed"] = [value for at, (old, new) in pairs if old != new for value in (at, new)]
    else:
        found["argmax"] = step.argmax
        if step.pinned:
            found["pinned"] = step.pinned
    found["entropy"] = step.entropy
    bits = sum(1 << position for position in step.accepted)
    found["accepted"] = f"{bits:x}"
    drawn = zip(step.accepted, step.drawn, strict=True)
    if other := [value for at, token in drawn if token != step.argmax[at] for value in (at, token)]:
        found["drawn"] = other
    if step.logprobs is not None:
        found["logprobs"] = step.logprobs
    return found


def _request_json(number: int, traced: TraceRequest) -> dict[str, Any]:
    request = traced.request
    found: dict[str, Any] = {
        "number": number,
        "round": traced.round,
        "row": request.row,
        "seed": request.seed,
        "prompt": request.prompt,
        "params": _without_defaults(request.params, GenerationParams()),
    }
    if request.adapter is not None:
        found["adapter"] = request.adapter
    if request.logit_bias:
        found["logit_bias"] = request.logit_bias
    if request.score_from is not None:
        found["score_from"] = request.score_from
    if request.pinned:
        pins = {part.name: getattr(request.pinned, part.name) for part in fields(PinnedTokens)}
        found["pinned"] = {name: sorted(places.items()) for name, places in pins.items() if places}
    if traced.constraint is not None:
        found["constraint"] = _constraint_json(traced.constraint)
    if traced.own_sampler is not None:
        found["own_sampler"] = traced.own_sampler
    return found


def _constraint_json(constraint: TraceConstraint) -> dict[str, Any]:
    source = constraint.source
    found: dict[str, Any] = {"response_format": _format_json(source.response_format)}
    if source.allow_thought:
        found["allow_thought"] = True
    if source.around is not None:
        found |= {"around": source.around, "begin": constraint.begin, "end": constraint.end}
    return found


def _format_json(response_format: ResponseFormat) -> dict[str, Any]:
    match response_format:
        case RegexFormat(pattern):
            return {"regex": pattern}
        case ChoiceFormat(options):
            return {"choice": options}
        case JsonFormat(schema):
            return {"json_schema": schema}
        case ToolCallFormat():
            calls: dict[str, Any] = {
                "tools": [asdict(tool) for tool in response_format.tools],
                "allow_text": response_format.allow_text,
                "parallel": response_format.parallel,
            }
            if response_format.text_format is not None:
                calls["text_format"] = _format_json(response_format.text_format)
            return {"tool_calls": calls}


def _without_defaults(value: Any, default: Any) -> dict[str, Any]:
    return {
        part.name: getattr(value, part.name)
        for part in fields(value)
        if getattr(value, part.name) != getattr(default, part.name) or part.name in ("canvas", "tokens")
    }
