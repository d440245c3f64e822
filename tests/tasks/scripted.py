"""What the canvas tests share: a task context without a model, and an engine that answers by a rule.

Work on canvases is a generator of requests, so a rule that says what stands where, and how likely a text is,
stands in for a model, and what must come out is known exactly. Each request is checked as the real engine
checks it: work that a rule would answer and an engine refuse is wrong work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from dgemma.engine.request import EngineRequest, PinnedTokens
from dgemma.events import Answer, FinishReason, LogProbs
from dgemma.params import GenerationParams
from dgemma.tasks.context import Ids, TaskContext
from dgemma.text.chat_template import ChatTemplate
from dgemma.text.token_texts import TokenTexts
from dgemma.text.tokenizer import Tokenizer

DIRECTORY = Path(__file__).parent / "tokenizer"  # 6,144 tokens, learned from technical English
TOKENIZER = Tokenizer.from_directory(DIRECTORY)
TOKEN_TEXTS = TokenTexts(TOKENIZER)
TEMPLATE = ChatTemplate.from_directory(DIRECTORY, TOKENIZER)
BOS, END = 2, 1
CANVAS = 16
# What a rule gives a word that it does not name.
UNLIKELY = 1e-9


def encode(text: str) -> Ids:
    return tuple(TOKENIZER.encode(text))


def task_context(**changes: Any) -> TaskContext:
    made = TaskContext(
        tokenizer=TOKENIZER,
        token_texts=TOKEN_TEXTS,
        canvas_len=CANVAS,
        max_positions=1024,
        vocab_size=TOKENIZER.vocab_size,
        params=GenerationParams(),
        seed=7,
    )
    return replace(made, **changes)


@cache
def plain_words() -> list[int]:
    """Words of letters with a blank before them, and so never part of another one: a text may be any."""
    texts = {id_: TOKEN_TEXTS.text_of(id_) or "" for id_ in range(TOKENIZER.vocab_size)}
    return [
        id_
        for id_, text in texts.items()
        if text[:1] == " " and text[1:].isalpha() and encode(text) == (id_,)
    ]


class Scripted:
    """An engine that answers by two rules. Subclasses say which."""

    def __init__(self, task: TaskContext) -> None:
        self.task = task
        self.rounds: list[list[EngineRequest]] = []

    def reads(self, request: EngineRequest, at: int) -> Mapping[int, float]:
        """Shares of the words that may stand at an open position."""
        raise NotImplementedError

    def likes(self, before: Ids, token: int) -> float:
        """The log-probability of a token after others."""
        raise NotImplementedError

    def __call__(self, requests: Sequence[EngineRequest]) -> list[Answer]:
        self.rounds.append(list(requests))
        return [self._answer(request) for request in requests]

    @property
    def written(self) -> list[EngineRequest]:
        """All requests so far that write on a canvas."""
        return [one for one in self.asked if one.score_from is None and one.params.decode == "diffuse"]

    @property
    def drafts(self) -> list[EngineRequest]:
        """All requests so far that write left to right."""
        return [one for one in self.asked if one.params.decode == "causal"]

    @property
    def scored(self) -> list[EngineRequest]:
        return [one for one in self.asked if one.score_from is not None]

    @property
    def asked(self) -> list[EngineRequest]:
        return [one for asked in self.rounds for one in asked]

    def _answer(self, request: EngineRequest) -> Answer:
        task = self.task
        assert request.prompt
        assert all(0 <= token < task.vocab_size for token in request.prompt)
        assert request.params.seed is None
        if request.score_from is not None:
            assert 1 <= request.score_from < len(request.prompt) <= task.max_positions
            places = range(request.score_from, len(request.prompt))
            scores = [self.likes(request.prompt[:at], request.prompt[at]) for at in places]
            return _told(request, scores=tuple(scores))
        return self._write(request)

    def _write(self, request: EngineRequest) -> Answer:
        task, params = self.task, request.params
        assert params.max_tokens is not None
        is_causal = params.decode == "causal"
        room = params.max_tokens if is_causal else -(-params.max_tokens // task.canvas_len) * task.canvas_len
        assert len(request.prompt) + room <= task.max_positions
        given = request.pinned or PinnedTokens()
        given.check(task.vocab_size, params.max_tokens, task.canvas_len)
        tokens: list[int] = []
        logprobs: list[LogProbs] = []
        watched: list[tuple[int, LogProbs]] = []
        for at in range(params.max_tokens):
            shares = self._shares(request, given, at)
            ranked = sorted(((w, math.log(p)) for w, p in shares.items()), key=lambda pair: -pair[1])
            tokens.append(ranked[0][0])
            logprobs.append(tuple(ranked[: params.logprobs or 0]))
            if at in given.watch:
                # What is watched is told as the model has it, without biases.
                plain = self._shares(replace(request, logit_bias=()), given, at)
                words = given.watch[at]
                watched.append((at, tuple((w, math.log(plain.get(w, UNLIKELY))) for w in words)))
            if not params.ignore_end and tokens[-1] in params.end_tokens:
                break
        return _told(
            request,
            text=TOKENIZER.decode(tokens),
            tokens=tuple(tokens),
            steps=() if is_causal else (min(3, params.max_denoising_steps),),
            causal_tokens=len(tokens) if is_causal else 0,
            logprobs=None if params.logprobs is None else tuple(logprobs),
            watched=tuple(watched),
        )

    def _shares(self, request: EngineRequest, given: PinnedTokens, at: int) -> dict[int, float]:
        if at in given.fixed:
            return {given.fixed[at]: 1.0}
        found = dict(self.reads(request, at))
        for word, bias in request.logit_bias:
            if bias <= -100:
                found.pop(word, None)
        if at in given.among:
            found = {word: found.get(word, UNLIKELY) for word in given.among[at]}
        total = sum(found.values())
        return {word: share / total for word, share in found.items()}


def _told(request: EngineRequest, *, text: str = "", tokens: Ids = (), **more: Any) -> Answer:
    return Answer(
        text=text,
        tokens=tokens,
        finish_reason=FinishReason.LENGTH,
        seed=request.seed,
        decode="diffuse",
        prompt_tokens=len(request.prompt),
        **more,
    )


class ByHeart(Scripted):
    """Knows one text by heart: writes its words where they stand in it, likes what follows in it.

    So of all gaps only the one of the right length has no seam, and its score is known: GOOD for each token.
    """

    GOOD, BAD = -0.1, -30.0

    def __init__(self, task: TaskContext, text: Ids, *, begins: int = 1) -> None:
        super().__init__(task)
        self.text = text
        self.begins = begins  # the place of the text's first token in a prompt
        self.pairs = set(pairwise((BOS, *text)))

    def reads(self, request: EngineRequest, at: int) -> Mapping[int, float]:
        place = len(request.prompt) - self.begins + at
        return {self.text[place] if place < len(self.text) else self.text[-1]: 1.0}

    def likes(self, before: Ids, token: int) -> float:
        return self.GOOD if (before[-1], token) in self.pairs else self.BAD


def gap_of(request: EngineRequest, canvas_len: int = CANVAS) -> int:
    """How many positions of a canvas are open at its beginning."""
    fixed = request.pinned.fixed if request.pinned else {}
    return min(fixed, default=canvas_len)
