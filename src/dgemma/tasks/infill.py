"""Infill (fill in the middle): a gap of unknown length between two texts.

Candidate lengths are canvases of one batch: the gap open, the text after it pinned. After one step the most
likely lengths continue and are denoised to their end. Beginnings of a few texts written left to right after
the prefix are candidates too. All are scored by the causal likelihood of the gap and the text after it
together: a gap alone is most likely when it is short. A gap longer than a canvas is written canvas by canvas,
and closed where that is most likely per token. The part of the text after the gap that does not fit on a
canvas is put before everything else.

With method "prompt", a model with a chat template gets the whole text with a mark in it and writes what
belongs there; its end token closes the gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dgemma.engine.request import EngineRequest
from dgemma.errors import InputError
from dgemma.events import Answer
from dgemma.params import MAX_LOGPROBS
from dgemma.structured_output.response_format import ResponseFormat
from dgemma.tasks.borders import Borders, healed_borders, plain_borders
from dgemma.tasks.context import Ids, TaskContext, canvas_of
from dgemma.tasks.rounds import Rounds

DEFAULT_MAX_TOKENS = 40
MAX_TOKENS = 4096

# Tokens after the gap that are scored with it.
_SCORED_AFTER = 24
# Steps a gap may take beyond one for each of its tokens: a step settles at least one.
_SPARE_STEPS = 4
# Every length up to here is tried; above it every second one, and the best one's neighbours.
_EVERY_LENGTH = 16
# Tokens of a draft: of longer gaps, only canvases know where they lead.
_LONGEST_DRAFT = 16
# A beginning of a draft is scored if the text after the gap begins with one of so many likely next tokens.
_LIKELY_NEXT = MAX_LOGPROBS
# Of the context, the most that shows text far after the gap.
_FAR = 0.25

_MARK = "<FILL>"
_BROKEN = "\ufffd"
_ASK = f"Write only the text that belongs at the mark {_MARK}, nothing else."


@dataclass(frozen=True, kw_only=True)
class FillOptions:
    max_tokens: int = DEFAULT_MAX_TOKENS
    """Maximum number of tokens in the gap."""
    lengths: tuple[int, ...] | None = None
    """Lengths to try, in tokens; None: from 1 to max_tokens."""
    keep: int = 4
    """Number of lengths that continue after one step."""
    drafts: int = 8
    """Number of texts written left to right after the prefix, whose beginnings are candidates: one greedily,
    the others sampled. None with a response format."""
    heal: bool = True
    """Token healing: remove the tokens at both borders, so that a token of the vocabulary may span them."""
    method: Literal["lengths", "prompt"] = "lengths"
    """Try lengths on canvases that show what follows, or ask through the chat template."""
    form: ResponseFormat | None = None
    """Response format of the text in the gap. Such a gap is not longer than a canvas."""

    def __post_init__(self) -> None:
        for name, least, most in (("max_tokens", 1, MAX_TOKENS), ("keep", 1, 64), ("drafts", 0, 64)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise InputError.about(
                    name, f"is {value!r}; it must be a whole number from {least} to {most}."
                )
        if self.method not in ("lengths", "prompt"):
            raise InputError.about("method", f"is {self.method!r}; it must be lengths or prompt.")
        if self.lengths is not None:
            several = isinstance(self.lengths, tuple) and len(self.lengths) > 0
            if not several or not all(type(n) is int and n >= 0 for n in self.lengths):
                raise InputError.about("lengths", f"is {self.lengths!r}; give whole numbers of 0 or more.")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A candidate text for the gap."""

    tokens: Ids  # of the gap, with what was removed at its borders
    text: str  # between prefix and suffix
    log_likelihood: float  # of the gap and what follows it, read left to right
    scored: int  # number of tokens scored

    @property
    def per_token(self) -> float:
        return self.log_likelihood / max(1, self.scored)


@dataclass(frozen=True, kw_only=True)
class Filled:
    text: str
    log_likelihood: float
    candidates: tuple[Candidate, ...]  # the best first
    forwards: int  # denoise forwards of canvases
    prompt_tokens: int
    cached_tokens: int
    seed: int
    draft_tokens: int = 0  # written left to right

    @property
    def num_tokens(self) -> int:
        return len(self.candidates[0].tokens) if self.candidates else 0


@dataclass
class _Search:
    """State of the search for one gap."""

    task: TaskContext
    borders: Borders
    context: Ids
    options: FillOptions
    found: dict[Ids, Candidate] = field(default_factory=dict)
    tried: set[int] = field(default_factory=set)
    drafted: bool = False
    forwards: int = 0
    draft_tokens: int = 0
    cached_tokens: int = 0

    def canvas(
        self, written: Ids, length: int, keeps_run: bool = False, **options: Any
    ) -> EngineRequest | None:
        """A gap of `length` more tokens after those that are written; None: no tokens fit there.

        keeps_run: it begins with the removed tokens, unchanged.
        """
        sets = self.borders.sets(len(written) + length)
        run = self.borders.run if keeps_run else ()
        if sets is None or (keeps_run and (not run or written or length <= len(run))):
            return None
        sets = {at: tokens for at, tokens in sets.items() if at >= len(run)}
        here = {at - len(written): tokens for at, tokens in sets.items() if at >= len(written)}
        task = self.task
        pinned = canvas_of(length, self.borders.after, task.end_token, task.canvas_len, here)
        pinned = replace(pinned, fixed={**pinned.fixed, **dict(enumerate(run))})
        constraint = None
        if self.options.form is not None:
            head, tail = self.borders.head, self.borders.tail
            assert task.compiler is not None
            constraint = task.compiler.compile_infill(self.options.form, head, tail, begin=0, end=length)
            if not constraint.completable_states(0, task.canvas_len, pinned.choices)[0]:
                return None
        steps = min(task.params.max_denoising_steps, length + _SPARE_STEPS)
        return task.write(
            (*self.context, *written),
            max_tokens=task.canvas_len,
            pinned=pinned,
            constraint=constraint,
            **{"max_denoising_steps": steps, **options},
        )

    def count(self, answers: Sequence[Answer]) -> None:
        self.forwards += sum(sum(answer.steps) for answer in answers)
        self.draft_tokens += sum(answer.causal_tokens for answer in answers)
        self.cached_tokens = max([self.cached_tokens, *(answer.cached_tokens for answer in answers)])

    def close(self, written: Ids, lengths: Sequence[int]) -> Rounds[None]:
        """Find candidates of these lengths after what is written."""
        drafts, self.drafted = [] if self.drafted else self.drafts(), True
        self.tried |= set(lengths)
        ends_here = 0 in lengths and bool(written)
        ways: list[tuple[int, bool]] = []
        # Text that seems cut may be complete: both are tried, each with its own best lengths.
        for keeps_run in (False, True):
            own = [(n, keeps_run) for n in lengths if n and self.canvas(written, n, keeps_run)]
            if len(own) > self.options.keep:
                options: dict[str, Any] = {"max_denoising_steps": 1, "logprobs": 1}
                first = yield [request for way in own if (request := self.canvas(written, *way, **options))]
                self.count(first)
                sure = {way: _surprise(answer, way[0]) for way, answer in zip(own, first, strict=True)}
                own = sorted(sorted(own, key=lambda way: sure[way])[: self.options.keep])
            ways += own
        canvases = [request for way in ways if (request := self.canvas(written, *way))]
        answers = yield [*canvases, *drafts]
        self.count(answers)
        gaps = [(*written, *answer.tokens[:n]) for (n, _), answer in zip(ways, answers, strict=False)]
        gaps += [written] if ends_here else []
        gaps += [gap for answer in answers[len(canvases) :] for gap in self.beginnings(answer)]
        yield from self.judge(gaps)

    def drafts(self) -> list[EngineRequest]:
        """Texts written left to right after the prefix. What was removed at its end stands there again."""
        task, head = self.task, self.borders.head_tokens
        prompt = (*self.context, *head)
        room = task.max_positions - len(prompt) - len(self.borders.tail_tokens) - _SCORED_AFTER
        length = max((n for n in self.inner_lengths if n <= min(_LONGEST_DRAFT, room)), default=0)
        if self.options.form is not None or not length:
            return []
        return [
            task.write(
                prompt,
                max_tokens=length + 1,  # of the last one, only what else was likely is looked at
                seed=(task.seed + number) % (1 << 64),
                decode="causal",
                temperature=float(number > 0),
                top_k=None,
                top_p=None,
                logprobs=_LIKELY_NEXT,
            )
            for number in range(self.options.drafts)
        ]

    @property
    def inner_lengths(self) -> Sequence[int]:
        """Numbers of tokens in the gap, without what was removed at its borders."""
        return self.options.lengths or range(1, self.options.max_tokens + 1)

    def beginnings(self, draft: Answer) -> list[Ids]:
        """Gaps of the wanted lengths after which the suffix may follow.

        The last token of one may hold what was removed of the suffix.
        """
        assert draft.logprobs is not None
        head, tail = self.borders.head_tokens, self.borders.tail_tokens
        found = []
        for length in self.inner_lengths:
            if not 0 < length < len(draft.tokens):
                continue
            likely = {token for token, _ in draft.logprobs[length]}
            for end in dict.fromkeys((tail, ())):
                follows = (*end, *self.borders.after)
                if not follows or follows[0] in likely:
                    found.append((*head, *draft.tokens[:length], *end))
        return found

    def judge(self, gaps: Sequence[Ids]) -> Rounds[None]:
        """Score gaps that are written to their end."""
        after = self.borders.after[:_SCORED_AFTER] or (self.task.end_token,)
        texts = {gap: self.borders.inside(self.task.tokenizer.decode(gap)) for gap in gaps}
        # Bytes that make no character are no text.
        good = [
            gap
            for gap, text in texts.items()
            if text is not None and (gap or self.borders.after) and _BROKEN not in text
        ]
        scored = yield [self.task.score((*self.context, *gap, *after), len(self.context)) for gap in good]
        for gap, answer in zip(good, scored, strict=True):
            self.found[gap] = Candidate(
                tokens=gap,
                text=texts[gap] or "",
                log_likelihood=sum(answer.scores),
                scored=len(answer.scores),
            )

    def ranked(self, max_gap: int) -> list[Candidate]:
        """The best first; a candidate that adds nothing comes last unless the caller listed lengths.

        max_gap: of one canvas. Such gaps are compared by the likelihood of gap and text after. The best of
        them and longer ones are compared per token: each token more costs likelihood, however good the text.
        """
        explicit = self.options.lengths is not None
        short = [one for one in self.found.values() if len(one.tokens) <= max_gap]
        best = max(short, key=lambda one: one.log_likelihood, default=None)

        def order(candidate: Candidate) -> tuple[bool, float, float, Ids]:
            level = best if best is not None and len(candidate.tokens) <= max_gap else candidate
            return (
                not candidate.text and not explicit,
                -level.per_token,
                -candidate.log_likelihood,
                candidate.tokens,
            )

        return sorted(self.found.values(), key=order)


def fill(task: TaskContext, prefix: str, suffix: str, options: FillOptions) -> Rounds[Filled]:
    """The most likely text between `prefix` and `suffix`."""
    if options.method == "prompt":
        result = yield from _ask(task, prefix, suffix, options)
        return result
    if options.heal:
        borders = healed_borders(task.tokenizer, task.token_texts, prefix, suffix)
    else:
        borders = plain_borders(task.tokenizer, prefix, suffix)
    result = yield from fill_between(task, borders, options)
    return result


def fill_between(task: TaskContext, borders: Borders, options: FillOptions) -> Rounds[Filled]:
    """The same between tokens."""
    # At least one token of the suffix stays on the canvas.
    max_gap = task.canvas_len - 1 if borders.after else task.canvas_len
    taken_back = bool(borders.head) + bool(borders.tail)
    longest = max(options.lengths) if options.lengths else options.max_tokens
    most = min(longest + taken_back, max(max_gap, task.max_positions // 2))
    most = most if options.form is None else min(most, max_gap)
    # Canvases before the one that closes the gap.
    whole = max(0, most - max_gap + task.canvas_len - 1) // task.canvas_len
    needed = (whole + 1) * task.canvas_len + _SCORED_AFTER
    far = _far(task, borders, min(most, max_gap), whole)
    context = (*far, *task.opening(borders.before, reserve=min(needed + len(far), task.max_positions - 1)))
    search = _Search(task, borders, context, options)
    written: Ids = ()
    for number in range(whole + 1):
        left = min(most - len(written), max_gap)
        wanted = options.lengths and [n + taken_back - len(written) for n in options.lengths]
        yield from search.close(written, [n for n in wanted or _grid(left, written) if 0 <= n <= left])
        if number == whole:
            break
        (answer,) = yield [_onwards(search, written)]
        search.count([answer])
        written += answer.tokens
    if options.lengths is not None and 0 in options.lengths and not taken_back:
        yield from search.judge([()])
    ranked = search.ranked(max_gap)
    if ranked and not options.lengths and not whole and len(ranked[0].tokens) >= _EVERY_LENGTH:
        beside = {len(ranked[0].tokens) - 1, len(ranked[0].tokens) + 1} - search.tried
        yield from search.close((), [n for n in sorted(beside) if n <= min(most, max_gap)])
        ranked = search.ranked(max_gap)
    if not ranked and options.form is not None:
        raise InputError(
            f"between the two ends no text of the response format has at most "
            f"{min(options.max_tokens, max_gap)} tokens; "
            "allow more, as far as a canvas holds them, or ask for less."
        )
    if not ranked:
        raise InputError("no text of these lengths fits between the two ends; give other lengths.")
    return Filled(
        text=ranked[0].text,
        log_likelihood=ranked[0].log_likelihood,
        candidates=tuple(ranked),
        forwards=search.forwards,
        draft_tokens=search.draft_tokens,
        prompt_tokens=len(context),
        cached_tokens=search.cached_tokens,
        seed=task.seed,
    )


def _far(task: TaskContext, borders: Borders, longest: int, whole: int) -> Ids:
    """The text after a gap that does not fit on a canvas, as a separate text before the prefix."""
    rest = borders.after[task.canvas_len - longest :]
    rest = rest if len(borders.after) > task.canvas_len else ()
    limit = int(_FAR * task.max_positions) if not whole else 0
    return task.opening(rest[:limit], reserve=0) if rest and limit else ()


def _ask(task: TaskContext, prefix: str, suffix: str, options: FillOptions) -> Rounds[Filled]:
    if task.template is None:
        raise InputError('this model has no chat template, so it takes no instruction; use method "lengths".')
    question = f"{_ASK}\n\n{prefix}{_MARK}{suffix}"
    prompt = tuple(task.template.render([{"role": "user", "content": question}]))
    constraint = None
    if options.form is not None:
        assert task.compiler is not None
        constraint = task.compiler.compile(options.form)
    (answer,) = yield [task.answer(prompt, max_tokens=options.max_tokens, constraint=constraint)]
    search = _Search(task, plain_borders(task.tokenizer, prefix, suffix), (), options)
    search.context = task.opening(search.borders.before, reserve=task.canvas_len + _SCORED_AFTER)
    search.count([answer])
    yield from search.judge([tuple(task.tokenizer.encode(answer.text))])
    ranked = search.ranked(task.canvas_len)
    return Filled(
        text=answer.text,
        log_likelihood=ranked[0].log_likelihood if ranked else -math.inf,
        candidates=tuple(ranked),
        forwards=search.forwards,
        draft_tokens=search.draft_tokens,
        prompt_tokens=len(prompt),
        cached_tokens=search.cached_tokens,
        seed=task.seed,
    )


def _onwards(search: _Search, written: Ids) -> EngineRequest:
    """A whole canvas of gap, without the text after it."""
    task = search.task
    sets = search.borders.sets(task.canvas_len + 2) or {}
    first = {} if written or 0 not in sets else {0: sets[0]}
    pinned = canvas_of(task.canvas_len, (), task.end_token, task.canvas_len, first)
    return task.write((*search.context, *written), max_tokens=task.canvas_len, pinned=pinned or None)


def _grid(most: int, written: Ids) -> list[int]:
    first = 0 if written else 1
    return [n for n in range(first, most + 1) if n <= _EVERY_LENGTH or n % 2 == 0 or n == most]


def _surprise(answer: Answer, length: int) -> float:
    """Minus the log-probability of the argmax of the gap after one step."""
    assert answer.logprobs is not None
    return -sum(tokens[0][1] for tokens in answer.logprobs[:length])
