"""The text functions the server needs: chats and texts as token ids, ids as text, task contexts.

Messages are passed as messages, never as strings with controls in them: only the checkpoint's template writes
the control tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dgemma.engine.request import resolve_canvas_len
from dgemma.engine.service import ServedModel
from dgemma.errors import CheckpointError, InputError
from dgemma.images.decode import RgbImage
from dgemma.images.preprocess import ImagePatches
from dgemma.images.prompt import ImagePrompt
from dgemma.params import GenerationParams
from dgemma.structured_output.compiler import GrammarCompiler
from dgemma.tasks.context import TaskContext
from dgemma.text.chat_template import ChatTemplate
from dgemma.text.token_texts import TokenTexts
from dgemma.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class TokenText:
    """One token as log-probabilities show it."""

    text: str  # a control by its name; part of a character as the replacement character
    raw: bytes | None  # what it adds to the text; None for a control, which adds nothing


class TextService(Protocol):
    """Called from worker threads, several at once. A text that cannot be used raises an InputError."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
    ) -> ImagePrompt:
        """The prompt of messages, whose image parts hold patches."""
        ...

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """A text to be continued, with the token that begins a text (`<bos>`)."""
        ...

    def encode_text(self, text: str) -> tuple[int, ...]:
        """A text alone."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids; controls are shown by name."""
        ...

    def token_text(self, token: int) -> TokenText: ...

    def compiler(self, served: ServedModel) -> GrammarCompiler:
        """The grammar compiler for this vocabulary, with its cache."""
        ...

    def task_context(
        self, served: ServedModel, *, params: GenerationParams, seed: int, adapter: str | None, id_: str
    ) -> TaskContext:
        """What the tasks (infill, edit, decide) work with."""
        ...


def _prepared(image: RgbImage | ImagePatches) -> ImagePatches:
    assert isinstance(image, ImagePatches)  # `images.py` makes them, for models that have a tower
    return image


class CheckpointText:
    """The text of a checkpoint: its tokenizer, and its chat template if it has one."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._token_texts = TokenTexts(tokenizer)  # of the whole vocabulary, made at its first use

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: ChatTemplate | None, served: ServedModel) -> CheckpointText:
        # A text that cannot fit is refused before it is encoded, on every endpoint.
        limited = tokenizer.limited(served.max_positions)
        return cls(limited, None if template is None else template.with_tokenizer(limited))

    @classmethod
    def of_files(cls, path: Path, served: ServedModel) -> CheckpointText:
        """Of a checkpoint whose weights are elsewhere."""
        tokenizer, template = Tokenizer.from_directory(path), None
        with suppress(CheckpointError):
            template = ChatTemplate.from_directory(path, tokenizer)
        return cls.of(tokenizer, template, served)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
    ) -> ImagePrompt:
        if self._template is None:
            raise InputError("this model has no chat template; send a prompt to /v1/completions instead.")
        return self._template.render_with_images(
            messages, prepare=_prepared, tools=tools, enable_thinking=thinking
        )

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        bos = self._tokenizer.bos_id
        return (*(() if bos is None else (bos,)), *self._tokenizer.encode(text))

    def encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, controls=True)

    def token_text(self, token: int) -> TokenText:
        raw = self._tokenizer.bytes_of(token)
        text = (self._tokenizer.id_to_token(token) or "") if raw is None else self._tokenizer.decode([token])
        return TokenText(text=text, raw=raw)

    def compiler(self, served: ServedModel) -> GrammarCompiler:
        return GrammarCompiler(self._tokenizer, served.vocab_size, served.defaults.end_tokens)

    def task_context(
        self, served: ServedModel, *, params: GenerationParams, seed: int, adapter: str | None, id_: str
    ) -> TaskContext:
        return TaskContext(
            tokenizer=self._tokenizer,
            template=self._template,
            token_texts=self._token_texts,
            canvas_len=resolve_canvas_len(served.canvas_len, params.canvas_len),
            max_positions=served.max_positions,
            vocab_size=served.vocab_size,
            params=params,
            seed=seed,
            adapter=adapter,
            id=id_,
        )
