"""What the server asks of text: a chat or a prompt as token ids, one token as it is shown, a workbench.

Messages go in, never strings with controls in them: who writes the ids of a prompt's controls is the
checkpoint's template alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dgemma.canvas.workbench import Workbench
from dgemma.constraint.compiler import Compiler
from dgemma.engine.service import ServedModel
from dgemma.errors import InputError
from dgemma.params import GenerationParams
from dgemma.text.chat_template import ChatTemplate
from dgemma.text.piece_table import PieceTable
from dgemma.text.tokenizer import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, kw_only=True)
class TokenPiece:
    """One token as log-probabilities show it."""

    text: str  # a control by its name; a byte within a character as the replacement character
    raw: bytes | None  # what it adds to the text; None for a control, which adds nothing


class TextService(Protocol):
    """Called from worker threads, several at once. Whatever is wrong with a text is an InputError."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
    ) -> tuple[int, ...]: ...

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """A text to be continued, with what begins one (`<bos>`)."""
        ...

    def piece(self, token: int) -> TokenPiece: ...

    def compiler(self, served: ServedModel) -> Compiler:
        """What makes constraints for this vocabulary; it keeps what it made."""
        ...

    def workbench(
        self, served: ServedModel, *, params: GenerationParams, seed: int, adapter: str | None, id_: str
    ) -> Workbench:
        """What fill, edit and decide work with."""
        ...


class CheckpointText:
    """The text of a checkpoint: its tokenizer, and its chat template if it has one."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._pieces = PieceTable(tokenizer)  # of the whole vocabulary, made once, when it is first asked for

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
    ) -> tuple[int, ...]:
        if self._template is None:
            raise InputError("this model has no chat template; send a prompt to /v1/completions instead.")
        return tuple(self._template.render(messages, tools=tools, enable_thinking=thinking))

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        bos = self._tokenizer.bos_id
        return (*(() if bos is None else (bos,)), *self._tokenizer.encode(text))

    def piece(self, token: int) -> TokenPiece:
        spelled = self._tokenizer.piece(token) or ""
        if not self._tokenizer.text_ids([token]):
            return TokenPiece(text=spelled, raw=None)
        text = self._tokenizer.decode([token])
        byte = _BYTE_PIECE.fullmatch(spelled) if token in self._tokenizer.byte_ids else None
        return TokenPiece(text=text, raw=text.encode() if byte is None else bytes.fromhex(byte[1]))

    def compiler(self, served: ServedModel) -> Compiler:
        return Compiler(self._tokenizer, served.vocab_size, served.defaults.end_tokens)

    def workbench(
        self, served: ServedModel, *, params: GenerationParams, seed: int, adapter: str | None, id_: str
    ) -> Workbench:
        return Workbench(
            tokenizer=self._tokenizer,
            template=self._template,
            pieces=self._pieces,
            canvas_len=served.canvas_len,
            max_positions=served.max_positions,
            vocab_size=served.vocab_size,
            params=params,
            seed=seed,
            adapter=adapter,
            id=id_,
        )
