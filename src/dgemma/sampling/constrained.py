"""Constrained sampling: one canvas scanned under a token DFA.

Gives the most likely string of the language, one sampled string, and the distribution of each position given
the language. The vocabulary is scanned once. The logits of live tokens (those that some transition takes) are
kept, tokens of one class adjacent: the one place where the logits of a canvas are held. Classes are summed
up, and `forward_backward` weighs the strings.

The soft embedding is not conditioned on the language. It is the model's own distribution at each position,
among live tokens: the model was trained on its own predictions, and conditioning on whole strings misleads it
(`docs/structured-output.md` has figures).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dgemma.sampling.forward_backward import (
    Bools,
    ClassDFA,
    Floats,
    backward,
    class_dfa,
    marginals,
    sample_path,
    viterbi,
)
from dgemma.sampling.pinned import CanvasPins
from dgemma.sampling.rng import NoiseKey, NoiseStream, race_times
from dgemma.sampling.top_k import TopK
from dgemma.sampling.vocab_scan import BLOCK, CHUNK, Terms, VocabHead, VocabScan, logits_of

# Shapes: live = tokens that some transition takes, classes and states of the DFA; in a scan, span = positions
# of the one canvas that the constraint covers. Logits are scaled, fp32. Live logits are [live, span]:
# reordering tokens by class and back is fast with rows.


@dataclass(frozen=True)
class LiveTokens:
    """The live tokens of one block of the vocabulary."""

    tokens: slice  # the block
    inside: Tensor  # [some]: index in the block
    columns: Tensor  # [some]: index among the live tokens

    @property
    def is_full(self) -> bool:
        """Whether all tokens of the block are live."""
        return bool(len(self.inside) == self.tokens.stop - self.tokens.start)


@dataclass(frozen=True, eq=False)
class VocabDFA:
    """A token DFA laid out for the device. Class 0 holds the tokens that no transition takes: they are not
    scanned.

    Tokens of a class are adjacent and ascending: first those of small classes, which are summed up together,
    then those of large classes, of more than a chunk.
    """

    dfa: ClassDFA
    tokens: Tensor  # [live]
    order: tuple[int, ...]  # classes that have tokens, in the order of `tokens`
    bounds: tuple[tuple[int, int], ...]  # [classes]: where a class begins and ends among the live tokens
    small: Tensor  # [live tokens of small classes]: index into `order` of each token's class
    blocks: tuple[LiveTokens, ...]  # those with a live token

    @property
    def num_live(self) -> int:
        return self.tokens.shape[0]

    def columns_of(self, tokens: Tensor) -> Tensor:
        """Indices of those of `tokens` that are live."""
        return torch.isin(self.tokens, tokens).nonzero()[:, 0]


@dataclass(frozen=True)
class CanvasConstraint:
    """Which strings of the language one canvas may hold."""

    vocab_dfa: VocabDFA
    start_state: int  # state before the first position
    final_states: Bools  # [states]: True where it may end after the last position
    span: slice  # positions the constraint covers; all others are fixed


def vocab_dfa(
    class_of_token: NDArray[np.integer], transitions: NDArray[np.integer], device: torch.device
) -> VocabDFA:
    """From the class of each token [vocabulary] and the next state of each class [classes, states]."""
    sizes = np.bincount(class_of_token, minlength=len(transitions))
    by_size = sorted(np.flatnonzero(sizes[1:]) + 1, key=lambda number: (sizes[number] > CHUNK, number))
    rank = np.full(len(transitions), len(transitions))
    rank[by_size] = np.arange(len(by_size))
    order = np.argsort(rank[class_of_token], kind="stable")[: int(sizes[1:].sum())]
    ends = np.cumsum(sizes[by_size])
    bounds = [(0, 0)] * len(transitions)
    for number, end in zip(by_size, ends.tolist(), strict=True):
        bounds[number] = (end - int(sizes[number]), end)
    num_small = int((sizes[by_size] <= CHUNK).sum())
    column = np.full(len(class_of_token), -1)
    column[order] = np.arange(len(order))
    blocks = []
    for begin in range(0, len(class_of_token), BLOCK):
        here = column[begin : begin + BLOCK]
        inside = np.flatnonzero(here >= 0)
        if len(inside):
            tokens = slice(begin, begin + len(here))
            blocks.append(
                LiveTokens(
                    tokens,
                    torch.from_numpy(inside).to(device),
                    torch.from_numpy(here[inside]).to(device),
                )
            )
    return VocabDFA(
        dfa=class_dfa(transitions),
        tokens=torch.from_numpy(order.astype(np.int64)).to(device),
        order=tuple(int(number) for number in by_size),
        bounds=tuple(bounds),
        small=torch.from_numpy(np.repeat(np.arange(num_small), sizes[by_size[:num_small]])).to(device),
        blocks=tuple(blocks),
    )


NEVER = float("-inf")

# Of sums over classes, by type of device, where it is not float64: Apple's GPU has none.
DTYPE_OF_SUMS = {"mps": torch.float32}

# Penalty of tokens below the top-k or top-p floor: sampled only where the language leaves nothing else.
_LAST_RESORT = 1000.0


def scan_constrained(
    hidden: Tensor,
    head: VocabHead,
    temperature: Tensor,
    key: NoiseKey | None,
    constraint: CanvasConstraint,
    *,
    pins: CanvasPins | None = None,
    bias: Tensor | None = None,
    floor: Tensor | None = None,
    num_top_k: int = 0,
) -> VocabScan:
    """Scan `hidden` [1, canvas, hidden], where `constraint` spans it; elsewhere the result is zero.

    bias [1, vocabulary], floor [1, canvas]: as in `scan_vocab`, but a token below the floor is not forbidden,
    only chosen where the language leaves nothing else. pins narrow the language; the caller checks that a
    string remains.
    """
    vocab_dfa, span = constraint.vocab_dfa, constraint.span
    terms = Terms(temperature, head.logit_cap, bias, None)
    live_logits = _live_logits(hidden[:, span], head, terms, vocab_dfa)
    if floor is not None:
        live_logits -= (live_logits < floor[0, span]) * _LAST_RESORT
    if pins is not None:
        _pin(live_logits, pins, constraint)
    sums = _class_sums(live_logits, vocab_dfa)
    positions = torch.arange(hidden.shape[1], device=hidden.device)[span]
    emissions, tops = _to_numpy(sums.log_mass), _to_numpy(sums.top)
    # Strings are compared with each other: a constant per position cancels, and would make sums large.
    level = emissions.max(1, keepdims=True)
    level[level == NEVER] = 0.0
    emissions = emissions - level
    dfa = vocab_dfa.dfa
    betas = backward(dfa, emissions, constraint.final_states)
    if not betas[0, constraint.start_state] > NEVER:
        raise RuntimeError("no string of the language fits the canvas")
    shares = marginals(dfa, emissions, constraint.start_state, betas)
    path = torch.from_numpy(viterbi(dfa, tops - level, constraint.start_state, constraint.final_states))
    argmax = _best_tokens(live_logits, vocab_dfa, sums, path.to(live_logits.device))
    sampled = argmax
    if key is not None and bool(temperature > 0):
        numbers = torch.arange(dfa.num_classes, device=live_logits.device).expand(1, len(positions), -1)
        races = _to_numpy(race_times(key, NoiseStream.CLASS_RACE, numbers, positions)[0])
        chosen = torch.from_numpy(sample_path(dfa, emissions, constraint.start_state, betas, races)).to(
            live_logits.device
        )
        sampled = _sample_tokens(live_logits, vocab_dfa, sums, chosen, key, positions)
    with np.errstate(divide="ignore"):
        log_shares = _from_numpy(np.log(shares), live_logits.device)
    entropy = _entropy(log_shares, sums)
    # The log-probability of each class's most likely token: conditioned on the language, and unconditioned.
    alive = sums.top > NEVER
    conditioned = torch.where(alive, log_shares - (sums.log_mass - sums.top), NEVER)
    unconditioned = torch.where(alive, sums.top - sums.log_mass.logsumexp(1, keepdim=True), NEVER)

    def spread(values: Tensor) -> Tensor:
        whole = values.new_zeros(1, hidden.shape[1], *values.shape[1:])
        whole[0, span] = values
        return whole

    top_k = None
    if num_top_k:
        tokens, values = _top_k(
            _add_class_terms(live_logits.clone(), conditioned, vocab_dfa), vocab_dfa, num_top_k
        )
        top_k = TopK(spread(tokens), spread(values))
    soft = _mix(_add_class_terms(live_logits, unconditioned, vocab_dfa).exp_(), head, vocab_dfa, hidden.dtype)
    return VocabScan(
        argmax=spread(argmax),
        sampled=spread(sampled),
        entropy=spread(entropy),
        log_mass=spread(torch.zeros_like(entropy)),
        top_logit=spread(conditioned.amax(1).to(entropy.dtype)),
        soft=spread((soft * head.embedding_scale).to(hidden.dtype)),
        top_k=top_k,
    )


def _dtype_of_sums(device: torch.device) -> torch.dtype:
    return DTYPE_OF_SUMS.get(device.type, torch.float64)


def _to_numpy(values: Tensor) -> Floats:
    """On the host, in 64 bits."""
    return values.cpu().numpy().astype(np.float64, copy=False)


def _from_numpy(values: Floats, device: torch.device) -> Tensor:
    """On the device, in the dtype of its sums."""
    is_float32 = _dtype_of_sums(device) is torch.float32
    return torch.from_numpy(values.astype(np.float32 if is_float32 else np.float64, copy=False)).to(device)


@dataclass(frozen=True)
class _VocabClassSums:
    """Sums over each class [span, classes], and over each chunk of its tokens [chunks, span]."""

    log_mass: Tensor
    top: Tensor  # logit of its most likely token
    entropy: Tensor  # of a token sampled from it, nats
    chunk_top: Tensor  # relative to the class's
    chunk_mass: Tensor  # relative to it, not a logarithm
    chunks: dict[int, slice]  # of each class that has tokens

    def of_chunks(self, values: Tensor, chosen: Tensor, missing: float) -> Tensor:
        """For each position, the values of its class's chunks [span, max chunks of a class]."""
        numbers = chosen.unique().tolist()
        most = max(self.chunks[number].stop - self.chunks[number].start for number in numbers)
        found = values.new_full((len(chosen), most), missing)
        for number in numbers:
            rows = (chosen == number).nonzero()[:, 0]
            own = values[self.chunks[number], rows].T
            found[rows, : own.shape[1]] = own
        return found


def _live_logits(hidden: Tensor, head: VocabHead, terms: Terms, vocab_dfa: VocabDFA) -> Tensor:
    """The logits of live tokens [live, span]."""
    live_logits = hidden.new_empty(vocab_dfa.num_live, hidden.shape[1], dtype=torch.float32)
    for block in vocab_dfa.blocks:
        own = terms._replace(bias=None if terms.bias is None else terms.bias[:, block.tokens])
        logits = logits_of(head.products(hidden, block.tokens), own)[0].T.contiguous()
        live_logits.index_copy_(
            0, block.columns, logits if block.is_full else logits.index_select(0, block.inside)
        )
    return live_logits


def _pin(live_logits: Tensor, pins: CanvasPins, constraint: CanvasConstraint) -> None:
    """Forbid what the pins do not allow, in place."""
    begin, vocab_dfa = constraint.span.start, constraint.vocab_dfa

    def narrow(position: int, tokens: Tensor) -> None:
        if constraint.span.start <= position < constraint.span.stop:
            column, live = live_logits[:, position - begin], vocab_dfa.columns_of(tokens)
            own = column[live]
            column.fill_(NEVER)
            column[live] = own

    for position in (~pins.free).nonzero()[:, 0].tolist():
        narrow(position, pins.tokens[position : position + 1])
    if pins.allowed is not None:
        for position, tokens in zip(pins.allowed.positions.tolist(), pins.allowed.tokens, strict=True):
            narrow(position, tokens)


def _class_sums(live_logits: Tensor, vocab_dfa: VocabDFA) -> _VocabClassSums:
    """Sum up each class. In place, its logits become relative to its most likely token."""
    parts = [_small_class_sums(live_logits[: len(vocab_dfa.small)], vocab_dfa.small)]
    num_small = parts[0].top.shape[0]
    parts += [
        _large_class_sums(live_logits[slice(*vocab_dfa.bounds[number])])
        for number in vocab_dfa.order[num_small:]
    ]
    peak, mass, moment = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("top", "mass", "moment")
    )
    alive = peak > NEVER

    def spread(values: Tensor, missing: float) -> Tensor:
        whole = mass.new_full((live_logits.shape[1], vocab_dfa.dfa.num_classes), missing)
        whole[:, list(vocab_dfa.order)] = values.to(mass.dtype).T
        return whole

    log_mass = torch.where(alive, peak.to(mass.dtype) + mass.log(), NEVER)
    entropy = torch.where(alive, mass.log() - moment / mass, 0.0)
    counts = [1] * num_small + [part.chunk_top.shape[0] for part in parts[1:]]
    ends = list(accumulate(counts))
    return _VocabClassSums(
        log_mass=spread(log_mass, NEVER),
        top=spread(peak, NEVER),
        entropy=spread(entropy, 0.0),
        chunk_top=torch.cat([part.chunk_top for part in parts]),
        chunk_mass=torch.cat([part.chunk_mass for part in parts]),
        chunks={
            number: slice(end - count, end)
            for number, end, count in zip(vocab_dfa.order, ends, counts, strict=True)
        },
    )


class _ClassSums(NamedTuple):
    """Some classes; [classes, span], and [chunks, span] of their chunks, relative to their tops."""

    top: Tensor
    mass: Tensor  # relative to the top, in the dtype of sums
    moment: Tensor  # sum of shares times logits, relative to it too
    chunk_top: Tensor
    chunk_mass: Tensor


def _small_class_sums(live_logits: Tensor, group: Tensor) -> _ClassSums:
    """Classes of one chunk each, all at once; `group` [tokens]: the class of each token."""
    count = int(group[-1]) + 1 if len(group) else 0
    top = live_logits.new_full((count, live_logits.shape[1]), NEVER)
    top.scatter_reduce_(0, group[:, None].expand_as(live_logits), live_logits, "amax")
    finite = torch.where(top > NEVER, top, 0.0)
    shares = live_logits.sub_(finite[group]).exp().to(_dtype_of_sums(live_logits.device))
    mass = torch.zeros_like(top, dtype=shares.dtype).index_add_(0, group, shares)
    shares *= live_logits.clamp(min=-1e4)  # a forbidden token's share is zero
    moment = torch.zeros_like(mass).index_add_(0, group, shares)
    return _ClassSums(top, mass, moment, top - finite, mass.float())


def _large_class_sums(live_logits: Tensor) -> _ClassSums:
    """One class of several chunks."""
    chunks = live_logits.split(CHUNK)
    tops = torch.stack([tokens.amax(0) for tokens in chunks])
    top = tops.amax(0)
    finite = torch.where(top > NEVER, top, 0.0)
    dtype = _dtype_of_sums(live_logits.device)
    masses, moment = [], torch.zeros_like(top, dtype=dtype)
    for tokens in chunks:
        shares = tokens.sub_(finite).exp()
        masses.append(shares.sum(0))
        moment += shares.mul_(tokens.clamp(min=-1e4)).sum(0)
    chunk_mass = torch.stack(masses)
    mass = chunk_mass.sum(0, dtype=dtype)
    return _ClassSums(top[None], mass[None], moment[None], tops - finite, chunk_mass)


def _entropy(log_shares: Tensor, sums: _VocabClassSums) -> Tensor:
    """Entropy of each position [span]: of the class, plus that of the token in its class."""
    shares = log_shares.exp()
    own = torch.where(shares > 0, sums.entropy - log_shares, 0.0)
    return (shares * own).sum(1).clamp(min=0.0).float()


def _best_tokens(live_logits: Tensor, vocab_dfa: VocabDFA, sums: _VocabClassSums, chosen: Tensor) -> Tensor:
    """The most likely token of each position's class `chosen` [span]."""
    chunk = sums.of_chunks(sums.chunk_top, chosen, NEVER).argmax(1)
    tokens = _class_tokens(live_logits, vocab_dfa, chosen, chunk)
    return vocab_dfa.tokens[tokens.rows.gather(1, tokens.logits.argmax(1, keepdim=True))[:, 0]]


def _sample_tokens(
    live_logits: Tensor,
    vocab_dfa: VocabDFA,
    sums: _VocabClassSums,
    chosen: Tensor,
    key: NoiseKey,
    positions: Tensor,
) -> Tensor:
    """One token of each position's class: the first chunk of the class to finish, then its first token."""
    emissions = sums.of_chunks(sums.chunk_mass, chosen, 0.0)
    numbers = torch.arange(emissions.shape[1], device=live_logits.device).expand(1, *emissions.shape)
    chunk = (race_times(key, NoiseStream.CHUNK_RACE, numbers, positions)[0] - emissions.log()).argmin(1)
    tokens = _class_tokens(live_logits, vocab_dfa, chosen, chunk)
    # The race is keyed by the index of a token in its class: the order of the language, not of the
    # vocabulary.
    finish = race_times(key, NoiseStream.TOKEN_RACE, tokens.numbers[None], positions)[0] - tokens.logits
    return vocab_dfa.tokens[tokens.rows.gather(1, finish.argmin(1, keepdim=True))[:, 0]]


class _ClassTokens(NamedTuple):
    """A chunk of tokens of each position's class; all [span, up to CHUNK]."""

    numbers: Tensor  # index in their class
    rows: Tensor  # among the live tokens
    logits: Tensor  # relative to the class's most likely; -inf past its end


def _class_tokens(live_logits: Tensor, vocab_dfa: VocabDFA, chosen: Tensor, chunk: Tensor) -> _ClassTokens:
    bounds = torch.tensor(vocab_dfa.bounds, device=live_logits.device)[chosen]
    begin, size = bounds[:, :1], bounds[:, 1:] - bounds[:, :1]
    width = min(CHUNK, int(size.max()))
    numbers = chunk[:, None] * CHUNK + torch.arange(width, device=live_logits.device)
    rows = begin + torch.minimum(numbers, size - 1)
    logits = live_logits[rows, torch.arange(len(chosen), device=live_logits.device)[:, None]]
    return _ClassTokens(numbers, rows, torch.where(numbers < size, logits, NEVER))


def _add_class_terms(live_logits: Tensor, by: Tensor, vocab_dfa: VocabDFA) -> Tensor:
    """Logits [live, span] relative to their class's most likely token, plus a class term [span, classes]."""
    gains = by.to(live_logits.dtype).T[list(vocab_dfa.order)]
    num_small = len(vocab_dfa.small)
    live_logits[:num_small] += gains[vocab_dfa.small]
    for number, own in zip(vocab_dfa.order, gains, strict=True):
        begin, end = vocab_dfa.bounds[number]
        if begin >= num_small:
            live_logits[begin:end] += own
    return live_logits


def _top_k(log_probs: Tensor, vocab_dfa: VocabDFA, count: int) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities, both [span, count]; -inf where the language has fewer."""
    found = log_probs.T.topk(min(count, vocab_dfa.num_live), dim=1)
    missing = (0, max(0, count - vocab_dfa.num_live))
    tokens = torch.nn.functional.pad(vocab_dfa.tokens[found.indices], missing)
    return tokens, torch.nn.functional.pad(found.values, missing, value=NEVER)


def _mix(probs: Tensor, head: VocabHead, vocab_dfa: VocabDFA, dtype: torch.dtype) -> Tensor:
    """Their embeddings weighed by `probs` [live, span] -> [span, hidden], fp32."""
    total: Tensor | None = None
    for block in vocab_dfa.blocks:
        shares = probs.index_select(0, block.columns)
        if total is not None and not shares.any():
            continue
        if not block.is_full:
            size = block.tokens.stop - block.tokens.start
            shares = probs.new_zeros(size, probs.shape[1]).index_copy_(0, block.inside, shares)
        mixed = head.mix(shares.T[None].to(dtype), block.tokens)[0].float()
        total = mixed if total is None else total.add_(mixed)
    assert total is not None
    return total
