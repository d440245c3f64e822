"""Convert a record of training data to examples. No torch.

A record is a chat, a prompt with its response, a text, or tokens; ShareGPT's and Alpaca's forms are read too:

| keys | what is learned |
|---|---|
| messages, tools?, thinking? | each of the assistant's replies, through the chat template |
| prompt, response (or completion), canvas?, tools?, thinking? | the response; by a canvas, `canvas` |
| text | all of it |
| tokens, responses, clipped? | the spans that `responses` names |
| conversations, tools?, thinking? | ShareGPT: as messages |
| instruction, input?, output, thinking? | Alpaca: as prompt and response |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from dgemma.errors import InputError, suggestion
from dgemma.text.chat_template import ChatTemplate
from dgemma.text.reply_spans import reply_spans
from dgemma.text.tokenizer import Tokenizer
from dgemma.training.data.dataset_formats import alpaca_prompt, sharegpt_messages

Progress = Callable[[int, int | None], None]
"""Called with (done so far, total); the total is None where it is not known."""

# Keys that many data sets have and that do not affect training; a reader can be set to ignore more.
IGNORED_KEYS = ("id", "source", "meta", "metadata")
# The keys of each record format, by the key that identifies the format.
_FORMATS = {
    "messages": ("messages", "tools", "thinking"),
    "prompt": ("prompt", "response", "completion", "canvas", "tools", "thinking"),
    "text": ("text",),
    "tokens": ("tokens", "responses", "clipped"),
    "conversations": ("conversations", "tools", "thinking"),
    "instruction": ("instruction", "input", "output", "thinking"),
}
_PROMPT_FORMATS = ("auto", "chat", "raw")


@dataclass(frozen=True)
class Span:
    """Tokens [start, stop) of an example."""

    start: int
    stop: int


@dataclass(frozen=True)
class TrainingExample:
    """One conversation or text, in tokens.

    responses: the spans that the model learns to generate, in order: a reply's content and its turn end, or
      all of a text; never a header. Canvases are counted from the start of each span. Tokens outside the
      spans are context only.
    clipped: the last response was truncated by a length limit, so its end is not supervised.
    canvas: what a canvas learns in place of the only response, which the encoder learns: the same answer in a
      layout that suits a canvas, such as fields at fixed places.
    """

    tokens: tuple[int, ...]
    responses: tuple[Span, ...]
    clipped: bool = False
    canvas: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.responses:
            raise InputError(
                "an example has no response; there is nothing to learn from it.", field="responses"
            )
        end = 0
        for span in self.responses:
            # A response needs one token before it, from which the encoder predicts its first token.
            if not max(1, end) <= span.start < span.stop <= len(self.tokens):
                raise InputError(
                    f"a response spans tokens {span.start} to {span.stop}; responses follow each other "
                    f"inside an example's {len(self.tokens)} tokens, after at least one token of prompt.",
                    field="responses",
                )
            end = span.stop
        if self.clipped and end != len(self.tokens):
            raise InputError(
                "an example is clipped, but its last response does not reach its end.", field="clipped"
            )
        if self.canvas is not None and (len(self.responses) != 1 or not self.canvas):
            raise InputError.about(
                "canvas",
                f"has {len(self.canvas)} tokens, and the example {len(self.responses)} responses; give some "
                "tokens, in place of one response.",
            )


class SkipReason(Enum):
    """Why a record, or one of its replies, gives no example."""

    PROMPT_TOO_LONG = "the prompt alone reaches max_length"


@dataclass(frozen=True, kw_only=True)
class RecordReading:
    """The examples of a record: several where replies need prompts of their own."""

    examples: tuple[TrainingExample, ...]
    skipped: tuple[SkipReason, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordReader:
    """Converts records to examples.

    tokenizer: None if all records are tokens. template: the chat template, or None.
    prompt_format: "chat" puts prompts into a user turn, "raw" after a <bos>; "auto" is chat where there is a
      template.
    max_length: examples are truncated to this many tokens.
    thinking: the default of a chat's "thinking" entry.
    ignored_keys: keys that are left out of every record, whatever their value.
    vocab_size: of the model; tokens must be smaller.
    """

    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    prompt_format: str = "auto"
    max_length: int | None = None
    thinking: bool = False
    ignored_keys: tuple[str, ...] = IGNORED_KEYS
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.prompt_format not in _PROMPT_FORMATS:
            raise InputError.about(
                "prompt_format",
                f"is {self.prompt_format!r}; it is one of {', '.join(_PROMPT_FORMATS)}"
                f"{suggestion(self.prompt_format, _PROMPT_FORMATS)}",
            )
        if self.prompt_format == "chat" and self.template is None:
            raise InputError.about(
                "prompt_format", "is 'chat', but there is no chat template; give one or use 'raw' prompts."
            )
        if self.max_length is not None and self.max_length < 2:
            raise InputError.about(
                "max_length",
                f"is {self.max_length}; an example needs at least 2 tokens, one to read and one to learn.",
            )

    def read(self, record: object) -> RecordReading:
        """The record's examples, each at most `max_length` tokens."""
        examples = [record] if isinstance(record, TrainingExample) else self._examples(record)
        for example in examples:
            self.check_tokens(example.tokens)
            self.check_tokens(example.canvas or ())
        clipped = [clip(example, self.max_length) for example in examples]
        return RecordReading(
            examples=tuple(example for example in clipped if isinstance(example, TrainingExample)),
            skipped=tuple(reason for reason in clipped if isinstance(reason, SkipReason)),
        )

    def bos(self) -> tuple[int, ...]:
        id_ = self._need_tokenizer().bos_id
        return () if id_ is None else (id_,)

    def eos(self) -> int:
        id_ = self._need_tokenizer().eos_id
        if id_ is None:
            raise InputError("the tokenizer has no <eos>, so a text's end cannot be learned; use a chat.")
        return id_

    def encode(self, text: object, name: str) -> list[int]:
        if not isinstance(text, str):
            raise InputError.about(name, f"is of type {type(text).__name__}; give a string.")
        return self._need_tokenizer().encode(text)

    def check_tokens(self, tokens: tuple[int, ...]) -> None:
        limit = 1 << 32 if self.vocab_size is None else self.vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < limit:
            raise InputError(
                f"a token is {min(tokens) if min(tokens) < 0 else max(tokens)}; tokens are from 0 to "
                f"{limit - 1}. Was the data made for another tokenizer?",
                field="tokens",
            )

    def _examples(self, record: object) -> list[TrainingExample]:
        if not isinstance(record, Mapping):
            raise InputError(f"the record is of type {type(record).__name__}; give an object.")
        # Tables exported as JSON have every column in each record, with null for unused ones.
        entries = {
            key: value for key, value in record.items() if value is not None and key not in self.ignored_keys
        }
        match self._format_of(entries):
            case "messages":
                return self._chat(entries["messages"], entries, num_prompt_messages=0)
            case "prompt":
                return self._prompt_response(entries)
            case "conversations":
                messages = sharegpt_messages(entries["conversations"])
                return self._chat(messages, entries, num_prompt_messages=0)
            case "instruction":
                return self._alpaca(entries)
            case "text":
                bos = self.bos()
                if not bos:
                    raise InputError(
                        "the tokenizer has no <bos>, so a text's first token would follow nothing; give a "
                        "prompt and a response."
                    )
                return [_joined(bos, [*self.encode(entries["text"], "text"), self.eos()])]
        return [_tokens(entries)]

    def _format_of(self, entries: dict[Any, Any]) -> str:
        formats = [name for name in _FORMATS if name in entries]
        if len(formats) != 1:
            found = "both " + " and ".join(map(repr, formats)) if formats else "none of them"
            remedy = " Name those that are not meant in ignored_keys." if formats else ""
            raise InputError(
                f"the record's format is given by one of the keys {', '.join(_FORMATS)}; it has {found}."
                + remedy
            )
        known = (*_FORMATS[formats[0]], *self.ignored_keys)
        for key in entries:
            if key not in known:
                hint = suggestion(key, known) if isinstance(key, str) and len(key) <= 40 else "."
                raise InputError(
                    f"the record has {formats[0]!r} and the unknown key {str(key)[:40]!r}{hint} Remove it, "
                    "or name it in ignored_keys."
                )
        return formats[0]

    def _chat(
        self, messages: Any, entries: dict[Any, Any], *, num_prompt_messages: int
    ) -> list[TrainingExample]:
        if self.template is None or self.prompt_format == "raw":
            why = "there is no chat template" if self.template is None else "prompts are raw"
            raise InputError(
                f"the record holds messages, but {why}; give 'prompt' and 'response' as strings."
            )
        thinking = entries.get("thinking", self.thinking)
        if not isinstance(thinking, bool):
            raise InputError.about("thinking", f"is of type {type(thinking).__name__}; give true or false.")
        chats = reply_spans(
            self.template,
            messages,
            tools=entries.get("tools"),
            enable_thinking=thinking,
            num_prompt_messages=num_prompt_messages,
        )
        return [
            TrainingExample(chat.tokens, tuple(Span(start, stop) for start, stop in chat.replies))
            for chat in chats
        ]

    def _alpaca(self, entries: dict[Any, Any]) -> list[TrainingExample]:
        if "output" not in entries:
            raise InputError(
                "the record has 'instruction' and no 'output'; give the text to learn there.", field="output"
            )
        if not isinstance(entries["output"], str):
            raise InputError.about("output", f"is of type {type(entries['output']).__name__}; give a string.")
        prompt = alpaca_prompt(entries, is_raw=self._is_raw)
        rest = {key: value for key, value in entries.items() if key == "thinking"}
        return self._prompt_response({"prompt": prompt, "response": entries["output"], **rest})

    @property
    def _is_raw(self) -> bool:
        return self.template is None or self.prompt_format == "raw"

    def _prompt_response(self, entries: dict[Any, Any]) -> list[TrainingExample]:
        keys = [key for key in ("response", "completion") if key in entries]
        if len(keys) != 1:
            found = "two responses" if keys else "no response"
            raise InputError(
                f"the record has 'prompt' and {found}; give the text to learn as one of 'response' and "
                "'completion'."
            )
        examples = self._answered(entries, keys[0])
        if "canvas" not in entries:
            return examples
        (example,), (as_canvas,) = examples, self._answered(entries, "canvas")
        return [replace(example, canvas=as_canvas.tokens[as_canvas.responses[0].start :])]

    def _answered(self, entries: dict[Any, Any], answer_key: str) -> list[TrainingExample]:
        """The prompt with the answer that is at this key."""
        prompt, response = entries["prompt"], entries[answer_key]
        if not isinstance(response, str):
            raise InputError.about(answer_key, f"is of type {type(response).__name__}; give a string.")
        if isinstance(prompt, str) and self._is_raw:
            for key in ("tools", "thinking"):
                if key in entries:
                    raise InputError(
                        f"the record has {key!r}, which a raw prompt has no place for; remove it.", field=key
                    )
            ids = (*self.bos(), *self.encode(prompt, "prompt"))
            return [_joined(ids, [*self.encode(response, answer_key), self.eos()])]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        elif not isinstance(prompt, list | tuple):
            raise InputError.about(
                "prompt", f"is of type {type(prompt).__name__}; give a string or messages."
            )
        messages = [*prompt, {"role": "assistant", "content": response}]
        return self._chat(messages, entries, num_prompt_messages=len(prompt))

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError("the record holds text, but there is no tokenizer; give one, or give tokens.")
        return self.tokenizer


def clip(example: TrainingExample, max_length: int | None) -> TrainingExample | SkipReason:
    """The example truncated to `max_length` tokens."""
    if max_length is None or len(example.tokens) <= max_length:
        return example
    kept = [span for span in example.responses if span.start < max_length]
    if not kept:
        return SkipReason.PROMPT_TOO_LONG
    stop = min(kept[-1].stop, max_length)
    return TrainingExample(
        example.tokens[:stop],
        (*kept[:-1], Span(kept[-1].start, stop)),
        # The cut is inside the last response, or after a response that is complete.
        clipped=stop < kept[-1].stop,
        canvas=example.canvas,
    )


def _joined(prompt: tuple[int, ...], response: list[int]) -> TrainingExample:
    return TrainingExample((*prompt, *response), (Span(len(prompt), len(prompt) + len(response)),))


def _tokens(entries: dict[Any, Any]) -> TrainingExample:
    tokens, responses, clipped = entries["tokens"], entries.get("responses"), entries.get("clipped", False)
    if not _are_whole(tokens):
        raise InputError.about(
            "tokens", "is not a list of whole numbers; give the ids of the record's tokens."
        )
    if not isinstance(responses, list | tuple) or not all(map(_is_pair, responses)):
        raise InputError.about(
            "responses", "is not a list of pairs [start, stop]; it names the tokens that are learned."
        )
    if not isinstance(clipped, bool):
        raise InputError.about("clipped", f"is of type {type(clipped).__name__}; give true or false.")
    return TrainingExample(tuple(tokens), tuple(Span(start, stop) for start, stop in responses), clipped)


def _is_pair(value: Any) -> bool:
    return _are_whole(value) and len(value) == 2


def _are_whole(values: object) -> bool:
    return isinstance(values, list | tuple) and all(type(value) is int for value in values)
