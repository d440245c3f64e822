"""One record of training data to examples: a chat, a prompt with its response, a text, or tokens.

| keys | what is learned |
|---|---|
| messages, tools?, thinking? | each of the assistant's replies, through the chat template |
| prompt, response (or completion), tools?, thinking? | the response |
| text | all of it |
| tokens, responses, clipped? | the spans that `responses` names |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dgemma.errors import InputError, suggestion
from dgemma.text.chat_template import ChatTemplate
from dgemma.text.reply_spans import reply_spans
from dgemma.text.tokenizer import Tokenizer
from dgemma.training.example import Example, Span

# Keys that say nothing to the model and stand in many data sets; a reader may be given more.
IGNORED_KEYS = ("id", "source", "meta", "metadata")
# By the key that tells the form.
_FORMS = {
    "messages": ("messages", "tools", "thinking"),
    "prompt": ("prompt", "response", "completion", "tools", "thinking"),
    "text": ("text",),
    "tokens": ("tokens", "responses", "clipped"),
}
_FORMATS = ("auto", "chat", "raw")


class Skipped(Enum):
    """Why a record, or one of its replies, gives no example."""

    PROMPT_TOO_LONG = "the prompt alone reaches max_length"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a record gives. Several examples where replies need prompts of their own."""

    examples: tuple[Example, ...]
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordReader:
    """How records become examples.

    tokenizer: None if all records are tokens. template: None if there is none.
    prompt_format: "chat" puts prompts into a user turn, "raw" behind a <bos>; "auto" is chat where there is a
    template.
    max_length: examples are cut behind so many tokens.
    thinking: what records of chats mean that do not say.
    ignored_keys: keys that records may have beside those of their form.
    vocab_size: of the model; no token may reach it.
    """

    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    prompt_format: str = "auto"
    max_length: int | None = None
    thinking: bool = False
    ignored_keys: tuple[str, ...] = IGNORED_KEYS
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.prompt_format not in _FORMATS:
            raise InputError(
                f"prompt_format is {self.prompt_format!r}; it is one of {', '.join(_FORMATS)}"
                f"{suggestion(self.prompt_format, _FORMATS)}"
            )
        if self.prompt_format == "chat" and self.template is None:
            raise InputError(
                "prompt_format is 'chat', but there is no chat template; give one or use 'raw' prompts."
            )
        if self.max_length is not None and self.max_length < 2:
            raise InputError(
                f"max_length is {self.max_length}; an example needs at least 2 tokens, one to read and one "
                "to learn."
            )

    def read(self, record: object) -> Reading:
        """The record's examples, each at most `max_length` tokens."""
        whole = [record] if isinstance(record, Example) else self._examples(record)
        for example in whole:
            self.check_tokens(example.tokens)
        cut = [clip(example, self.max_length) for example in whole]
        return Reading(
            examples=tuple(example for example in cut if isinstance(example, Example)),
            skipped=tuple(reason for reason in cut if isinstance(reason, Skipped)),
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
            raise InputError(f"{name} is of type {type(text).__name__}; give a string.")
        return self._need_tokenizer().encode(text)

    def check_tokens(self, tokens: tuple[int, ...]) -> None:
        limit = 1 << 32 if self.vocab_size is None else self.vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < limit:
            raise InputError(
                f"a token is {min(tokens) if min(tokens) < 0 else max(tokens)}; tokens are from 0 to "
                f"{limit - 1}. Was the data made for another tokenizer?"
            )

    def _examples(self, record: object) -> list[Example]:
        if not isinstance(record, Mapping):
            raise InputError(f"the record is of type {type(record).__name__}; give an object.")
        # Tables exported as JSON have every column in every record, unused ones as null.
        entries = {key: value for key, value in record.items() if value is not None}
        match self._form_of(entries):
            case "messages":
                return self._chat(entries["messages"], entries, num_prompt_messages=0)
            case "prompt":
                return self._answered(entries)
            case "text":
                bos = self.bos()
                if not bos:
                    raise InputError(
                        "the tokenizer has no <bos>, so a text's first token would follow nothing; give a "
                        "prompt and a response."
                    )
                return [_joined(bos, [*self.encode(entries["text"], "text"), self.eos()])]
        return [_tokens(entries)]

    def _form_of(self, entries: dict[Any, Any]) -> str:
        forms = [form for form in _FORMS if form in entries]
        if len(forms) != 1:
            found = "both " + " and ".join(map(repr, forms)) if forms else "none of them"
            raise InputError(
                f"the record's form is told by one of the keys {', '.join(_FORMS)}; it has {found}."
            )
        known = (*_FORMS[forms[0]], *self.ignored_keys)
        for key in entries:
            if key not in known:
                hint = suggestion(key, known) if isinstance(key, str) and len(key) <= 40 else "."
                raise InputError(
                    f"the record has {forms[0]!r} and the unknown key {str(key)[:40]!r}{hint} Remove it, or "
                    "name it among the keys to ignore."
                )
        return forms[0]

    def _chat(self, messages: Any, entries: dict[Any, Any], *, num_prompt_messages: int) -> list[Example]:
        if self.template is None or self.prompt_format == "raw":
            why = "there is no chat template" if self.template is None else "prompts are raw"
            raise InputError(
                f"the record holds messages, but {why}; give 'prompt' and 'response' as strings."
            )
        thinking = entries.get("thinking", self.thinking)
        if not isinstance(thinking, bool):
            raise InputError(f"thinking is of type {type(thinking).__name__}; give true or false.")
        chats = reply_spans(
            self.template,
            messages,
            tools=entries.get("tools"),
            enable_thinking=thinking,
            num_prompt_messages=num_prompt_messages,
        )
        return [
            Example(chat.tokens, tuple(Span(start, stop) for start, stop in chat.replies)) for chat in chats
        ]

    def _answered(self, entries: dict[Any, Any]) -> list[Example]:
        given = [key for key in ("response", "completion") if key in entries]
        if len(given) != 1:
            found = "two responses" if given else "no response"
            raise InputError(
                f"the record has 'prompt' and {found}; give the text to learn as one of 'response' and "
                "'completion'."
            )
        prompt, response = entries["prompt"], entries[given[0]]
        if not isinstance(response, str):
            raise InputError(f"{given[0]} is of type {type(response).__name__}; give a string.")
        if isinstance(prompt, str) and (self.template is None or self.prompt_format == "raw"):
            for key in ("tools", "thinking"):
                if key in entries:
                    raise InputError(
                        f"the record has {key!r}, which a raw prompt has no place for; remove it."
                    )
            ids = (*self.bos(), *self.encode(prompt, "prompt"))
            return [_joined(ids, [*self.encode(response, given[0]), self.eos()])]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        elif not isinstance(prompt, list | tuple):
            raise InputError(f"prompt is of type {type(prompt).__name__}; give a string or messages.")
        messages = [*prompt, {"role": "assistant", "content": response}]
        return self._chat(messages, entries, num_prompt_messages=len(prompt))

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError("the record holds text, but there is no tokenizer; give one, or give tokens.")
        return self.tokenizer


def clip(example: Example, max_length: int | None) -> Example | Skipped:
    """The example without what lies behind `max_length` tokens."""
    if max_length is None or len(example.tokens) <= max_length:
        return example
    kept = [span for span in example.responses if span.start < max_length]
    if not kept:
        return Skipped.PROMPT_TOO_LONG
    stop = min(kept[-1].stop, max_length)
    return Example(
        example.tokens[:stop],
        (*kept[:-1], Span(kept[-1].start, stop)),
        # The cut is in the last response, or behind one that ends where it should.
        clipped=stop < kept[-1].stop,
    )


def _joined(prompt: tuple[int, ...], response: list[int]) -> Example:
    return Example((*prompt, *response), (Span(len(prompt), len(prompt) + len(response)),))


def _tokens(entries: dict[Any, Any]) -> Example:
    tokens, responses, clipped = entries["tokens"], entries.get("responses"), entries.get("clipped", False)
    if not _are_whole(tokens):
        raise InputError("tokens is not a list of whole numbers; give the ids of the record's tokens.")
    if not isinstance(responses, list | tuple) or not all(map(_is_pair, responses)):
        raise InputError("responses is not a list of pairs [start, stop]; it says which tokens are learned.")
    if not isinstance(clipped, bool):
        raise InputError(f"clipped is of type {type(clipped).__name__}; give true or false.")
    return Example(tuple(tokens), tuple(Span(start, stop) for start, stop in responses), clipped)


def _is_pair(value: Any) -> bool:
    return _are_whole(value) and len(value) == 2


def _are_whole(values: object) -> bool:
    return isinstance(values, list | tuple) and all(type(value) is int for value in values)
