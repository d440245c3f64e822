"""Make a training batch from examples: noised canvases with their clean causal context.

Every random choice is a function of (seed, presentation number): the canvas, the noise level, the replaced
tokens and their replacements, and the number of self-conditioning passes. So a batch does not depend on the
micro-batches, and a run resumes from a presentation number alone.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dgemma.errors import InputError
from dgemma.sampling.rng import philox, to_below, to_unit
from dgemma.training.data.records import TrainingExample

# Shapes: examples = of the batch, rows = canvases of the batch (those of an example side by side),
# length = longest example (padded), or tokens of a packed row, canvas = tokens of a canvas, chosen = tokens
# the encoder is supervised on (padded).

# Noise level: the share of tokens that are replaced. It is never exactly 0 or 1.
LEAST_NOISE = 1e-4


@dataclass(frozen=True, kw_only=True)
class CanvasSettings:
    """How canvases are cut and noised.

    fill_token: fills a canvas after the end of a response.
    supervise_fill: whether it is learned there, where the end of the response is known.
    self_conditioning: the share of canvases that are conditioned on a guess, the model's own prediction.
    guesses: the largest number of passes that make the guess, each conditioned on the one before. The number
      is drawn per canvas.
    pad_to: lengths are rounded up to a multiple of it, so that compiled code has few shapes.
    pack_to: the encoder reads rows of this many tokens, each with as many examples as fit; 0: one example per
      row. An example attends to itself only.
    pad_packed_to: the number of packed rows is rounded up to a multiple of it; of `pad_to` tokens then are
      the contexts of canvases.
    pad_chosen_to: the same for the number of tokens that the encoder is supervised on.
    pad_guessed_to: the same for the number of canvases of one guessing pass.
    per_example: canvases of one example, which is encoded once for all of them.
    encode_answers: whether the encoder reads the responses and is supervised on them; if not, it reads only
      the context of the canvases.
    noise_power: noise levels are u ** noise_power for uniform u; below 1, high levels are more frequent.
    shifted: the share of examples whose canvases do not begin at multiples of the canvas length after the
      start of the response, but a random number of tokens later.
    runs: the share of canvases whose noise is a run of neighbours, as in a gap to fill. Its share of the
      canvas is u ** 2, so that short gaps are frequent.
    visits: each canvas also gets a seed, for at most so many steps of the sampler, and `states` numbers that
      choose states of this path; 0: neither.
    """

    canvas_len: int
    vocab_size: int
    fill_token: int
    seed: int = 0
    self_conditioning: float = 0.5
    guesses: int = 1
    pad_to: int = 1
    pack_to: int = 0
    pad_packed_to: int = 1
    pad_chosen_to: int = 1
    pad_guessed_to: int = 1
    per_example: int = 1
    encode_answers: bool = True
    noise_power: float = 1.0
    shifted: float = 0.0
    runs: float = 0.0
    visits: int = 0
    states: int = 1
    supervise_fill: bool = True

    def __post_init__(self) -> None:
        if self.canvas_len < 1:
            raise InputError.about("canvas_len", f"is {self.canvas_len}; a canvas needs at least one token.")
        if not 0 <= self.fill_token < self.vocab_size:
            raise InputError.about(
                "fill_token", f"is {self.fill_token}; this vocabulary ends at {self.vocab_size - 1}."
            )
        for name in ("self_conditioning", "shifted", "runs"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError.about(name, f"is {getattr(self, name)}; it must be from 0 to 1.")
        if not self.noise_power > 0:
            raise InputError.about("noise_power", f"is {self.noise_power}; it must be above 0.")
        for name in (
            "pad_to",
            "pad_packed_to",
            "pad_chosen_to",
            "pad_guessed_to",
            "per_example",
            "guesses",
            "states",
        ):
            if getattr(self, name) < 1:
                raise InputError.about(name, f"is {getattr(self, name)}; it must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where the examples of packed rows are."""

    positions: Tensor  # [packed rows, length] in its example
    segments: Tensor  # [packed rows, length] the number of its example in the row; -1: padding
    context_places: Tensor  # [rows, context] in the flattened tokens; any place behind the context's end


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """Canvases and their clean examples: the same number of canvases per example, in the order of examples.

    Weights are 1 for supervised tokens and 0 for all others, including padding.
    """

    tokens: Tensor  # [examples or packed rows, length] clean, followed by padding of any token
    starts: Tensor  # [rows] first position of the canvas: its context is the tokens before it
    clean: Tensor  # [rows, canvas]
    noisy: Tensor  # [rows, canvas]
    weights: Tensor  # [rows, canvas] fp32
    noise: Tensor  # [rows] fp32, the share of tokens replaced
    guessed: tuple[Tensor, ...]  # the rows of each guessing pass; a row may be repeated, as padding
    encoder_places: Tensor  # [chosen] predicting positions, in the flattened tokens
    encoder_targets: Tensor  # [chosen] the token that follows
    encoder_weights: Tensor  # [chosen] fp32
    packing: Packing | None = None
    # Of canvases that the sampler makes instead of noise:
    visits: int = 0  # steps of the sampler, at most
    picks: Tensor | None = None  # [rows, states] in [0, 1): which states of the path are learned
    seeds: Tensor | None = None  # [rows]

    def context_tokens(self, row: int) -> list[int]:
        """The tokens before a canvas."""
        start = int(self.starts[row])
        if self.packing is not None:
            return self.tokens.flatten()[self.packing.context_places[row, :start]].tolist()
        return self.tokens[row // (len(self.starts) // len(self.tokens)), :start].tolist()

    def with_guesses(self, count: int) -> TrainingBatch:
        """With passes of no rows, up to `count` of them: processes must run the same number."""
        none = (self.starts[:0],) * (count - len(self.guessed))
        return replace(self, guessed=(*self.guessed, *none))

    def to(self, device: torch.device) -> TrainingBatch:
        moved: TrainingBatch = _moved(self, device)
        return moved


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(part, device) for part in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{f.name: _moved(getattr(value, f.name), device) for f in fields(value)})


@dataclass(frozen=True)
class Canvas:
    """A canvas of a response: first position, tokens before the fill, and whether the fill is supervised."""

    start: int
    tokens: tuple[int, ...]
    supervise_fill: bool


def cut(example: TrainingExample, canvas_len: int, shift: int = 0) -> list[Canvas]:
    """Every canvas of every response, counted from the start of their response, or `shift` tokens later."""
    if example.canvas is not None:
        if len(example.canvas) > canvas_len:
            raise InputError.about(
                "canvas", f"has {len(example.canvas)} tokens; it must fit into one canvas, of {canvas_len}."
            )
        return [Canvas(example.responses[0].start, example.canvas, True)]
    canvases = []
    for span in example.responses:
        is_cut_off = example.clipped and span is example.responses[-1]
        for start in range(min(span.start + shift, span.stop - 1), span.stop, canvas_len):
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
    is_shifted = draws.unit(_DrawPurpose.SHIFTED, 1)[::each, 0] < settings.shifted
    shifts = draws.below(_DrawPurpose.SHIFT, 1, settings.canvas_len)[::each, 0].where(is_shifted, 0).tolist()
    canvases = []
    for example, number, shift in zip(examples, pick, shifts, strict=True):
        choices = cut(example, settings.canvas_len, shift)
        first = (number * len(choices)) >> 32
        # Consecutive canvases from a random first one: no canvas repeats before all are used.
        canvases += [choices[(first + k) % len(choices)] for k in range(each)]
    clean, weights = _fill(canvases, settings)
    level = draws.unit(_DrawPurpose.NOISE, 1)
    noise = LEAST_NOISE + (1 - 2 * LEAST_NOISE) * level**settings.noise_power
    replaced = draws.unit(_DrawPurpose.REPLACE, settings.canvas_len) < noise
    if settings.runs:
        is_run = draws.unit(_DrawPurpose.RUN, 1) < settings.runs
        run_noise, in_run = _runs(level**2, draws.unit(_DrawPurpose.RUN_START, 1), settings.canvas_len)
        noise, replaced = run_noise.where(is_run, noise), in_run.where(is_run, replaced)
    random = draws.below(_DrawPurpose.TOKEN, settings.canvas_len, settings.vocab_size)
    if settings.encode_answers:
        read = [example.tokens for example in examples]
    else:
        needed = [max(c.start for c in canvases[at : at + each]) for at in range(0, len(canvases), each)]
        read = [example.tokens[:stop] for example, stop in zip(examples, needed, strict=True)]
    starts = torch.tensor([canvas.start for canvas in canvases])
    if settings.pack_to:
        tokens, packing, firsts = _packed(read, starts, settings)
    else:
        tokens, packing = _padded(read, settings.pad_to), None
        firsts = [row * tokens.shape[1] for row in range(len(read))]
    if settings.encode_answers:
        places, targets, encoder_weights = _encoder_targets(examples, firsts, settings.pad_chosen_to)
    else:
        places, targets, encoder_weights = _encoder_targets((), (), 1)
    return TrainingBatch(
        tokens=tokens,
        starts=starts,
        clean=clean,
        noisy=torch.where(replaced, random, clean),
        weights=weights,
        noise=noise[:, 0],
        guessed=_guessed(draws, settings),
        encoder_places=places,
        encoder_targets=targets,
        encoder_weights=encoder_weights,
        packing=packing,
        visits=settings.visits,
        picks=draws.unit(_DrawPurpose.VISIT, settings.states) if settings.visits else None,
        seeds=draws.seeds if settings.visits else None,
    )


def _packed(
    rows: Sequence[tuple[int, ...]], starts: Tensor, settings: CanvasSettings
) -> tuple[Tensor, Packing, list[int]]:
    """The examples in few rows -> tokens, packing, and the place of each example's first token."""
    length = settings.pack_to
    packed = first_fit([len(row) for row in rows], length)
    shape = (_round_up(len(packed), settings.pad_packed_to), length)
    tokens, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    segments = torch.full(shape, -1)
    firsts = [0] * len(rows)
    for at, numbers in enumerate(packed):
        offset = 0
        for segment, number in enumerate(numbers):
            stop = offset + len(rows[number])
            tokens[at, offset:stop] = torch.tensor(rows[number])
            positions[at, offset:stop] = torch.arange(stop - offset)
            segments[at, offset:stop] = segment
            firsts[number] = at * length + offset
            offset = stop
    context = torch.arange(_round_up(int(starts.max()), settings.pad_to))
    first_of_canvas = torch.tensor(firsts).repeat_interleave(settings.per_example)
    places = first_of_canvas[:, None] + torch.minimum(context, starts[:, None] - 1)
    return tokens, Packing(positions=positions, segments=segments, context_places=places), firsts


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Numbers of items by bin: the largest item first, each into the first bin with room for it."""
    bins: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        at = next((at for at, left in enumerate(room) if left >= sizes[number]), len(bins))
        if at == len(bins):
            bins.append([])
            room.append(capacity)
        bins[at].append(number)
        room[at] -= sizes[number]
    return bins


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


def _runs(share: Tensor, start: Tensor, canvas_len: int) -> tuple[Tensor, Tensor]:
    """Of runs of this share of a canvas [rows, 1]: the share in whole tokens, and which tokens they hold."""
    length = (share * canvas_len).ceil().clamp(1, canvas_len)
    first = (start * (canvas_len - length + 1)).floor()
    place = torch.arange(canvas_len)
    return length / canvas_len, (first <= place) & (place < first + length)


def _fill(canvases: Sequence[Canvas], settings: CanvasSettings) -> tuple[Tensor, Tensor]:
    clean = torch.full((len(canvases), settings.canvas_len), settings.fill_token)
    weights = torch.zeros(clean.shape)
    for row, canvas in enumerate(canvases):
        count = len(canvas.tokens)
        clean[row, :count] = torch.tensor(canvas.tokens)
        fill_counts = settings.supervise_fill and canvas.supervise_fill
        weights[row, : settings.canvas_len if fill_counts else count] = 1
    return clean, weights


def _padded(rows: Sequence[tuple[int, ...]], multiple: int) -> Tensor:
    length = _round_up(max(map(len, rows)), multiple)
    return torch.tensor([[*row, *(0,) * (length - len(row))] for row in rows])


def _encoder_targets(
    examples: Sequence[TrainingExample], firsts: Sequence[int], multiple: int
) -> tuple[Tensor, Tensor, Tensor]:
    places: list[int] = []
    targets: list[int] = []
    for first, example in zip(firsts, examples, strict=True):
        for span in example.responses:
            places += range(first + span.start - 1, first + span.stop - 1)
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
    VISIT = 6
    SEED = 7
    SHIFTED = 8
    SHIFT = 9
    RUN = 10
    RUN_START = 11


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

    @property
    def seeds(self) -> Tensor:
        """A seed for each row [rows]."""
        return self._words(_DrawPurpose.SEED, 1)[:, 0]

    def below(self, use: _DrawPurpose, count: int, limit: int) -> Tensor:
        """Whole numbers in [0, limit) [rows, count]."""
        return to_below(self._words(use, count), limit)
