"""One canvas read within a language: its likeliest string, one drawn string, what each position may hold.

The vocabulary is walked once, and the logits of words that the language knows are kept, those of a class next
to each other: the one place where a canvas's logits are held. Classes are summed up, `paths` weighs the
strings of the language, and its weights go back to the words: the soft embedding is the conditioned one.
"""

from __future__ import annotations

from dataclasses import dataclass

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

NEVER = float("-inf")

# Words below a truncation's floor: taken only where the language leaves nothing else.
_LAST_RESORT = 1000.0

# Words of a class that are summed up at a time: they stay in a core's own memory.
_SLICE = 4 * CHUNK


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
        kept -= (kept < floor[0, span, None]) * _LAST_RESORT
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
    likeliest = best(machine, tops - level, strings.first, strings.last)
    guess = _best_words(kept, language, torch.from_numpy(likeliest).to(kept.device))
    drawn = guess
    if place is not None and bool(temperature > 0):
        numbers = torch.arange(machine.num_classes, device=kept.device).expand(1, len(positions), -1)
        clocks = race_times(place, Use.CLASS_RACE, numbers, positions)[0].double().cpu().numpy()
        chosen = torch.from_numpy(draw(machine, masses, strings.first, follows, clocks)).to(kept.device)
        drawn = _drawn_words(kept, language, chosen, place, positions)
    with np.errstate(divide="ignore"):
        log_shares = torch.from_numpy(np.log(shares)).to(kept.device)
    entropy = _entropy(log_shares, sums)
    # Of each class, the log of its share over its mass: with it a word's logit is its log-probability.
    gain = torch.where(sums.top > NEVER, log_shares - (sums.log_mass - sums.top), NEVER).to(kept.dtype)
    for number, begin, end in language.classes():
        kept[:, begin:end] += gain[:, number, None]
    return _whole(hidden, vocabulary, language, span, kept, guess, drawn, entropy, num_likeliest)


@dataclass(frozen=True)
class _Sums:
    """What each class holds; all [span, classes], in 64 bits."""

    log_mass: Tensor
    top: Tensor  # logit of its likeliest word
    entropy: Tensor  # of a word drawn from it, nats


def _kept(hidden: Tensor, vocabulary: Vocabulary, terms: Terms, language: Language) -> Tensor:
    """The logits of live words [span, live]."""
    kept = hidden.new_empty(hidden.shape[1], language.num_live, dtype=torch.float32)
    for block in language.blocks:
        own = terms._replace(bias=None if terms.bias is None else terms.bias[:, block.words])
        logits = logits_of(vocabulary.products(hidden, block.words), own)[0]
        kept[:, block.columns] = logits[:, block.inside]
    return kept


def _pin(kept: Tensor, pins: CanvasPins, strings: Strings) -> None:
    """Leave only what the pins allow, in place."""
    begin, language = strings.span.start, strings.language

    def narrow(position: int, words: Tensor) -> None:
        if strings.span.start <= position < strings.span.stop:
            row, columns = kept[position - begin], language.columns_of(words)
            own = row[columns].clone()
            row.fill_(NEVER)
            row[columns] = own

    for position in (~pins.free).nonzero()[:, 0].tolist():
        narrow(position, pins.tokens[position : position + 1])
    if pins.limited is not None:
        for position, words in zip(pins.limited.positions.tolist(), pins.limited.words, strict=True):
            narrow(position, words)


def _sums(kept: Tensor, language: Language) -> _Sums:
    """Sum up each class, whose words from now on are kept relative to its likeliest one."""
    shape = (kept.shape[0], language.machine.num_classes)
    top = kept.new_full(shape, NEVER, dtype=torch.float64)
    log_mass, entropy = top.clone(), torch.zeros_like(top)
    for number, begin, end in language.classes():
        peak = kept[:, begin:end].amax(1)
        alive = peak > NEVER
        finite = torch.where(alive, peak, 0.0)
        mass, moment = torch.zeros_like(top[:, 0]), torch.zeros_like(top[:, 0])
        for at in range(begin, end, _SLICE):
            below = kept[:, at : min(at + _SLICE, end)].sub_(finite[:, None])
            shares = below.exp()
            mass += shares.sum(1)
            moment += shares.mul_(below.clamp(min=-1e4)).sum(1)  # a forbidden word's share is zero
        top[:, number] = peak
        log_mass[:, number] = torch.where(alive, finite + mass.log(), NEVER)
        entropy[:, number] = torch.where(alive, mass.log() - moment / mass, 0.0)
    return _Sums(log_mass, top, entropy)


def _entropy(log_shares: Tensor, sums: _Sums) -> Tensor:
    """Of each position's word: which class, and which of its words [span]."""
    shares = log_shares.exp()
    own = torch.where(shares > 0, sums.entropy - log_shares, 0.0)
    return (shares * own).sum(1).clamp(min=0.0).float()


def _best_words(kept: Tensor, language: Language, chosen: Tensor) -> Tensor:
    """The likeliest word of each position's class `chosen` [span]."""
    found = torch.empty_like(chosen)
    for number in chosen.unique().tolist():
        rows = (chosen == number).nonzero()[:, 0]
        begin, end = language.bounds[number], language.bounds[number + 1]
        found[rows] = language.words[begin + kept[rows, begin:end].argmax(1)]
    return found


def _drawn_words(kept: Tensor, language: Language, chosen: Tensor, place: Place, positions: Tensor) -> Tensor:
    """One word of each position's class: the first chunk of the class to finish, then its first word."""
    bounds = torch.tensor(language.bounds, device=kept.device)
    begin, size = bounds[chosen], bounds[chosen + 1] - bounds[chosen]
    chunk = torch.zeros_like(chosen)
    large = size > CHUNK
    if large.any():
        masses = kept.new_full((len(chosen), -(-int(size.max()) // CHUNK)), NEVER)
        for row in large.nonzero()[:, 0].tolist():
            own = kept[row, begin[row] : begin[row] + size[row]]
            chunks = torch.nn.functional.pad(own, (0, -len(own) % CHUNK), value=NEVER).view(-1, CHUNK)
            masses[row, : len(chunks)] = chunks.logsumexp(1)
        numbers = torch.arange(masses.shape[1], device=kept.device).expand(1, *masses.shape)
        winner = (race_times(place, Use.CHUNK_RACE, numbers, positions)[0] - masses).argmin(1)
        chunk = torch.where(large, winner, 0)
    # Words are named by where they stand in their class: that is the language's own order.
    width = min(CHUNK, int(size.max()))
    at = chunk[:, None] * CHUNK + torch.arange(width, device=kept.device)
    columns = begin[:, None] + at.clamp(max=(size - 1)[:, None])
    logits = torch.where(at < size[:, None], kept.gather(1, columns), NEVER)
    first = (race_times(place, Use.WORD_RACE, at[None], positions)[0] - logits).argmin(1, keepdim=True)
    return language.words[columns.gather(1, first)[:, 0]]


def _whole(
    hidden: Tensor,
    vocabulary: Vocabulary,
    language: Language,
    span: slice,
    log_probs: Tensor,
    guess: Tensor,
    drawn: Tensor,
    entropy: Tensor,
    num_likeliest: int,
) -> Reading:
    """The reading of a whole canvas, from the log-probabilities [span, live], which are used up."""

    def spread(values: Tensor) -> Tensor:
        whole = values.new_zeros(1, hidden.shape[1], *values.shape[1:])
        whole[0, span] = values
        return whole

    top = log_probs.amax(1)
    likeliest = None
    if num_likeliest:
        count = min(num_likeliest, language.num_live)
        found = log_probs.topk(count, dim=1)
        missing = (0, num_likeliest - count)
        words = torch.nn.functional.pad(language.words[found.indices], missing)
        values = torch.nn.functional.pad(found.values, missing, value=NEVER)
        likeliest = Likeliest(spread(words), spread(values))
    soft = _mixed(log_probs.exp_(), vocabulary, language, hidden.dtype)
    return Reading(
        guess=spread(guess),
        drawn=spread(drawn),
        entropy=spread(entropy),
        log_mass=spread(torch.zeros_like(top)),
        top_logit=spread(top),
        soft=spread((soft * vocabulary.embedding_scale).to(hidden.dtype)),
        likeliest=likeliest,
    )


def _mixed(probs: Tensor, vocabulary: Vocabulary, language: Language, dtype: torch.dtype) -> Tensor:
    """Their embeddings weighed by `probs` [span, live] -> [span, hidden], fp32."""
    total: Tensor | None = None
    for block in language.blocks:
        some = probs[:, block.columns]
        if total is not None and not some.any():
            continue
        shares = probs.new_zeros(1, probs.shape[0], block.words.stop - block.words.start)
        shares[0, :, block.inside] = some
        mixed = vocabulary.mix(shares.to(dtype), block.words)[0].float()
        total = mixed if total is None else total.add_(mixed)
    assert total is not None
    return total
