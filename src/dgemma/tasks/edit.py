"""Changes to a text in place, under an instruction.

Renoising a text where it stands can neither insert nor delete. So the windows to change are found first: one
denoise pass over the old text, and its causal likelihood, show where the model disagrees with it. Each window
is then filled as a gap of a few lengths, everything else pinned; words one slip away are tried as well. What
was found stands only if it makes the text likelier by more than the change costs. A typo in a long file costs
a canvas or two and a handful of steps, and what is right already keeps its every byte.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice, product

from dgemma.engine.request import EngineRequest, PinnedTokens
from dgemma.errors import InputError
from dgemma.events import Answer, LogProbs
from dgemma.tasks.context import Ids, TaskContext, canvas_of
from dgemma.tasks.rounds import Rounds
from dgemma.tasks.spelling import near_words
from dgemma.tasks.units import Unit, distance, units_of
from dgemma.text.tokenizer import Tokenizer

# Tokens after a window that are scored with it.
_SCORED_AFTER = 12
# Of a canvas of old text, so much is judged; the rest only shows what follows.
_JUDGED = 0.75
# Top-k tokens of each open position, and texts made of them that are scored, for each length of a window.
_READ, _SCORED = 20, 4
# Words one slip away that are scored.
_NEAR = 12

_BROKEN = "\ufffd"  # bytes that make no character
_WORD = re.compile(r"[A-Za-z]{3,}")


@dataclass(frozen=True, kw_only=True)
class EditOptions:
    windows: int = 3
    """Maximum number of places to examine per canvas of text."""
    suspicion: float = 8.0
    """Nats by which both passes together must disagree with a token before it is examined."""
    closeness: float | None = None
    """Nats that a changed character must gain: how far a new text may be from the old one. None: 6, so that
    slips are mended and words are not replaced; with an instruction 1."""
    gain: float = 4.0
    """Nats a change must gain beyond that."""
    spellings: bool = True
    """Also try spellings near a word, beside what the model reads in its place."""

    def __post_init__(self) -> None:
        if not isinstance(self.windows, int) or isinstance(self.windows, bool) or not 1 <= self.windows <= 64:
            raise InputError(f"windows is {self.windows!r}; it must be a whole number from 1 to 64.")
        for name in ("suspicion", "closeness", "gain"):
            value = getattr(self, name)
            if value is None and name == "closeness":
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
                raise InputError(f"{name} is {value!r}; it must be a number of 0 or more.")


@dataclass(frozen=True, kw_only=True)
class Change:
    """Characters `start` to `stop` of the old text, and what stands there now."""

    start: int
    stop: int
    old: str
    new: str
    gain: float  # nats


@dataclass(frozen=True, kw_only=True)
class Edited:
    text: str
    changes: tuple[Change, ...]  # in the order of the text
    num_windows: int  # places that were examined
    forwards: int  # denoise forwards of canvases
    prompt_tokens: int
    cached_tokens: int
    seed: int


@dataclass
class _Window:
    unit: Unit
    prompt: Ids
    after: Ids
    candidates: dict[str, Ids]


def edit(
    task: TaskContext,
    text: str,
    instruction: str,
    options: EditOptions,
    *,
    before: str = "",
    after: str = "",
) -> Rounds[Edited]:
    """`text` with more likely tokens where the model finds it unlikely, between two texts that stay."""
    tokens = tuple(task.tokenizer.encode(text))
    token_texts = _token_texts(task.tokenizer, tokens)
    if "".join(token_texts) != text:
        raise InputError("the tokenizer does not give this text back as it is; it cannot be edited in place.")
    lead = (*_lead(task, f"{before}{text}{after}", instruction), *task.tokenizer.encode(before))
    has_instruction = bool(instruction.strip())
    if has_instruction and task.template is None:
        raise InputError(
            "this model has no chat template, so no instruction can be given to it; leave it empty."
        )
    if options.closeness is None:
        options = replace(options, closeness=1.0 if has_instruction else 6.0)
    known = set(_WORD.findall(before + text + after))
    work = _Edit(
        task, options, lead, tokens, token_texts, tuple(task.tokenizer.encode(after)), known, has_instruction
    )
    suspects = yield from work.find()
    changes = yield from work.mend(suspects)
    return Edited(
        text=_apply(text, changes),
        changes=tuple(changes),
        num_windows=len(suspects),
        forwards=work.forwards,
        prompt_tokens=len(lead) + len(tokens),
        cached_tokens=work.cached_tokens,
        seed=task.seed,
    )


class _Edit:
    def __init__(
        self,
        task: TaskContext,
        options: EditOptions,
        lead: Ids,
        tokens: Ids,
        token_texts: Sequence[str],
        after: Ids,
        known: set[str],
        has_instruction: bool,
    ) -> None:
        self.task = task
        self.options = options
        self.lead = lead
        self.tokens = tokens
        self.shown = (*tokens, *after)
        self.known = known
        self.closeness = options.closeness or 0.0
        self.has_instruction = has_instruction
        self.units = units_of(token_texts)
        starts = [0]
        for token_text in token_texts:
            starts.append(starts[-1] + len(token_text))
        self.starts = starts  # of each token among the characters
        self.forwards = 0
        self.cached_tokens = 0

    def find(self) -> Rounds[list[Unit]]:
        """The units both passes disagree with most, a fixed number per canvas."""
        canvas_len = self.task.canvas_len
        stride = max(1, int(canvas_len * _JUDGED))
        begins = list(range(0, max(1, len(self.tokens) - canvas_len + stride), stride)) if self.tokens else []
        answers = yield [request for begin in begins for request in self._score_canvas(begin)]
        suspects: list[Unit] = []
        for number, begin in enumerate(begins):
            seen, read = answers[2 * number : 2 * number + 2]
            self.count([seen])
            end = len(self.tokens) if begin == begins[-1] else begin + stride
            surprise = {begin + at: -top[0][1] for at, top in seen.watched}
            for at, value in enumerate(read.scores, start=begin):
                surprise[at] = surprise.get(at, 0.0) - value
            own = [unit for unit in self.units if begin <= unit.start < end]
            felt = {unit: max(surprise.get(at, 0.0) for at in range(unit.start, unit.stop)) for unit in own}
            suspects += heapq.nlargest(
                self.options.windows,
                (unit for unit in own if felt[unit] > self.options.suspicion and self._may_change(unit)),
                key=lambda unit: felt[unit],
            )
        return sorted(suspects, key=lambda unit: unit.start)

    def _may_change(self, unit: Unit) -> bool:
        """Words made of vocabulary tokens: a model judges text in byte tokens badly."""
        ids = self.tokens[unit.start : unit.stop]
        is_spelled = not self.task.tokenizer.byte_ids.isdisjoint(ids)
        return unit.is_word and not is_spelled and len(ids) <= self.task.canvas_len // 4

    def mend(self, suspects: Sequence[Unit]) -> Rounds[list[Change]]:
        windows = [self._window(unit) for unit in suspects]
        gaps = [(window, n) for window in windows for n in self._lengths(window.unit)]
        answers = yield [self._gap(window, n) for window, n in gaps]
        self.count(answers)
        for window in windows if self.options.spellings else ():
            for text in near_words(window.unit.text, self.task.tokenizer, self.known, most=_NEAR):
                window.candidates[text] = tuple(self.task.tokenizer.encode(text))
        for (window, n), answer in zip(gaps, answers, strict=True):
            assert answer.logprobs is not None
            window.candidates |= self._texts(window.unit, answer.logprobs[:n])
        texts = [(window, text) for window in windows for text in (window.unit.text, *window.candidates)]
        scored = yield [self._score(window, text) for window, text in texts]
        totals = {(id(w), text): sum(a.scores) for (w, text), a in zip(texts, scored, strict=True)}
        changes = [change for window in windows if (change := self._judge(window, totals))]
        return changes

    def count(self, answers: Sequence[Answer]) -> None:
        self.forwards += sum(answer.forwards for answer in answers)
        self.cached_tokens = max([self.cached_tokens, *(answer.cached_tokens for answer in answers)])

    def _before(self, at: int) -> Ids:
        """The context before a token: the lead, and as much text as fits."""
        limit = self.task.max_positions - len(self.lead) - 2 * self.task.canvas_len - _SCORED_AFTER
        if limit < self.task.canvas_len:
            raise InputError("text and instruction leave no room in this model's context; shorten them.")
        return (*self.lead, *self.tokens[max(0, at - limit) : at])

    def _score_canvas(self, begin: int) -> list[EngineRequest]:
        """A denoise pass over a canvas of old text, and its causal likelihood."""
        task = self.task
        old = self.tokens[begin : begin + task.canvas_len]
        shown = canvas_of(0, self.shown[begin:], task.end_token, task.canvas_len).fixed
        pinned = PinnedTokens(
            begin=dict(enumerate(old)),
            fixed={at: token for at, token in shown.items() if at >= len(old)},
            watch={at: (token,) for at, token in enumerate(old)},
        )
        before = self._before(begin)
        denoised = task.write(before, max_tokens=task.canvas_len, pinned=pinned, max_denoising_steps=1)
        return [denoised, task.score((*before, *old), len(before))]

    def _window(self, unit: Unit) -> _Window:
        after = self.shown[unit.stop : unit.stop + self.task.canvas_len]
        return _Window(unit, self._before(unit.start), after, {})

    def _lengths(self, unit: Unit) -> list[int]:
        """Of the gap: a slip breaks a word that was one token; an instruction may lengthen or shorten it."""
        count = unit.stop - unit.start
        return sorted({max(1, count - 1), count, count + 1} if self.has_instruction else {1, count})

    def _gap(self, window: _Window, length: int) -> EngineRequest:
        task = self.task
        pinned = canvas_of(length, window.after, task.end_token, task.canvas_len)
        return task.write(
            window.prompt, max_tokens=task.canvas_len, pinned=pinned, max_denoising_steps=1, logprobs=_READ
        )

    def _texts(self, unit: Unit, read: Sequence[LogProbs]) -> dict[str, Ids]:
        """Texts made of the top-k tokens, by their likelihood and edit distance to the old text."""
        ranked: list[tuple[float, str, Ids]] = []
        for row_tokens in islice(product(*(row[: _most(len(read))] for row in read)), _READ * _READ):
            ids = tuple(token for token, _ in row_tokens)
            text = self.task.tokenizer.decode(ids)
            if not text.strip() or text == unit.text or _BROKEN in text:
                continue
            cost = self.closeness * distance(unit.text, text)
            ranked.append((sum(value for _, value in row_tokens) - cost, text, ids))
        return {text: ids for _, text, ids in heapq.nlargest(_SCORED, ranked)}

    def _score(self, window: _Window, text: str) -> EngineRequest:
        ids = window.candidates.get(text) or self.tokens[window.unit.start : window.unit.stop]
        after = window.after[:_SCORED_AFTER]
        return self.task.score((*window.prompt, *ids, *after), len(window.prompt))

    def _judge(self, window: _Window, totals: dict[tuple[int, str], float]) -> Change | None:
        old = window.unit.text
        stands = totals[id(window), old]
        best: tuple[float, str] | None = None
        for text in window.candidates:
            gain = totals[id(window), text] - stands - self.closeness * distance(old, text)
            if gain > self.options.gain and (best is None or (gain, text) > best):
                best = (gain, text)
        if best is None:
            return None
        start, stop = self.starts[window.unit.start], self.starts[window.unit.stop]
        return Change(start=start, stop=stop, old=old, new=best[1], gain=best[0])


def _most(length: int) -> int:
    """Top-k tokens per position that are combined: fewer where there are more positions."""
    return max(2, int((_READ * _READ) ** (1 / length))) if length else 1


def _token_texts(tokenizer: Tokenizer, tokens: Ids) -> list[str]:
    """The text of each token; of a run of bytes, all of it at its last one."""
    token_texts: list[str] = []
    for is_byte, run in groupby(tokens, key=tokenizer.byte_ids.__contains__):
        ids = list(run)
        token_texts += (
            ["" for _ in ids[1:]] + [tokenizer.decode(ids)]
            if is_byte
            else [tokenizer.decode([i]) for i in ids]
        )
    return token_texts


def _lead(task: TaskContext, text: str, instruction: str) -> Ids:
    """The context before the text: the instruction, where the model has a chat template."""
    if not instruction.strip() or task.template is None:
        return task.opening((), reserve=0)
    question = f"{instruction.strip()}\n\n{text}"
    return tuple(task.template.render([{"role": "user", "content": question}]))


def _apply(text: str, changes: Sequence[Change]) -> str:
    return "".join(_parts(text, changes))


def _parts(text: str, changes: Sequence[Change]) -> Iterator[str]:
    at = 0
    for change in changes:
        yield text[at : change.start]
        yield change.new
        at = change.stop
    yield text[at:]
