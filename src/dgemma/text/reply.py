"""Reply parsing, incremental: thought (reasoning content), answer and tool calls.

Markers are recognised by token id only, so their spelling in text has no effect. Rules:

- `<|channel>` ... `<channel|>` is thought; its label line `thought\\n` is dropped.
- A reply that begins with the bare line `thought\\n`, or with `thought` and then a channel marker, loses that
  label: some models write it with thinking off. Any other beginning ("thought experiments ...", "Thought",
  the bare text "thought") belongs to the answer.
- `<|tool_call>` ... `<tool_call|>` is a call. Another marker, or the end of the reply, truncates it.
- `<|tool_response>` ... `<tool_response|>` is dropped: the model does not write tool results.
- All other control tokens are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from dgemma.events import ToolCall
from dgemma.text.detokenizer import Detokenizer
from dgemma.text.tokenizer import Tokenizer
from dgemma.text.tool_call import parse_tool_call

_LABEL = "thought\n"


class Channel(Enum):
    ANSWER = "answer"
    THOUGHT = "thought"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True, kw_only=True)
class ReplyChunk:
    """Final text of one channel. A tool call is one chunk; its `text` is its arguments as JSON."""

    channel: Channel
    text: str
    call: ToolCall | None = None


@dataclass(frozen=True, kw_only=True)
class ParsedReply:
    """A complete reply."""

    thought: str
    answer: str
    tool_calls: tuple[ToolCall, ...]

    @classmethod
    def from_chunks(cls, chunks: Iterable[ReplyChunk]) -> ParsedReply:
        chunks = list(chunks)
        return cls(
            thought="".join(c.text for c in chunks if c.channel is Channel.THOUGHT),
            answer="".join(c.text for c in chunks if c.channel is Channel.ANSWER),
            tool_calls=tuple(c.call for c in chunks if c.call is not None),
        )

    @classmethod
    def from_ids(cls, tokenizer: Tokenizer, ids: Iterable[int]) -> ParsedReply:
        parser = ReplyParser(tokenizer)
        return cls.from_chunks([*parser.add(ids), *parser.finish()])


class ReplyParser:
    """Token ids in, chunks out. The reply does not depend on how the ids are split over calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The channel after each marker; None: text is dropped.
        opens = {
            "<|channel>": Channel.THOUGHT,
            "<channel|>": Channel.ANSWER,
            "<|tool_call>": Channel.TOOL_CALL,
            "<tool_call|>": Channel.ANSWER,
            "<|tool_response>": None,
            "<tool_response|>": Channel.ANSWER,
        }
        self._opens = {
            tokenizer.controls[name]: to for name, to in opens.items() if name in tokenizer.controls
        }
        self._call_end = tokenizer.id_of("<tool_call|>")
        self._channel_marks = [tokenizer.controls.get(name) for name in ("<|channel>", "<channel|>")]
        self._channel: Channel | None = Channel.ANSWER
        self._detokenizer = Detokenizer(tokenizer)
        self._label: str | None = ""  # the text so far, while it is a prefix of the label
        self._call: list[int] = []

    def add(self, ids: Iterable[int]) -> list[ReplyChunk]:
        chunks: list[ReplyChunk] = []
        run: list[int] = []
        for id_ in ids:
            if id_ in self._opens:
                chunks += [*self._continue(run), *self._close(id_)]
                run = []
                self._open(self._opens[id_])
            else:
                run.append(id_)
        return [*chunks, *self._continue(run)]

    def finish(self) -> list[ReplyChunk]:
        return self._close(None)

    def _continue(self, ids: list[int]) -> list[ReplyChunk]:
        if self._channel is Channel.TOOL_CALL:
            self._call += ids
            return []
        return self._text(self._without_label(self._detokenizer.add(ids)))

    def _open(self, channel: Channel | None) -> None:
        self._channel = channel
        self._detokenizer = Detokenizer(self._tokenizer)
        self._label = "" if channel is Channel.THOUGHT else None
        self._call = []

    def _close(self, marker: int | None) -> list[ReplyChunk]:
        """Close the open channel, at a marker or (None) at the end of the reply."""
        if self._channel is Channel.TOOL_CALL:
            call = parse_tool_call(self._tokenizer, self._call)
            if marker is None or marker != self._call_end:
                call = replace(call, arguments={}, error="the call was cut off before <tool_call|>")
            text = call.arguments_json if call.error is None else self._tokenizer.decode(self._call)
            return [ReplyChunk(channel=Channel.TOOL_CALL, text=text, call=call)]
        text = self._without_label(self._detokenizer.finish())
        if self._label is not None:
            bare_label = self._label == _LABEL.strip()
            at_channel = marker is not None and marker in self._channel_marks
            in_channel = self._channel is Channel.THOUGHT or at_channel
            text = "" if bare_label and in_channel else self._label
        return self._text(text)

    def _without_label(self, text: str) -> str:
        if self._label is None:
            return text
        self._label += text
        if len(self._label) < len(_LABEL) and _LABEL.startswith(self._label):
            return ""
        text, self._label = self._label.removeprefix(_LABEL), None
        return text

    def _text(self, text: str) -> list[ReplyChunk]:
        if not text or self._channel is None:
            return []
        return [ReplyChunk(channel=self._channel, text=text)]
