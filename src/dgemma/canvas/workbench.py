"""What work on canvases must know of a model, and the requests it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from dgemma.constraint.compiler import Compiler
from dgemma.constraint.constraint import Constraint
from dgemma.engine.service import EngineRequest
from dgemma.given import Given, Words
from dgemma.params import GenerationParams
from dgemma.text.chat_template import ChatTemplate
from dgemma.text.piece_table import PieceTable
from dgemma.text.tokenizer import Tokenizer

Ids = tuple[int, ...]

# Enough to forbid a word, small enough to stay a number in any arithmetic.
_FORBIDDEN = -1e4


@dataclass(frozen=True, kw_only=True)
class Workbench:
    tokenizer: Tokenizer
    canvas_len: int
    max_positions: int
    vocab_size: int
    params: GenerationParams  # the checkpoint's defaults, changed by the caller's options
    seed: int
    template: ChatTemplate | None = None
    adapter: str | None = None
    id: str = ""
    pieces: PieceTable = field(repr=False)
    compiler: Compiler | None = field(default=None, repr=False)  # needed where a gap has a form

    def opening(self, ids: Sequence[int], *, room: int) -> Ids:
        """The beginning of text and `ids`, of which the last ones, if there are too many for `room` more."""
        bos = self.tokenizer.bos_id
        most = max(0, self.max_positions - room - 1)
        # Something must stand before a canvas; where there is no beginning of text, the end of another.
        return (self.end_token if bos is None else bos, *ids[max(0, len(ids) - most) :])

    def write(
        self,
        prompt: Ids,
        *,
        max_tokens: int,
        given: Given | None = None,
        constraint: Constraint | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> EngineRequest:
        """Tokens behind `prompt` that stand where they are asked for: none of them ends the text."""
        params = replace(
            self.params, max_tokens=max_tokens, seed=None, ignore_end=True, stop=(), decode="diffuse"
        )
        return EngineRequest(
            prompt=prompt,
            seed=self.seed if seed is None else seed,
            params=replace(params, **options),
            adapter=self.adapter,
            id=self.id,
            given=given,
            constraint=constraint,
            logit_bias=self._no_ends,
        )

    def answer(
        self,
        prompt: Ids,
        *,
        max_tokens: int,
        given: Given | None = None,
        constraint: Constraint | None = None,
        seed: int | None = None,
    ) -> EngineRequest:
        """An answer as to any prompt, with an end of its own."""
        return EngineRequest(
            prompt=prompt,
            seed=self.seed if seed is None else seed,
            params=replace(self.params, max_tokens=max_tokens, seed=None),
            adapter=self.adapter,
            id=self.id,
            given=given,
            constraint=constraint,
        )

    def score(self, prompt: Ids, score_from: int) -> EngineRequest:
        """How likely the tokens of `prompt` from `score_from` on are, read left to right."""
        params = replace(self.params, seed=None)
        return EngineRequest(
            prompt=prompt, seed=0, params=params, adapter=self.adapter, id=self.id, score_from=score_from
        )

    @property
    def end_token(self) -> int:
        """What fills a canvas behind the end of its text."""
        return self.params.end_tokens[0] if self.params.end_tokens else (self.tokenizer.eos_id or 0)

    @cached_property
    def _no_ends(self) -> tuple[tuple[int, float], ...]:
        """No control may be written into a text."""
        controls = {*self.tokenizer.controls.values(), *self.params.end_tokens}
        return tuple((id_, _FORBIDDEN) for id_ in sorted(controls) if id_ < self.vocab_size)


def canvas_of(
    gap: int, behind: Sequence[int], end_token: int, canvas_len: int, sets: Mapping[int, Words] | None = None
) -> Given:
    """A canvas of `gap` open positions, what follows them, and end tokens behind the end of the text."""
    rest = [*behind[: canvas_len - gap]]
    rest += [end_token] * (canvas_len - gap - len(rest))
    return Given(fixed={gap + at: token for at, token in enumerate(rest)}, among=dict(sets or {}))
