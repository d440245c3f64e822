"""Reads trace files. A file may come from anyone: it is read with limits, and every field is checked.

What is wrong is named with its line.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, BinaryIO

from dgemma.engine.request import EngineRequest, PinnedTokens
from dgemma.errors import InputError
from dgemma.params import GenerationParams
from dgemma.structured_output.constraint import ConstraintSource
from dgemma.structured_output.response_format import (
    ChoiceFormat,
    JsonFormat,
    RegexFormat,
    ResponseFormat,
    TextFormat,
    Tool,
    ToolCallFormat,
)
from dgemma.trace.trace import Trace, TraceAnswer, TraceCommit, TraceConstraint, TraceRequest, TraceStep
from dgemma.trace.trace_writer import FORMAT, VERSION

MAX_FILE_BYTES = 256 << 20
MAX_LINE_BYTES = 16 << 20
MAX_BYTES = 1 << 28  # of all lines
MAX_NUMBERS = 1 << 25  # in all lists, those that `changed` leaves out included
MAX_CANVAS = 1 << 14
MAX_TOKEN = (1 << 31) - 1
_MAX_NUMBER = 1 << 53
_PAIR = 4  # a token with its log-probability takes the memory of so many tokens
_MAX_TEXT = 1 << 12  # of one token
_MAX_MEMBERS = 1 << 20
_KINDS = ("request", "step", "commit", "answer", "texts", "end")


def read_trace(path: str | Path) -> Trace:
    path = Path(path)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{path}: the file is larger than {MAX_FILE_BYTES >> 20} MB; no trace is.")
        with path.open("rb") as file:
            return _read(file, str(path))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}.") from error


def trace_of_bytes(content: bytes, name: str = "the trace") -> Trace:
    return _read(io.BytesIO(content), name)


def _read(file: BinaryIO, name: str) -> Trace:
    try:
        return _from_lines(_lines(file, name), name)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{name}: not a whole trace file ({error}).") from error


def _lines(file: BinaryIO, name: str) -> Iterator[tuple[str, Any]]:
    """Where a line is, and what it holds."""
    total = 0
    is_packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    with gzip.GzipFile(fileobj=file) if is_packed else nullcontext(file) as unpacked:
        for number in range(1, _MAX_NUMBER):
            line = unpacked.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            where, total = f"{name}, line {number}", total + len(line)
            if len(line) > MAX_LINE_BYTES or total > MAX_BYTES:
                raise InputError(f"{where}: larger than any trace.")
            try:
                yield where, json.loads(line, parse_constant=_no_number)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}: not JSON ({str(error)[:100]}).") from error


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _from_lines(lines: Iterator[tuple[str, Any]], name: str) -> Trace:
    where, head = next(lines, (name, None))
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise InputError(f"{where}: not a trace; its first line has no format {FORMAT!r}.")
    if head.get("version") != VERSION:
        raise InputError(
            f"{where}: version {head.get('version')!r:.40}; this dgemma reads version {VERSION}."
        )
    budget = _Budget()
    about = _Object(where, head, budget).mapping("about")
    requests: list[_ReadRequest] = []
    texts: dict[int, str] = {}
    num_lines = 1
    for where, line in lines:
        if not isinstance(line, dict) or len(line) != 1:
            raise InputError(f"{where}: not one of {', '.join(_KINDS)}.")
        kind, value = next(iter(line.items()))
        if kind not in _KINDS:
            raise InputError(f"{where}: {kind!r:.40} is not one of {', '.join(_KINDS)}.")
        if not isinstance(value, dict):
            raise InputError(f"{where}: {kind} is not an object.")
        item = _Object(where, value, budget)
        if kind == "end":
            if item.integer("lines") != num_lines:
                raise item.wrong("lines", f"is not {num_lines}: lines are missing")
            if next(lines, None) is not None:
                raise InputError(f"{where}: there are lines after the end.")
            if item.flag("is_cut"):
                about["is_cut"] = True
            return Trace(about=about, requests=tuple(one.whole() for one in requests), texts=texts)
        num_lines += 1
        if kind == "texts":
            texts |= _texts(item)
        elif kind == "request":
            if item.integer("number") != len(requests):
                raise item.wrong("number", f"is not {len(requests)}, the next one")
            requests.append(_ReadRequest(_request(item)))
        else:
            number = item.integer("request")
            if number >= len(requests):
                raise item.wrong("request", f"is {number}, and there are {len(requests)} so far")
            requests[number].add(kind, item)
    raise InputError(f"{name}: the file ends before its last line.")


class _ReadRequest:
    """A request as far as it is read."""

    def __init__(self, request: TraceRequest) -> None:
        self._request = request
        self._steps: list[TraceStep] = []
        self._commits: list[TraceCommit] = []

    def add(self, kind: str, item: _Object) -> None:
        if kind == "step":
            self._steps.append(_step(item, self._steps[-1] if self._steps else None))
        elif kind == "commit":
            self._commits.append(_commit(item))
        else:
            self._request = replace(self._request, answer=_answer(item))

    def whole(self) -> TraceRequest:
        return replace(self._request, steps=tuple(self._steps), commits=tuple(self._commits))


class _Budget:
    """How much a trace may hold. Packed and written as changes, a small file could hold any amount."""

    def __init__(self) -> None:
        self._left = MAX_NUMBERS

    def spend(self, count: int, where: str) -> None:
        self._left -= count
        if self._left < 0:
            raise InputError(
                f"{where}: the trace holds more than {MAX_NUMBERS:,} numbers; record less at once."
            )


class _Object:
    """A JSON object whose members are checked as they are read."""

    def __init__(self, where: str, value: Mapping[str, Any], budget: _Budget) -> None:
        self.where, self.value, self.budget = where, value, budget

    def wrong(self, name: str, rule: str) -> InputError:
        return InputError(f"{self.where}: {name} {rule}.")

    def __contains__(self, name: str) -> bool:
        return self.value.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, low: int = 0, high: int = _MAX_NUMBER) -> int:
        value = self.value.get(name, default)
        if not _is_integer(value) or not low <= value <= high:
            raise self.wrong(name, f"is not a whole number from {low} to {high}")
        return int(value)

    def number(self, name: str) -> float:
        value = self.value.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_NUMBER:
            raise self.wrong(name, "is not a number from 0 on")
        return float(value)

    def text(self, name: str) -> str:
        value = self.value.get(name)
        if not isinstance(value, str):
            raise self.wrong(name, "is not a text")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.value.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "is not true or false")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.value.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "is not an object")
        return value

    def object(self, name: str) -> _Object:
        return _Object(f"{self.where}: {name}", self.mapping(name), self.budget)

    def items(self, name: str, most: int = _MAX_MEMBERS) -> list[Any]:
        value = self.value.get(name, [])
        if not isinstance(value, list) or len(value) > most:
            raise self.wrong(name, f"is not a list of at most {most}")
        self.budget.spend(len(value), self.where)
        return value

    def integers(self, name: str, *, high: int = MAX_TOKEN, most: int = _MAX_MEMBERS) -> tuple[int, ...]:
        value = self.items(name, most)
        if not all(_is_integer(item) and 0 <= item <= high for item in value):
            raise self.wrong(name, f"is not a list of whole numbers from 0 to {high}")
        return tuple(value)

    def pairs(self, name: str, *, high: int) -> dict[int, int]:
        """Positions below `high` and tokens, by turns."""
        flat = self.integers(name)
        if len(flat) % 2 or any(at >= high for at in flat[::2]):
            raise self.wrong(name, f"is not a list of positions below {high} and tokens")
        return dict(zip(flat[::2], flat[1::2], strict=True))


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _step(item: _Object, last: TraceStep | None) -> TraceStep:
    canvas = item.integer("canvas")
    if "argmax" in item:
        argmax, pinned = item.integers("argmax", most=MAX_CANVAS), item.integers("pinned", most=MAX_CANVAS)
    elif last is None or last.canvas != canvas:
        raise item.wrong("argmax", "is missing at a canvas's first step")
    else:
        item.budget.spend(len(last.argmax), item.where)
        changed = item.pairs("changed", high=len(last.argmax))
        argmax = tuple(changed.get(at, token) for at, token in enumerate(last.argmax))
        pinned = last.pinned
    length = len(argmax)
    if any(position >= length for position in pinned):
        raise item.wrong("pinned", f"has a position beyond the canvas of {length}")
    entropy = item.integers("entropy")
    if len(entropy) != length:
        raise item.wrong("entropy", f"has {len(entropy)} numbers, and the canvas {length} positions")
    bits = item.text("accepted")
    if len(bits) > length // 4 + 1 or not set(bits) <= set("0123456789abcdef") or not bits:
        raise item.wrong(
            "accepted", "is not a hexadecimal number of as many bits as the canvas has positions"
        )
    number = int(bits, 16)
    if number >> length:
        raise item.wrong("accepted", f"has a position beyond the canvas of {length}")
    accepted = tuple(position for position, bit in enumerate(reversed(f"{number:b}")) if bit == "1")
    drawn = item.pairs("drawn", high=length)
    return TraceStep(
        canvas=canvas,
        step=item.integer("step", low=1),
        at_ms=item.number("at_ms"),
        argmax=argmax,
        entropy=entropy,
        accepted=accepted,
        drawn=tuple(drawn.get(position, argmax[position]) for position in accepted),
        pinned=pinned,
        logprobs=_logprobs(item, length) if "logprobs" in item else None,
    )


def _logprobs(item: _Object, length: int) -> tuple[tuple[tuple[int, float], ...], ...]:
    rows = item.items("logprobs")
    found = []
    for row in rows:
        if not isinstance(row, list) or not all(_is_log_prob(pair) for pair in row):
            raise item.wrong("logprobs", "is not a list of lists of tokens and log-probabilities")
        item.budget.spend(_PAIR * len(row), item.where)
        found.append(tuple((int(token), float(value)) for token, value in row))
    if len(found) != length:
        raise item.wrong("logprobs", f"has {len(found)} lists, and the canvas {length} positions")
    return tuple(found)


def _is_log_prob(pair: object) -> bool:
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and _is_integer(pair[0])
        and 0 <= pair[0] <= MAX_TOKEN
        and isinstance(pair[1], int | float)
        and -_MAX_NUMBER <= pair[1] <= 1
    )


def _commit(item: _Object) -> TraceCommit:
    return TraceCommit(
        canvas=item.integer("canvas"),
        tokens=item.integers("tokens"),
        steps=item.integer("steps", 0),
        accepted=item.integer("accepted") if "accepted" in item else None,
        settled=item.flag("settled", True),
    )


def _answer(item: _Object) -> TraceAnswer:
    return TraceAnswer(
        text=item.text("text"),
        tokens=item.integers("tokens"),
        finish_reason=item.text("finish_reason")[:40],
        seconds=item.number("seconds"),
    )


def _texts(item: _Object) -> dict[int, str]:
    found: dict[int, str] = {}
    for token, text in item.value.items():
        if not token.isascii() or not token.isdecimal() or len(token) > 10 or not isinstance(text, str):
            raise item.wrong("texts", "is not a mapping from tokens to texts")
        found[int(token)] = text[:_MAX_TEXT]
    return found


def _request(item: _Object) -> TraceRequest:
    request = EngineRequest(
        prompt=item.integers("prompt"),
        seed=item.integer("seed", low=-(1 << 63), high=(1 << 64) - 1),
        params=_params(item.object("params")),
        row=item.integer("row", 0),
        adapter=item.text("adapter") if "adapter" in item else None,
        logit_bias=_biases(item),
        pinned=_pinned(item.object("pinned")) if "pinned" in item else None,
        score_from=item.integer("score_from") if "score_from" in item else None,
    )
    return TraceRequest(
        round=item.integer("round"),
        request=request,
        constraint=_constraint(item.object("constraint")) if "constraint" in item else None,
        own_sampler=item.text("own_sampler") if "own_sampler" in item else None,
    )


def _params(item: _Object) -> GenerationParams:
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in item.value.items()}
    known = {part.name for part in fields(GenerationParams)}
    if unknown := sorted(given.keys() - known):
        raise item.wrong(repr(unknown[0])[:40], "is no option of a generation")
    try:
        return GenerationParams(**given)
    except (InputError, TypeError, ValueError) as error:
        raise InputError(f"{item.where}: {error}") from error


def _biases(item: _Object) -> tuple[tuple[int, float], ...]:
    found = item.items("logit_bias", 1024)
    for pair in found:
        if not (isinstance(pair, list) and len(pair) == 2 and _is_integer(pair[0])):
            raise item.wrong("logit_bias", "is not a list of tokens and numbers")
        if isinstance(pair[1], bool) or not isinstance(pair[1], int | float) or abs(pair[1]) > 1e6:
            raise item.wrong("logit_bias", "is not a list of tokens and numbers")
    return tuple((token, float(value)) for token, value in found)


def _pinned(item: _Object) -> PinnedTokens | None:
    known = {part.name for part in fields(PinnedTokens)}
    if unknown := sorted(item.value.keys() - known):
        raise item.wrong(repr(unknown[0])[:40], "is no kind of pin")

    def places(name: str, *, several: bool) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for pair in item.items(name):
            if not (isinstance(pair, list) and len(pair) == 2 and _is_integer(pair[0])):
                raise item.wrong(name, "is not a list of positions and tokens")
            tokens = pair[1] if several else [pair[1]]
            if not isinstance(tokens, list) or not all(map(_is_integer, tokens)):
                raise item.wrong(name, "is not a list of positions and tokens")
            found[pair[0]] = tuple(tokens) if several else tokens[0]
        return found

    pinned = PinnedTokens(
        fixed=places("fixed", several=False),
        among=places("among", several=True),
        begin=places("begin", several=False),
        watch=places("watch", several=True),
    )
    return pinned or None


def _constraint(item: _Object) -> TraceConstraint:
    around: tuple[str, str] | None = None
    if "around" in item:
        texts = item.items("around", 2)
        if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            raise item.wrong("around", "is not the texts before and after a gap")
        around = (texts[0], texts[1])
    return TraceConstraint(
        source=ConstraintSource(
            response_format=_format(item.object("response_format")),
            allow_thought=item.flag("allow_thought"),
            around=around,
        ),
        begin=item.integer("begin", 0),
        end=item.integer("end") if "end" in item else None,
    )


def _format(item: _Object) -> ResponseFormat:
    if "tool_calls" not in item:
        return _text_format(item)
    calls = item.object("tool_calls")
    tools = []
    for value in calls.items("tools", 1024):
        tool = _Object(f"{calls.where}: tools", value if isinstance(value, dict) else {}, item.budget)
        schema = tool.text("schema") if "schema" in tool else None
        tools.append(Tool(tool.text("name"), schema, tool.flag("strict")))
    return ToolCallFormat(
        tools=tuple(tools),
        allow_text=calls.flag("allow_text"),
        parallel=calls.flag("parallel", True),
        text_format=_text_format(calls.object("text_format")) if "text_format" in calls else None,
    )


def _text_format(item: _Object) -> TextFormat:
    if "regex" in item:
        return RegexFormat(item.text("regex"))
    if "choice" in item:
        options: Sequence[Any] = item.items("choice")
        if not all(isinstance(option, str) for option in options):
            raise item.wrong("choice", "is not a list of texts")
        return ChoiceFormat(tuple(options))
    if "json_schema" in item.value:
        return JsonFormat(item.text("json_schema") if "json_schema" in item else None)
    raise item.wrong("it", "is no response format")
