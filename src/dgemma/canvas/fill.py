"""A gap between two given texts, of unknown length.

Candidate lengths are canvases of one batch: the gap open, the text behind it pinned. After one step the
likeliest lengths go on, are denoised to their end, and are scored by the causal likelihood of the gap and the
text behind it together: a gap alone is likeliest when it is short. A gap longer than a canvas is written
canvas by canvas, and closed where that is likeliest. Of the text behind, what a canvas cannot show is read
before everything else.

The other way is to ask: a model with a chat template sees the whole text with a mark in it and writes what
belongs there, and its end token closes the gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dgemma.canvas.borders import Borders, healed_borders, plain_borders
from dgemma.canvas.rounds import Rounds
from dgemma.canvas.workbench import Ids, Workbench, canvas_of
from dgemma.constraint.forms import Form
from dgemma.engine.service import EngineRequest
from dgemma.errors import InputError
from dgemma.events import Answer

DEFAULT_MAX_TOKENS = 40
MAX_TOKENS = 4096

# Tokens behind the gap that are scored with it.
_SCORED_BEHIND = 24
# Steps a gap may take beyond one for each of its tokens: a step settles at least one.
_SPARE_STEPS = 4
# Every length up to here is tried; above it every second one, and the best one's neighbours.
_EVERY_LENGTH = 16
# Of the context, the most that shows text far behind the gap.
_FAR = 0.25

_MARK = "<FILL>"
_BROKEN = "\ufffd"
_ASK = f"Write only the text that belongs at the mark {_MARK}, nothing else."


@dataclass(frozen=True, kw_only=True)
class FillOptions:
    max_tokens: int = DEFAULT_MAX_TOKENS
    """Most tokens the gap may have."""
    lengths: tuple[int, ...] | None = None
    """Lengths to try, in tokens; None: from 1 to max_tokens."""
    keep: int = 4
    """Lengths that go on after one step."""
    heal: bool = True
    """Take back the words at both borders, so that a word of the vocabulary may stand across them."""
    method: Literal["lengths", "prompt"] = "lengths"
    """Try lengths on canvases that show what follows, or ask through the chat template."""
    form: Form | None = None
    """What the text in the gap shall be. Such a gap is not longer than a canvas."""

    def __post_init__(self) -> None:
        for name, least, most in (("max_tokens", 1, MAX_TOKENS), ("keep", 1, 64)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise InputError(f"{name} is {value!r}; it must be a whole number from {least} to {most}.")
        if self.method not in ("lengths", "prompt"):
            raise InputError(f"method is {self.method!r}; it must be lengths or prompt.")
        if self.lengths is not None:
            several = isinstance(self.lengths, tuple) and len(self.lengths) > 0
            if not several or not all(type(n) is int and n >= 0 for n in self.lengths):
                raise InputError(f"lengths is {self.lengths!r}; give whole numbers of 0 or more.")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to fill the gap."""

    tokens: Ids  # of the gap, with what was taken back at its borders
    text: str  # between the given ends
    log_likelihood: float  # of the gap and what follows it, read left to right
    scored: int  # tokens it is the likelihood of

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

    @property
    def num_tokens(self) -> int:
        return len(self.candidates[0].tokens) if self.candidates else 0


@dataclass
class _Search:
    """What is known so far of a gap."""

    bench: Workbench
    borders: Borders
    context: Ids
    options: FillOptions
    found: dict[Ids, Candidate] = field(default_factory=dict)
    tried: set[int] = field(default_factory=set)
    forwards: int = 0
    cached_tokens: int = 0

    def canvas(
        self, written: Ids, length: int, keeps_run: bool = False, **options: Any
    ) -> EngineRequest | None:
        """A gap of `length` more tokens behind those that are written; None: no words could stand there.

        keeps_run: it begins with the words that were taken back, as they were.
        """
        sets = self.borders.sets(len(written) + length)
        run = self.borders.run if keeps_run else ()
        if sets is None or (keeps_run and (not run or written or length <= len(run))):
            return None
        sets = {at: words for at, words in sets.items() if at >= len(run)}
        here = {at - len(written): words for at, words in sets.items() if at >= len(written)}
        bench = self.bench
        given = canvas_of(length, self.borders.behind, bench.end_token, bench.canvas_len, here)
        given = replace(given, fixed={**given.fixed, **dict(enumerate(run))})
        constraint = None
        if self.options.form is not None:
            head, tail = self.borders.head, self.borders.tail
            assert bench.compiler is not None
            constraint = bench.compiler.gap(self.options.form, head, tail, begin=0, end=length)
            if not constraint.allows(0, bench.canvas_len, given.choices)[0]:
                return None
        steps = min(bench.params.max_denoising_steps, length + _SPARE_STEPS)
        return bench.write(
            (*self.context, *written),
            max_tokens=bench.canvas_len,
            given=given,
            constraint=constraint,
            **{"max_denoising_steps": steps, **options},
        )

    def count(self, answers: Sequence[Answer]) -> None:
        self.forwards += sum(answer.forwards for answer in answers)
        self.cached_tokens = max([self.cached_tokens, *(answer.cached_tokens for answer in answers)])

    def close(self, written: Ids, lengths: Sequence[int]) -> Rounds[None]:
        """Find candidates of these lengths behind what is written."""
        self.tried |= set(lengths)
        ends_here = 0 in lengths and bool(written)
        ways: list[tuple[int, bool]] = []
        # A word that seems cut may be whole: both are tried, each with its own best lengths.
        for keeps_run in (False, True):
            own = [(n, keeps_run) for n in lengths if n and self.canvas(written, n, keeps_run)]
            if len(own) > self.options.keep:
                options: dict[str, Any] = {"max_denoising_steps": 1, "logprobs": 1}
                first = yield [request for way in own if (request := self.canvas(written, *way, **options))]
                self.count(first)
                sure = {way: _surprise(answer, way[0]) for way, answer in zip(own, first, strict=True)}
                own = sorted(sorted(own, key=lambda way: sure[way])[: self.options.keep])
            ways += own
        answers = yield [request for way in ways if (request := self.canvas(written, *way))]
        self.count(answers)
        gaps = [(*written, *answer.tokens[:n]) for (n, _), answer in zip(ways, answers, strict=True)]
        gaps += [written] if ends_here else []
        yield from self.judge(gaps)

    def judge(self, gaps: Sequence[Ids]) -> Rounds[None]:
        """Score gaps that are written to their end."""
        behind = self.borders.behind[:_SCORED_BEHIND] or (self.bench.end_token,)
        texts = {gap: self.borders.inside(self.bench.tokenizer.decode(gap)) for gap in gaps}
        # Bytes that make no character are no text.
        good = [
            gap
            for gap, text in texts.items()
            if text is not None and (gap or self.borders.behind) and _BROKEN not in text
        ]
        scored = yield [self.bench.score((*self.context, *gap, *behind), len(self.context)) for gap in good]
        for gap, answer in zip(good, scored, strict=True):
            self.found[gap] = Candidate(
                tokens=gap,
                text=texts[gap] or "",
                log_likelihood=sum(answer.scores),
                scored=len(answer.scores),
            )

    def ranked(self, *, per_token: bool) -> list[Candidate]:
        """The best first; one that adds nothing comes last: nobody asks for it."""
        asked = self.options.lengths is not None

        def order(one: Candidate) -> tuple[bool, float, Ids]:
            return (
                not one.text and not asked,
                -(one.per_token if per_token else one.log_likelihood),
                one.tokens,
            )

        return sorted(self.found.values(), key=order)


def fill(bench: Workbench, prefix: str, suffix: str, options: FillOptions) -> Rounds[Filled]:
    """The likeliest text between `prefix` and `suffix`."""
    if options.method == "prompt":
        result = yield from _ask(bench, prefix, suffix, options)
        return result
    if options.heal:
        borders = healed_borders(bench.tokenizer, bench.pieces, prefix, suffix)
    else:
        borders = plain_borders(bench.tokenizer, prefix, suffix)
    result = yield from fill_between(bench, borders, options)
    return result


def fill_between(bench: Workbench, borders: Borders, options: FillOptions) -> Rounds[Filled]:
    """The same between tokens."""
    # Of what follows, at least a token shows.
    room = bench.canvas_len - 1 if borders.behind else bench.canvas_len
    taken_back = bool(borders.head) + bool(borders.tail)
    longest = max(options.lengths) if options.lengths else options.max_tokens
    most = min(longest + taken_back, max(room, bench.max_positions // 2))
    most = most if options.form is None else min(most, room)
    whole = (
        max(0, most - room + bench.canvas_len - 1) // bench.canvas_len
    )  # canvases before the one that closes
    needed = (whole + 1) * bench.canvas_len + _SCORED_BEHIND
    far = _far(bench, borders, min(most, room), whole)
    context = (*far, *bench.opening(borders.before, room=min(needed + len(far), bench.max_positions - 1)))
    search = _Search(bench, borders, context, options)
    written: Ids = ()
    for number in range(whole + 1):
        left = min(most - len(written), room)
        wanted = options.lengths and [n + taken_back - len(written) for n in options.lengths]
        yield from search.close(written, [n for n in wanted or _grid(left, written) if 0 <= n <= left])
        if number == whole:
            break
        (answer,) = yield [_onwards(search, written)]
        search.count([answer])
        written += answer.tokens
    if options.lengths is not None and 0 in options.lengths and not taken_back:
        yield from search.judge([()])
    per_token = whole > 0
    ranked = search.ranked(per_token=per_token)
    if ranked and not options.lengths and not whole and len(ranked[0].tokens) >= _EVERY_LENGTH:
        beside = {len(ranked[0].tokens) - 1, len(ranked[0].tokens) + 1} - search.tried
        yield from search.close((), [n for n in sorted(beside) if n <= min(most, room)])
        ranked = search.ranked(per_token=per_token)
    if not ranked and options.form is not None:
        raise InputError(
            f"between the two ends no text of the form has at most {min(options.max_tokens, room)} tokens; "
            "allow more, as far as a canvas holds them, or ask for less."
        )
    if not ranked:
        raise InputError("no text of these lengths fits between the two ends; give other lengths.")
    return Filled(
        text=ranked[0].text,
        log_likelihood=ranked[0].log_likelihood,
        candidates=tuple(ranked),
        forwards=search.forwards,
        prompt_tokens=len(context),
        cached_tokens=search.cached_tokens,
        seed=bench.seed,
    )


def _far(bench: Workbench, borders: Borders, longest: int, whole: int) -> Ids:
    """What a canvas may not show of the text behind a gap, as a text of its own before all others."""
    rest = borders.behind[bench.canvas_len - longest :]
    rest = rest if len(borders.behind) > bench.canvas_len else ()
    room = int(_FAR * bench.max_positions) if not whole else 0
    return bench.opening(rest[:room], room=0) if rest and room else ()


def _ask(bench: Workbench, prefix: str, suffix: str, options: FillOptions) -> Rounds[Filled]:
    if bench.template is None:
        raise InputError('this model has no chat template, so it cannot be asked; use method "lengths".')
    asked = f"{_ASK}\n\n{prefix}{_MARK}{suffix}"
    prompt = tuple(bench.template.render([{"role": "user", "content": asked}]))
    constraint = None
    if options.form is not None:
        assert bench.compiler is not None
        constraint = bench.compiler.compile(options.form)
    (answer,) = yield [bench.answer(prompt, max_tokens=options.max_tokens, constraint=constraint)]
    search = _Search(bench, plain_borders(bench.tokenizer, prefix, suffix), (), options)
    search.context = bench.opening(search.borders.before, room=bench.canvas_len + _SCORED_BEHIND)
    search.count([answer])
    yield from search.judge([tuple(bench.tokenizer.encode(answer.text))])
    ranked = search.ranked(per_token=False)
    return Filled(
        text=answer.text,
        log_likelihood=ranked[0].log_likelihood if ranked else -math.inf,
        candidates=tuple(ranked),
        forwards=search.forwards,
        prompt_tokens=len(prompt),
        cached_tokens=search.cached_tokens,
        seed=bench.seed,
    )


def _onwards(search: _Search, written: Ids) -> EngineRequest:
    """A whole canvas of gap: what is behind it does not show yet."""
    bench = search.bench
    sets = search.borders.sets(bench.canvas_len + 2) or {}
    first = {} if written or 0 not in sets else {0: sets[0]}
    given = canvas_of(bench.canvas_len, (), bench.end_token, bench.canvas_len, first)
    return bench.write((*search.context, *written), max_tokens=bench.canvas_len, given=given or None)


def _grid(most: int, written: Ids) -> list[int]:
    first = 0 if written else 1
    return [n for n in range(first, most + 1) if n <= _EVERY_LENGTH or n % 2 == 0 or n == most]


def _surprise(answer: Answer, length: int) -> float:
    """How unlikely a step finds its own best guess of the gap."""
    assert answer.logprobs is not None
    return -sum(words[0][1] for words in answer.logprobs[:length])
