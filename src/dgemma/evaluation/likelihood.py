"""Log-likelihood of a continuation under the causal pass: teacher forcing through `encode`, in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dgemma.errors import InputError

if TYPE_CHECKING:
    from dgemma.language_model import LanguageModel

# Shapes: rows = texts of a batch, tokens = tokens of a chunk, places = positions that predict a token.

_CHUNK_LEN = 512  # tokens encoded at once
_MAX_LOGITS = 16 << 20  # numbers of [places, vocabulary] held at once


@dataclass(frozen=True)
class Likelihood:
    """Natural logarithm of a continuation's probability, and whether each of its tokens is the argmax."""

    log_prob: float
    is_greedy: bool


@dataclass(frozen=True)
class TokenPair:
    """A context and the continuation to score."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.context:
            raise InputError(
                "the context is empty; give at least one token, such as the beginning of text.",
                field="context",
            )

    @property
    def inputs(self) -> tuple[int, ...]:
        return (*self.context, *self.continuation)[:-1]


def log_likelihoods(
    lm: LanguageModel, pairs: Sequence[TokenPair], *, batch: int = 1
) -> Iterator[tuple[int, Likelihood]]:
    """(index of the pair, its likelihood). Long pairs first, so that rows of a batch have similar lengths.

    This is the likelihood of the encoder, the causal pass. The likelihood under diffusion cannot be computed.
    """
    order = sorted(range(len(pairs)), key=lambda number: -len(pairs[number].inputs))
    for begin in range(0, len(order), batch):
        numbers = order[begin : begin + batch]
        yield from zip(numbers, _batch_likelihoods(lm, [pairs[n] for n in numbers]), strict=True)


@torch.inference_mode()
def _batch_likelihoods(lm: LanguageModel, pairs: Sequence[TokenPair]) -> list[Likelihood]:
    longest = max(len(pair.inputs) for pair in pairs)
    tokens = torch.zeros(len(pairs), longest, dtype=torch.int64)
    for row, pair in enumerate(pairs):
        tokens[row, : len(pair.inputs)] = torch.tensor(pair.inputs)
    cache = lm.new_cache(batch=len(pairs), capacity=longest)
    totals, greedy = [0.0] * len(pairs), [True] * len(pairs)
    for begin in range(0, longest, _CHUNK_LEN):
        chunk = tokens[:, begin : begin + _CHUNK_LEN]
        lengths = [min(max(len(pair.inputs) - begin, 0), chunk.shape[1]) for pair in pairs]
        hidden = lm.encode(chunk, cache, lengths=lengths)
        places = [
            place for row, pair in enumerate(pairs) for place in _places(row, pair, begin, lengths[row])
        ]
        for row, log_prob, hit in _log_probs(lm, hidden, places):
            totals[row] += log_prob
            greedy[row] &= hit
    return [Likelihood(*found) for found in zip(totals, greedy, strict=True)]


def _places(row: int, pair: TokenPair, begin: int, length: int) -> Iterator[tuple[int, int, int]]:
    """(row, position in the chunk, token that follows) for each position that predicts the continuation."""
    first = len(pair.context) - 1
    for position in range(max(first, begin), begin + length):
        # The last token is predicted but is not an input.
        yield row, position - begin, pair.continuation[position - first]


def _log_probs(
    lm: LanguageModel, hidden: Tensor, places: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[int, float, bool]]:
    """(row, log-probability, whether it is the argmax) of each place, a block of places at a time."""
    size = max(1, _MAX_LOGITS // lm.config.vocab_size)
    for begin in range(0, len(places), size):
        rows, positions, followers = zip(*places[begin : begin + size], strict=True)
        logits = lm.logits(hidden[list(rows), list(positions)])  # [places, vocabulary]
        target = torch.tensor(followers, device=logits.device)
        found = logits.gather(-1, target[:, None])[:, 0] - logits.logsumexp(-1)
        yield from zip(rows, found.tolist(), (logits.argmax(-1) == target).tolist(), strict=True)
