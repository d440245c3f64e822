"""One canvas read within a language: its likeliest string, one drawn string, what each position may hold.

The vocabulary is walked once, and the logits of words that the language knows are kept, those of a class next
to each other: the one place where a canvas's logits are held. Classes are summed up, and `paths` weighs the
strings of the language.

The soft embedding is not the conditioned one, but what the model believes of each position by itself, among
the words that the language knows: it has learnt to read its own beliefs, and what is left of them when
whole strings are ruled out misleads it (`docs/constraints.md` has figures).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dgemma.diffusion.block import Terms, logits_of
from dgemma.diffusion.language import Language, Strings
from dgemma.diffusion.noise import Place, Use, race_times
from dgemma.diffusion.paths import best, draw, marginals, what_follows
from dgemma.diffusion.pins import CanvasPins
from dgemma.diffusion.reading import CHUNK, Likeliest, Reading
from dgemma.diffusion.walk import Vocabulary

# Shapes: one canvas. span = its positions of the language, live = words, classes; logits are scaled, fp32.
# Kept logits are [live, span]: words are put in the order of classes and back, which is fast with rows.

NEVER = float("-inf")

# Words below a truncation's floor: taken only where the language leaves nothing else.
_LAST_RESORT = 1000.0


def read_within(
    hidden: Tensor,
    vocabulary: Vocabulary,
    temperature: Tensor,
    place: Place | None,
    strings: Strings,
    *,
    pins: CanvasPins | None = None,
    bias: Tensor | None = None,
    floor: Tensor | None = None,
    num_likeliest: int = 0,
) -> Reading:
    """Read `hidden` [1, canvas, hidden], as far as `strings` span it; elsewhere the reading says nothing.

    bias [1, vocabulary], floor [1, canvas]: as in a walk, but a word below the floor is not forbidden, only
    the last resort. pins narrow the language; that something is left of it is the caller's to know.
    """
    language, span = strings.language, strings.span
    terms = Terms(temperature, vocabulary.logit_cap, bias, None)
    kept = _kept(hidden[:, span], vocabulary, terms, language)
    if floor is not None:
        kept -= (kept < floor[0, span]) * _LAST_RESORT
    if pins is not None:
        _pin(kept, pins, strings)
    sums = _sums(kept, language)
    positions = torch.arange(hidden.shape[1], device=hidden.device)[span]
    masses, tops = sums.log_mass.cpu().numpy(), sums.top.cpu().numpy()
    # Strings are compared with each other: a position's own level says nothing, and would make sums large.
    level = masses.max(1, keepdims=True)
    level[level == NEVER] = 0.0
    masses = masses - level
    machine = language.machine
    follows = what_follows(machine, masses, strings.last)
    if not follows[0, strings.first] > NEVER:
        raise RuntimeError("no string of the language fits the canvas")
    shares = marginals(machine, masses, strings.first, follows)
    path = torch.from_numpy(best(machine, tops - level, strings.first, strings.last))
    guess = _best_words(kept, language, sums, path.to(kept.device))
    drawn = guess
    if place is not None and bool(temperature > 0):
        numbers = torch.arange(machine.num_classes, device=kept.device).expand(1, len(positions), -1)
        clocks = race_times(place, Use.CLASS_RACE, numbers, positions)[0].double().cpu().numpy()
        chosen = torch.from_numpy(draw(machine, masses, strings.first, follows, clocks)).to(kept.device)
        drawn = _drawn_words(kept, language, sums, chosen, place, positions)
    with np.errstate(divide="ignore"):
        log_shares = torch.from_numpy(np.log(shares)).to(kept.device)
    entropy = _entropy(log_shares, sums)
    # The log-probability of each class's likeliest word: conditioned, and by itself.
    alive = sums.top > NEVER
    within = torch.where(alive, log_shares - (sums.log_mass - sums.top), NEVER)
    alone = torch.where(alive, sums.top - sums.log_mass.logsumexp(1, keepdim=True), NEVER)

    def spread(values: Tensor) -> Tensor:
        whole = values.new_zeros(1, hidden.shape[1], *values.shape[1:])
        whole[0, span] = values
        return whole

    likeliest = None
    if num_likeliest:
        words, values = _likeliest(_raised(kept.clone(), within, language), language, num_likeliest)
        likeliest = Likeliest(spread(words), spread(values))
    soft = _mixed(_raised(kept, alone, language).exp_(), vocabulary, language, hidden.dtype)
    return Reading(
        guess=spread(guess),
        drawn=spread(drawn),
        entropy=spread(entropy),
        log_mass=spread(torch.zeros_like(entropy)),
        top_logit=spread(within.amax(1).to(entropy.dtype)),
        soft=spread((soft * vocabulary.embedding_scale).to(hidden.dtype)),
        likeliest=likeliest,
    )


@dataclass(frozen=True)
class _Sums:
    """What each class holds [span, classes], in 64 bits, and each chunk of its words [chunks, span]."""

    log_mass: Tensor
    top: Tensor  # logit of its likeliest word
    entropy: Tensor  # of a word drawn from it, nats
    chunk_top: Tensor  # relative to the class's
    chunk_mass: Tensor  # relative to it, not a logarithm
    chunks: dict[int, slice]  # of each class that has words

    def of_chunks(self, values: Tensor, chosen: Tensor, missing: float) -> Tensor:
        """Of each position, the values of its class's chunks [span, most chunks of a class]."""
        numbers = chosen.unique().tolist()
        most = max(self.chunks[number].stop - self.chunks[number].start for number in numbers)
        found = values.new_full((len(chosen), most), missing)
        for number in numbers:
            rows = (chosen == number).nonzero()[:, 0]
            own = values[self.chunks[number], rows].T
            found[rows, : own.shape[1]] = own
        return found


def _kept(hidden: Tensor, vocabulary: Vocabulary, terms: Terms, language: Language) -> Tensor:
    """The logits of live words [live, span]."""
    kept = hidden.new_empty(language.num_live, hidden.shape[1], dtype=torch.float32)
    for block in language.blocks:
        own = terms._replace(bias=None if terms.bias is None else terms.bias[:, block.words])
        logits = logits_of(vocabulary.products(hidden, block.words), own)[0].T.contiguous()
        kept.index_copy_(0, block.columns, logits if block.is_full else logits.index_select(0, block.inside))
    return kept


def _pin(kept: Tensor, pins: CanvasPins, strings: Strings) -> None:
    """Leave only what the pins allow, in place."""
    begin, language = strings.span.start, strings.language

    def narrow(position: int, words: Tensor) -> None:
        if strings.span.start <= position < strings.span.stop:
            column, live = kept[:, position - begin], language.columns_of(words)
            own = column[live]
            column.fill_(NEVER)
            column[live] = own

    for position in (~pins.free).nonzero()[:, 0].tolist():
        narrow(position, pins.tokens[position : position + 1])
    if pins.limited is not None:
        for position, words in zip(pins.limited.positions.tolist(), pins.limited.words, strict=True):
            narrow(position, words)


def _sums(kept: Tensor, language: Language) -> _Sums:
    """Sum up each class, whose words from now on are kept relative to its likeliest one."""
    parts = [_small_sums(kept[: len(language.small)], language.small)]
    num_small = parts[0].top.shape[0]
    parts += [_large_sums(kept[slice(*language.bounds[number])]) for number in language.order[num_small:]]
    peak, mass, moment = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("top", "mass", "moment")
    )
    alive = peak > NEVER

    def spread(values: Tensor, missing: float) -> Tensor:
        whole = values.new_full((kept.shape[1], language.machine.num_classes), missing, dtype=torch.float64)
        whole[:, list(language.order)] = values.double().T
        return whole

    log_mass = torch.where(alive, peak.double() + mass.log(), NEVER)
    entropy = torch.where(alive, mass.log() - moment / mass, 0.0)
    counts = [1] * num_small + [part.chunk_top.shape[0] for part in parts[1:]]
    ends = list(accumulate(counts))
    return _Sums(
        log_mass=spread(log_mass, NEVER),
        top=spread(peak, NEVER),
        entropy=spread(entropy, 0.0),
        chunk_top=torch.cat([part.chunk_top for part in parts]),
        chunk_mass=torch.cat([part.chunk_mass for part in parts]),
        chunks={
            number: slice(end - count, end)
            for number, end, count in zip(language.order, ends, counts, strict=True)
        },
    )


class _Part(NamedTuple):
    """Some classes; [classes, span], and [chunks, span] of their chunks, relative to their tops."""

    top: Tensor
    mass: Tensor  # relative to the top, 64 bits
    moment: Tensor  # sum of shares times logits, relative to it too
    chunk_top: Tensor
    chunk_mass: Tensor


def _small_sums(kept: Tensor, group: Tensor) -> _Part:
    """Classes of one chunk each, all at once; `group` [words] says which."""
    count = int(group[-1]) + 1 if len(group) else 0
    top = kept.new_full((count, kept.shape[1]), NEVER)
    top.scatter_reduce_(0, group[:, None].expand_as(kept), kept, "amax")
    finite = torch.where(top > NEVER, top, 0.0)
    shares = kept.sub_(finite[group]).exp().double()
    mass = torch.zeros_like(top, dtype=torch.float64).index_add_(0, group, shares)
    shares *= kept.clamp(min=-1e4)  # a forbidden word's share is zero
    moment = torch.zeros_like(mass).index_add_(0, group, shares)
    return _Part(top, mass, moment, top - finite, mass.float())


def _large_sums(kept: Tensor) -> _Part:
    """One class of several chunks."""
    chunks = kept.split(CHUNK)
    tops = torch.stack([words.amax(0) for words in chunks])
    top = tops.amax(0)
    finite = torch.where(top > NEVER, top, 0.0)
    masses, moment = [], torch.zeros_like(top, dtype=torch.float64)
    for words in chunks:
        shares = words.sub_(finite).exp()
        masses.append(shares.sum(0))
        moment += shares.mul_(words.clamp(min=-1e4)).sum(0)
    chunk_mass = torch.stack(masses)
    mass = chunk_mass.sum(0, dtype=torch.float64)
    return _Part(top[None], mass[None], moment[None], tops - finite, chunk_mass)


def _entropy(log_shares: Tensor, sums: _Sums) -> Tensor:
    """Of each position's word: which class, and which of its words [span]."""
    shares = log_shares.exp()
    own = torch.where(shares > 0, sums.entropy - log_shares, 0.0)
    return (shares * own).sum(1).clamp(min=0.0).float()


def _best_words(kept: Tensor, language: Language, sums: _Sums, chosen: Tensor) -> Tensor:
    """The likeliest word of each position's class `chosen` [span]."""
    chunk = sums.of_chunks(sums.chunk_top, chosen, NEVER).argmax(1)
    words = _words_of(kept, language, chosen, chunk)
    return language.words[words.rows.gather(1, words.logits.argmax(1, keepdim=True))[:, 0]]


def _drawn_words(
    kept: Tensor, language: Language, sums: _Sums, chosen: Tensor, place: Place, positions: Tensor
) -> Tensor:
    """One word of each position's class: the first chunk of the class to finish, then its first word."""
    masses = sums.of_chunks(sums.chunk_mass, chosen, 0.0)
    numbers = torch.arange(masses.shape[1], device=kept.device).expand(1, *masses.shape)
    chunk = (race_times(place, Use.CHUNK_RACE, numbers, positions)[0] - masses.log()).argmin(1)
    words = _words_of(kept, language, chosen, chunk)
    # Words are named by where they stand in their class: that is the language's own order.
    finish = race_times(place, Use.WORD_RACE, words.numbers[None], positions)[0] - words.logits
    return language.words[words.rows.gather(1, finish.argmin(1, keepdim=True))[:, 0]]


class _Words(NamedTuple):
    """A chunk of words of each position's class; all [span, up to CHUNK]."""

    numbers: Tensor  # in their class
    rows: Tensor  # among the live words
    logits: Tensor  # relative to the class's likeliest; -inf past its end


def _words_of(kept: Tensor, language: Language, chosen: Tensor, chunk: Tensor) -> _Words:
    bounds = torch.tensor(language.bounds, device=kept.device)[chosen]
    begin, size = bounds[:, :1], bounds[:, 1:] - bounds[:, :1]
    width = min(CHUNK, int(size.max()))
    numbers = chunk[:, None] * CHUNK + torch.arange(width, device=kept.device)
    rows = begin + torch.minimum(numbers, size - 1)
    logits = kept[rows, torch.arange(len(chosen), device=kept.device)[:, None]]
    return _Words(numbers, rows, torch.where(numbers < size, logits, NEVER))


def _raised(kept: Tensor, by: Tensor, language: Language) -> Tensor:
    """Words [live, span], relative to the likeliest of their class, raised by what it has [span, classes]."""
    gains = by.to(kept.dtype).T[list(language.order)]
    num_small = len(language.small)
    kept[:num_small] += gains[language.small]
    for number, own in zip(language.order, gains, strict=True):
        begin, end = language.bounds[number]
        if begin >= num_small:
            kept[begin:end] += own
    return kept


def _likeliest(log_probs: Tensor, language: Language, count: int) -> tuple[Tensor, Tensor]:
    """Words and their log-probabilities, both [span, count]; where the language knows fewer, -inf."""
    found = log_probs.T.topk(min(count, language.num_live), dim=1)
    missing = (0, max(0, count - language.num_live))
    words = torch.nn.functional.pad(language.words[found.indices], missing)
    return words, torch.nn.functional.pad(found.values, missing, value=NEVER)


def _mixed(probs: Tensor, vocabulary: Vocabulary, language: Language, dtype: torch.dtype) -> Tensor:
    """Their embeddings weighed by `probs` [live, span] -> [span, hidden], fp32."""
    total: Tensor | None = None
    for block in language.blocks:
        shares = probs.index_select(0, block.columns)
        if total is not None and not shares.any():
            continue
        if not block.is_full:
            size = block.words.stop - block.words.start
            shares = probs.new_zeros(size, probs.shape[1]).index_copy_(0, block.inside, shares)
        mixed = vocabulary.mix(shares.T[None].to(dtype), block.words)[0].float()
        total = mixed if total is None else total.add_(mixed)
    assert total is not None
    return total
