"""`TaskContext`: what infill, edit and decide need of a model, and the requests they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from dgemma.engine.request import EngineRequest, PinnedTokens, TokenIds, auto_canvas_len
from dgemma.params import GenerationParams
from dgemma.structured_output.compiler import GrammarCompiler
from dgemma.structured_output.constraint import Constraint
from dgemma.text.chat_template import ChatTemplate
from dgemma.text.token_texts import TokenTexts
from dgemma.text.tokenizer import Tokenizer

Ids = tuple[int, ...]

# Enough to forbid a token, small enough to stay finite in any dtype.
_FORBIDDEN = -1e4


@dataclass(frozen=True, kw_only=True)
class TaskContext:
    tokenizer: Tokenizer
    canvas_len: int
    max_positions: int
    vocab_size: int
    params: GenerationParams  # the checkpoint's defaults, changed by the caller's options
    seed: int
    template: ChatTemplate | None = None
    adapter: str | None = None
    id: str = ""
    token_texts: TokenTexts = field(repr=False)
    # Needed for a gap with a response format.
    compiler: GrammarCompiler | None = field(default=None, repr=False)

    def opening(self, ids: Sequence[int], *, reserve: int) -> Ids:
        """The bos token and the last of `ids` that leave `reserve` positions of the context free."""
        bos = self.tokenizer.bos_id
        most = max(0, self.max_positions - reserve - 1)
        # A canvas needs a context of at least one token: without a bos token, the end token.
        return (self.end_token if bos is None else bos, *ids[max(0, len(ids) - most) :])

    def write(
        self,
        prompt: Ids,
        *,
        max_tokens: int,
        pinned: PinnedTokens | None = None,
        constraint: Constraint | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> EngineRequest:
        """A request for tokens after `prompt`, none of which is an end token."""
        params = replace(
            self.params, max_tokens=max_tokens, seed=None, ignore_end=True, stop=(), decode="diffuse"
        )
        if params.canvas_len is not None:
            params = replace(params, canvas_len=self.canvas_len)  # where "auto", the task has chosen
        return EngineRequest(
            prompt=prompt,
            seed=self.seed if seed is None else seed,
            params=replace(params, **options),
            adapter=self.adapter,
            id=self.id,
            pinned=pinned,
            constraint=constraint,
            logit_bias=self._no_ends,
        )

    def answer(
        self,
        prompt: Ids,
        *,
        max_tokens: int,
        pinned: PinnedTokens | None = None,
        constraint: Constraint | None = None,
        seed: int | None = None,
    ) -> EngineRequest:
        """A plain request, which ends at an end token."""
        return EngineRequest(
            prompt=prompt,
            seed=self.seed if seed is None else seed,
            params=replace(self.params, max_tokens=max_tokens, seed=None),
            adapter=self.adapter,
            id=self.id,
            pinned=pinned,
            constraint=constraint,
        )

    def score(self, prompt: Ids, score_from: int) -> EngineRequest:
        """How likely the tokens of `prompt` from `score_from` on are, read left to right."""
        params = replace(self.params, seed=None)
        return EngineRequest(
            prompt=prompt, seed=0, params=params, adapter=self.adapter, id=self.id, score_from=score_from
        )

    def sized(self, num_tokens: int) -> TaskContext:
        """For canvases that hold at most `num_tokens` before their end tokens."""
        if self.params.canvas_len != "auto":
            return self
        return replace(self, canvas_len=auto_canvas_len(num_tokens + 1, self.canvas_len))

    @property
    def end_token(self) -> int:
        """What fills a canvas after the end of its text."""
        return self.params.end_tokens[0] if self.params.end_tokens else (self.tokenizer.eos_id or 0)

    @cached_property
    def _no_ends(self) -> tuple[tuple[int, float], ...]:
        """No control may be written into a text."""
        controls = {*self.tokenizer.controls.values(), *self.params.end_tokens}
        return tuple((id_, _FORBIDDEN) for id_ in sorted(controls) if id_ < self.vocab_size)


def canvas_of(
    gap: int,
    after: Sequence[int],
    end_token: int,
    canvas_len: int,
    sets: Mapping[int, TokenIds] | None = None,
) -> PinnedTokens:
    """A canvas of `gap` open positions, what follows them, and end tokens after the end of the text."""
    rest = [*after[: canvas_len - gap]]
    rest += [end_token] * (canvas_len - gap - len(rest))
    return PinnedTokens(fixed={gap + at: token for at, token in enumerate(rest)}, among=dict(sets or {}))
