"""Positions that are given from outside: a fixed token is a point mass, a set narrows the distribution."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from dgemma.diffusion.noise import Place
from dgemma.diffusion.reading import Likeliest, Reading, read_dense, scaled_logits
from dgemma.diffusion.walk import Vocabulary

# Shapes: rows = canvases, canvas = positions, places = some positions of one canvas.

# Numbers of [places, vocabulary] held at once.
_MOST_LOGITS = 16 << 20


@dataclass(frozen=True)
class Limited:
    """Positions of one canvas, each with the words that may stand there."""

    positions: Tensor  # [places]
    words: tuple[Tensor, ...]  # of each place, ascending

    def allowed(self, places: slice, vocab_size: int) -> Tensor:
        """True where a word may stand [places, vocabulary]."""
        some = self.words[places]
        mask = torch.zeros(len(some), vocab_size, dtype=torch.bool, device=self.positions.device)
        for row, words in zip(mask, some, strict=True):
            row[words] = True
        return mask


@dataclass(frozen=True)
class CanvasPins:
    """What is given of one canvas."""

    tokens: Tensor  # [canvas]: what stands where a position is fixed, or is there at the first step
    begins: Tensor  # [canvas]: where `tokens` stand in place of noise
    free: Tensor  # [canvas]: False where they stay
    limited: Limited | None = None
    watched: Limited | None = None

    def open(self, noise: Tensor) -> Tensor:
        """The canvas before its first step, from noise [canvas]."""
        return torch.where(self.begins, self.tokens, noise)


def fix(reading: Reading, tokens: Tensor, free: Tensor, embeddings: Tensor) -> Reading:
    """`reading` with a point mass on `tokens` [rows, canvas] wherever a position is not free.

    embeddings [rows, canvas, hidden]: of the tokens, as an input is scaled: the soft embedding there.
    """

    def settled(values: Tensor, value: Tensor | float) -> Tensor:
        return torch.where(free, values, value)

    likeliest = reading.likeliest
    if likeliest is not None:
        point = torch.full_like(likeliest.logits, float("-inf"))
        point[..., 0] = 0.0
        likeliest = Likeliest(
            torch.where(free[..., None], likeliest.words, tokens[..., None]),
            torch.where(free[..., None], likeliest.logits, point),
        )
    soft = reading.soft
    if soft is not None:
        soft = torch.where(free[..., None], soft, embeddings.to(soft.dtype))
    return replace(
        reading,
        guess=settled(reading.guess, tokens),
        drawn=settled(reading.drawn, tokens),
        entropy=settled(reading.entropy, 0.0),
        log_mass=settled(reading.log_mass, 0.0),
        top_logit=settled(reading.top_logit, 0.0),
        soft=soft,
        likeliest=likeliest,
    )


def limit(
    reading: Reading,
    row: int,
    hidden: Tensor,
    vocabulary: Vocabulary,
    temperature: Tensor,
    place: Place | None,
    limited: Limited,
    bias: Tensor | None = None,
) -> Reading:
    """`reading` with row `row` read among the words that are allowed, where they are limited.

    hidden [canvas, hidden], temperature and bias [1, vocabulary] are the row's own. The logits of these
    positions are held, some at a time. Truncation to the likeliest words does not apply.
    """
    changed = {f.name: getattr(reading, f.name) for f in fields(Reading)}
    for name, value in changed.items():
        if isinstance(value, Tensor):
            changed[name] = value.clone()
        elif isinstance(value, Likeliest):
            changed[name] = Likeliest(value.words.clone(), value.logits.clone())
    size = max(1, _MOST_LOGITS // vocabulary.vocab_size)
    for begin in range(0, len(limited.words), size):
        places = slice(begin, begin + size)
        positions = limited.positions[places]
        products = vocabulary.products(hidden[None, positions], slice(0, vocabulary.vocab_size))
        scaled = scaled_logits(products, vocabulary.logit_cap, temperature)
        scaled = scaled if bias is None else scaled + bias[:, None]
        scaled = torch.where(limited.allowed(places, vocabulary.vocab_size), scaled, float("-inf"))
        own = None if place is None else place.row(row)
        _overwrite(changed, row, positions, scaled, read_dense(scaled, own, positions), vocabulary)
    return Reading(**changed)


def _overwrite(
    changed: dict[str, Any],
    row: int,
    positions: Tensor,
    scaled: Tensor,
    found: Reading,
    vocabulary: Vocabulary,
) -> None:
    for name in ("guess", "drawn", "entropy", "log_mass", "top_logit"):
        changed[name][row, positions] = getattr(found, name)[0]
    soft, likeliest = changed["soft"], changed["likeliest"]
    if soft is not None:
        mixed = vocabulary.mix(scaled.softmax(-1), slice(0, vocabulary.vocab_size))
        soft[row, positions] = (mixed[0].float() * vocabulary.embedding_scale).to(soft.dtype)
    if likeliest is not None:
        top = scaled[0].topk(likeliest.words.shape[-1])
        likeliest.words[row, positions] = top.indices
        likeliest.logits[row, positions] = top.values


def watched_log_probs(
    hidden: Tensor, vocabulary: Vocabulary, watched: Limited, allowed: Limited | None
) -> list[Tensor]:
    """Log-probabilities at temperature 1 of each place's words, among the allowed ones where limited.

    hidden [canvas, hidden] -> per place [words].
    """
    limits: dict[int, Tensor] = {}
    if allowed is not None:
        limits = dict(zip(allowed.positions.tolist(), allowed.words, strict=True))
    found: list[Tensor] = []
    size = max(1, _MOST_LOGITS // vocabulary.vocab_size)
    one = torch.ones(1, device=hidden.device)
    for begin in range(0, len(watched.words), size):
        places = slice(begin, begin + size)
        positions = watched.positions[places]
        products = vocabulary.products(hidden[None, positions], slice(0, vocabulary.vocab_size))
        logits = scaled_logits(products, vocabulary.logit_cap, one)[0]
        for position, words, own in zip(positions.tolist(), watched.words[places], logits, strict=True):
            among = limits.get(position)
            mass = (own if among is None else own[among]).logsumexp(-1)
            inside = torch.ones_like(words, dtype=torch.bool) if among is None else torch.isin(words, among)
            found.append(torch.where(inside, own[words] - mass, float("-inf")))
    return found
