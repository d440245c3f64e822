"""Make a training batch from examples: noised canvases with their clean causal context.

Every random choice is a function of (seed, presentation number): the canvas, the noise level, the replaced
tokens and their replacements, and the number of self-conditioning passes. So a batch does not depend on the
micro-batches, and a run resumes from a presentation number alone.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dgemma.errors import InputError
from dgemma.sampling.rng import philox, to_below, to_unit
from dgemma.training.data.records import TrainingExample

# Shapes: examples = of the batch, rows = canvases of the batch (those of an example side by side),
# length = longest example (padded), canvas = tokens of a canvas, chosen = tokens the encoder is supervised
# on (padded).

# Noise level: the share of tokens that are replaced. It is never exactly 0 or 1.
LEAST_NOISE = 1e-4


@dataclass(frozen=True, kw_only=True)
class CanvasSettings:
    """How canvases are cut and noised.

    fill_token: fills a canvas after the end of a response.
    self_conditioning: the share of canvases that are conditioned on a guess, the model's own prediction.
    guesses: the largest number of passes that make the guess, each conditioned on the one before. The number
      is drawn per canvas.
    pad_to: lengths are rounded up to a multiple of it, so that compiled code has few shapes.
    pad_chosen_to: the same for the number of tokens that the encoder is supervised on.
    pad_guessed_to: the same for the number of canvases of one guessing pass.
    per_example: canvases of one example, which is encoded once for all of them.
    encode_answers: whether the encoder reads the responses and is supervised on them; if not, it reads only
      the context of the canvases.
    noise_power: noise levels are u ** noise_power for uniform u; below 1, high levels are more frequent.
    """

    canvas_len: int
    vocab_size: int
    fill_token: int
    seed: int = 0
    self_conditioning: float = 0.5
    guesses: int = 1
    pad_to: int = 1
    pad_chosen_to: int = 1
    pad_guessed_to: int = 1
    per_example: int = 1
    encode_answers: bool = True
    noise_power: float = 1.0

    def __post_init__(self) -> None:
        if self.canvas_len < 1:
            raise InputError.about("canvas_len", f"is {self.canvas_len}; a canvas needs at least one token.")
        if not 0 <= self.fill_token < self.vocab_size:
            raise InputError.about(
                "fill_token", f"is {self.fill_token}; this vocabulary ends at {self.vocab_size - 1}."
            )
        if not 0 <= self.self_conditioning <= 1:
            raise InputError.about(
                "self_conditioning", f"is {self.self_conditioning}; it must be from 0 to 1."
            )
        if not self.noise_power > 0:
            raise InputError.about("noise_power", f"is {self.noise_power}; it must be above 0.")
        for name in ("pad_to", "pad_chosen_to", "pad_guessed_to", "per_example", "guesses"):
            if getattr(self, name) < 1:
                raise InputError.about(name, f"is {getattr(self, name)}; it must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """Canvases and their clean examples: the same number of canvases per example, in the order of examples.

    Weights are 1 for supervised tokens and 0 for all others, including padding.
    """

    tokens: Tensor  # [examples, length] clean, each followed by padding of any token
    starts: Tensor  # [rows] first position of the canvas: its context is the tokens before it
    clean: Tensor  # [rows, canvas]
    noisy: Tensor  # [rows, canvas]
    weights: Tensor  # [rows, canvas] fp32
    noise: Tensor  # [rows] fp32, the share of tokens replaced
    guessed: tuple[Tensor, ...]  # the rows of each guessing pass; a row may be repeated, as padding
    encoder_places: Tensor  # [chosen] predicting positions, in the flattened [examples * length]
    encoder_targets: Tensor  # [chosen] the token that follows
    encoder_weights: Tensor  # [chosen] fp32

    def to(self, device: torch.device) -> TrainingBatch:
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            moved[field.name] = (
                tuple(part.to(device) for part in value) if isinstance(value, tuple) else value.to(device)
            )
        return TrainingBatch(**moved)


@dataclass(frozen=True)
class Canvas:
    """A canvas of a response: first position, tokens before the fill, and whether the fill is supervised."""

    start: int
    tokens: tuple[int, ...]
    supervise_fill: bool


def cut(example: TrainingExample, canvas_len: int) -> list[Canvas]:
    """Every canvas of every response. Canvases are counted from the start of their response."""
    canvases = []
    for span in example.responses:
        is_cut_off = example.clipped and span is example.responses[-1]
        for start in range(span.start, span.stop, canvas_len):
            tokens = example.tokens[start : min(start + canvas_len, span.stop)]
            # The continuation of a truncated response is not known, so its fill is not supervised.
            canvases.append(Canvas(start, tokens, not is_cut_off))
    return canvases


def make_batch(
    examples: Sequence[TrainingExample], presentations: Sequence[int], settings: CanvasSettings
) -> TrainingBatch:
    """The batch of these examples; `presentations[i]` is the number of the i-th in the whole run."""
    each = settings.per_example
    draws = _Draws(settings.seed, [number * each + k for number in presentations for k in range(each)])
    pick = draws.below(_DrawPurpose.CANVAS, 1, 1 << 32)[::each, 0].tolist()
    canvases = []
    for example, number in zip(examples, pick, strict=True):
        choices = cut(example, settings.canvas_len)
        first = (number * len(choices)) >> 32
        # Consecutive canvases from a random first one: no canvas repeats before all are used.
        canvases += [choices[(first + k) % len(choices)] for k in range(each)]
    clean, weights = _fill(canvases, settings)
    noise = LEAST_NOISE + (1 - 2 * LEAST_NOISE) * draws.unit(_DrawPurpose.NOISE, 1) ** settings.noise_power
    replaced = draws.unit(_DrawPurpose.REPLACE, settings.canvas_len) < noise
    random = draws.below(_DrawPurpose.TOKEN, settings.canvas_len, settings.vocab_size)
    if settings.encode_answers:
        tokens = _padded([example.tokens for example in examples], settings.pad_to)
        places, targets, encoder_weights = _encoder_targets(examples, tokens.shape[1], settings.pad_chosen_to)
    else:
        needed = [max(c.start for c in canvases[at : at + each]) for at in range(0, len(canvases), each)]
        contexts = [example.tokens[:stop] for example, stop in zip(examples, needed, strict=True)]
        tokens = _padded(contexts, settings.pad_to)
        places, targets, encoder_weights = _encoder_targets((), 0, 1)
    return TrainingBatch(
        tokens=tokens,
        starts=torch.tensor([canvas.start for canvas in canvases]),
        clean=clean,
        noisy=torch.where(replaced, random, clean),
        weights=weights,
        noise=noise[:, 0],
        guessed=_guessed(draws, settings),
        encoder_places=places,
        encoder_targets=targets,
        encoder_weights=encoder_weights,
    )


def _guessed(draws: _Draws, settings: CanvasSettings) -> tuple[Tensor, ...]:
    """The rows of each guessing pass: the first pass has all rows with a guess, later passes fewer."""
    conditioned = draws.unit(_DrawPurpose.CONDITION, 1)[:, 0] < settings.self_conditioning
    counts = torch.where(conditioned, 1 + draws.below(_DrawPurpose.GUESSES, 1, settings.guesses)[:, 0], 0)
    passes = [(counts > number).nonzero()[:, 0] for number in range(settings.guesses)]
    return tuple(_repeated(rows, settings.pad_guessed_to) for rows in passes if len(rows))


def _repeated(rows: Tensor, multiple: int) -> Tensor:
    """Pad `rows` to a multiple by repeating its first row, which changes no result."""
    missing = _round_up(len(rows), multiple) - len(rows)
    return torch.cat([rows, rows[:1].expand(missing)])


def _fill(canvases: Sequence[Canvas], settings: CanvasSettings) -> tuple[Tensor, Tensor]:
    clean = torch.full((len(canvases), settings.canvas_len), settings.fill_token)
    weights = torch.zeros(clean.shape)
    for row, canvas in enumerate(canvases):
        count = len(canvas.tokens)
        clean[row, :count] = torch.tensor(canvas.tokens)
        weights[row, : settings.canvas_len if canvas.supervise_fill else count] = 1
    return clean, weights


def _padded(rows: Sequence[tuple[int, ...]], multiple: int) -> Tensor:
    length = _round_up(max(map(len, rows)), multiple)
    return torch.tensor([[*row, *(0,) * (length - len(row))] for row in rows])


def _encoder_targets(
    examples: Sequence[TrainingExample], length: int, multiple: int
) -> tuple[Tensor, Tensor, Tensor]:
    places: list[int] = []
    targets: list[int] = []
    for row, example in enumerate(examples):
        for span in example.responses:
            places += range(row * length + span.start - 1, row * length + span.stop - 1)
            targets += example.tokens[span.start : span.stop]
    count = len(places)
    padding = _round_up(count, multiple) - count
    weights = torch.ones(count + padding)
    weights[count:] = 0
    ids = [torch.tensor(numbers + [0] * padding, dtype=torch.int64) for numbers in (places, targets)]
    return ids[0], ids[1], weights


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class _DrawPurpose(enum.IntEnum):
    """The use of a random number. It is part of the counter, so that no two uses share a number."""

    CANVAS = 0
    NOISE = 1
    REPLACE = 2
    TOKEN = 3
    CONDITION = 4
    GUESSES = 5


class _Draws:
    """Random numbers by (seed, presentation, use, index): Philox, a counter-based RNG."""

    def __init__(self, seed: int, presentations: Sequence[int]) -> None:
        self._key = (torch.tensor(seed & 0xFFFFFFFF), torch.tensor((seed >> 32) & 0xFFFFFFFF))
        self._rows = torch.tensor(list(presentations))[:, None]

    def _words(self, use: _DrawPurpose, count: int) -> Tensor:
        index = torch.arange(count).expand(len(self._rows), count)
        low = (self._rows & 0xFFFFFFFF).expand_as(index)
        high = (self._rows >> 32).expand_as(index)
        return philox((index, low, high, torch.full_like(index, use)), self._key)[0]

    def unit(self, use: _DrawPurpose, count: int) -> Tensor:
        """fp32 in (0, 1) [rows, count]."""
        return to_unit(self._words(use, count))

    def below(self, use: _DrawPurpose, count: int, limit: int) -> Tensor:
        """Whole numbers in [0, limit) [rows, count]."""
        return to_below(self._words(use, count), limit)
