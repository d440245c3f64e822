"""The parts of a reply in the order they are written: thoughts, texts and tool calls.

Responses and messages are lists of such parts, whole or streamed. Both are made from the events of the engine
by one `ReplyParts`, so that a stream and a whole answer cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from dgemma.engine.service import EngineEvent
from dgemma.events import Answer, Commit, Finish, ToolCall
from dgemma.server.outputs import is_cut_off, is_delivered
from dgemma.server.serving import GenerationInfo
from dgemma.server.text import TextService


class PartKind(Enum):
    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


@dataclass(kw_only=True)
class ReplyPart:
    index: int
    kind: PartKind
    text: str = ""  # of a call: its arguments as JSON
    name: str = ""  # of a call
    is_whole: bool = True  # False: the answer was cut off in it


@dataclass(frozen=True)
class PartBegan:
    part: ReplyPart


@dataclass(frozen=True)
class PartGrew:
    part: ReplyPart
    delta: str


@dataclass(frozen=True)
class PartEnded:
    part: ReplyPart


PartStep = PartBegan | PartGrew | PartEnded


@dataclass
class ReplyParts:
    """Collects the parts of one answer."""

    info: GenerationInfo
    parts: list[ReplyPart] = field(default_factory=list)
    answer: Answer | None = None  # when it is finished
    _open: ReplyPart | None = None
    _num_calls: int = 0  # in commits, delivered or not

    def add(self, event: EngineEvent) -> Iterator[PartStep]:
        """What an event changes. After `Finish` no part is open."""
        match event:
            case Commit():
                # Within a commit the engine does not say what came first: a thought nearly always does.
                yield from self._write(PartKind.THOUGHT, event.thought)
                yield from self._write(PartKind.TEXT, event.text)
                self._num_calls += len(event.tool_calls)
                for call in event.tool_calls:
                    yield from self._call(call)
            case Finish():
                for call in event.answer.tool_calls[self._num_calls :]:
                    yield from self._call(call)
                if self._open is not None:
                    self._open.is_whole = not is_cut_off(event.answer)
                    yield from self._end()
                self.answer = event.answer

    def break_off(self) -> None:
        """The engine failed: what is being written stays a part of a part."""
        if self._open is not None:
            self._open.is_whole = False

    @property
    def has_calls(self) -> bool:
        return any(part.kind is PartKind.CALL for part in self.parts)

    def thought_tokens(self, text: TextService, most: int) -> int:
        """Of the thoughts, encoded once more: at most all of the reply's."""
        thought = "".join(part.text for part in self.parts if part.kind is PartKind.THOUGHT)
        return min(len(text.encode_text(thought)), most) if thought else 0

    def _write(self, kind: PartKind, text: str) -> Iterator[PartStep]:
        if not text:
            return
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(kind)
        assert self._open is not None
        self._open.text += text
        yield PartGrew(self._open, text)

    def _call(self, call: ToolCall) -> Iterator[PartStep]:
        if not is_delivered(self.info, call):
            return
        yield from self._begin(PartKind.CALL, call.name)
        assert self._open is not None
        self._open.text = call.arguments_json
        yield PartGrew(self._open, self._open.text)
        yield from self._end()

    def _begin(self, kind: PartKind, name: str = "") -> Iterator[PartStep]:
        yield from self._end()
        self._open = ReplyPart(index=len(self.parts), kind=kind, name=name)
        self.parts.append(self._open)
        yield PartBegan(self._open)

    def _end(self) -> Iterator[PartStep]:
        if self._open is not None:
            ended, self._open = self._open, None
            yield PartEnded(ended)
