"""The two ways to write: refine canvases, or token by token. Encode, open, denoise, step, commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dgemma.diffusion.noise import Place, Use, place_at, random_tokens
from dgemma.diffusion.reading import Likeliest, Reading
from dgemma.diffusion.step import CanvasState, Sampler, open_canvas, step
from dgemma.events import Commit, Draft
from dgemma.generation.parts import Model, read_vocabulary
from dgemma.generation.writer import AnswerWriter, LogProbs
from dgemma.model.cache import KVCache
from dgemma.params import GenerationParams

# Shapes: rows = answers still being written, canvas = positions of a canvas.

# The step of a causal draw in its random counter: no canvas takes so many.
_CAUSAL_STEP = (1 << 32) - 1


class Stopwatch:
    """Where the time goes, and whether it is up. The clock is an argument, for tests."""

    def __init__(
        self, deadline_s: float | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._began = self._lap_began = clock()
        self._deadline_s = deadline_s
        self.laps: dict[str, float] = {}

    @property
    def total_s(self) -> float:
        return self._clock() - self._began

    def lap(self, name: str) -> float:
        """Count the time since the last lap under `name`."""
        now = self._clock()
        seconds = now - self._lap_began
        self.laps[name] = self.laps.get(name, 0.0) + seconds
        self._lap_began = now
        return seconds

    def is_late(self, next_s: float = 0.0) -> bool:
        """Would another `next_s` seconds pass the deadline?"""
        return self._deadline_s is not None and self.total_s + next_s >= self._deadline_s


@dataclass
class Batch:
    """Answers being written together, and what their model remembers of them."""

    model: Model
    cache: KVCache
    writers: list[AnswerWriter]
    params: GenerationParams
    watch: Stopwatch
    owns_cache: bool = True  # False: a commit must not change it, somebody else keeps it

    def commit(self, tokens: Sequence[Sequence[int]]) -> Tensor | None:
        """Drop the answers that are finished, and let the others' `tokens` join their context.

        -> hidden states [rows, tokens, hidden]; None if all are finished.
        """
        going_on = [row for row, writer in enumerate(self.writers) if writer.reason is None]
        writers = [self.writers[row] for row in going_on]
        if going_on and (len(going_on) < len(self.writers) or not self.owns_cache):
            self.cache = self.cache.select(going_on)
            self.owns_cache = True
        self.writers = writers
        if not going_on:
            return None
        chosen = [list(tokens[row]) for row in going_on]
        for writer, committed in zip(writers, chosen, strict=True):
            writer.committed += committed
        return self.model.encode(torch.tensor(chosen), self.cache)

    def place(self, canvas: int, step_number: int) -> Place:
        rows = len(self.writers)
        seeds = [writer.seed for writer in self.writers]
        return place_at(seeds, [canvas] * rows, [step_number] * rows, self.model.device)


def diffuse(batch: Batch, sampler: Sampler, *, drafts: bool) -> Iterator[Draft | Commit]:
    """Canvas after canvas, each refined until it settles, until every answer is finished."""
    while batch.writers:
        place = batch.place(batch.writers[0].canvas, 0)
        canvas_len = batch.model.config.canvas_len
        state = open_canvas(random_tokens(place, Use.OPEN, canvas_len, batch.model.config.vocab_size))
        soft: Tensor | None = None
        likeliest: Likeliest | None = None
        late = False
        while not late:
            settled_before = state.settled
            state, reading = refine(batch.model, state, batch.cache, soft, place, sampler, batch.params)
            soft = reading.soft
            likeliest = _of_last_step(settled_before, likeliest, log_probs(reading))
            place = replace(place, step=place.step + 1)
            all_settled = bool(state.settled.all())  # the one number read back per step
            late = batch.watch.is_late(next_s=batch.watch.lap("denoise"))
            if drafts:
                yield from _drafts(batch.writers, settled_before, state, reading)
            if all_settled:
                break
        steps, settled = state.steps.tolist(), state.settled.tolist()
        guesses = state.guess.tolist()
        for row, writer in enumerate(batch.writers):
            yield writer.commit(
                guesses[row],
                steps=steps[row],
                settled=settled[row],
                is_late=late,
                logprobs=_listed(likeliest, row),
            )
        batch.commit(guesses)  # the argmax: the sampled canvas still holds noise
        batch.watch.lap("commit")


def refine(
    model: Model,
    state: CanvasState,
    cache: KVCache,
    soft: Tensor | None,
    place: Place,
    sampler: Sampler,
    params: GenerationParams,
) -> tuple[CanvasState, Reading]:
    """One step of all canvases: forward, look at the vocabulary, accept and renoise. Reads nothing back."""
    # int32, as the reference counts: the temperature's last bit depends on it.
    left = (sampler.num_steps - state.steps).to(torch.int32)
    temperature = sampler.schedule(left, sampler.num_steps)
    hidden = model.denoise(state.canvas, cache, soft)
    draws = place if params.temperature > 0 else None
    reading = read_vocabulary(model, hidden, temperature, draws, params)
    noise = random_tokens(place, Use.RENOISE, state.canvas.shape[1], model.config.vocab_size)
    return step(state, reading, noise, sampler), reading


def write_causally(batch: Batch, last: Tensor) -> Iterator[Commit]:
    """Token after token through the causal door; `last` [rows, 1, hidden] is behind the prompt's end."""
    number = 0
    following: Tensor | None = last
    while following is not None:
        rows = len(batch.writers)
        heat = torch.full((rows,), batch.params.temperature or 1.0, device=batch.model.device)
        place = batch.place(number, _CAUSAL_STEP) if batch.params.temperature > 0 else None
        reading = read_vocabulary(batch.model, following, heat, place, batch.params)
        drawn = reading.drawn[:, 0].tolist()
        late = batch.watch.is_late(next_s=batch.watch.lap("commit"))
        likeliest = log_probs(reading)
        for row, writer in enumerate(batch.writers):
            yield writer.commit([drawn[row]], steps=0, is_late=late, logprobs=_listed(likeliest, row))
        following = batch.commit([[token] for token in drawn])
        number += 1


def log_probs(reading: Reading) -> Likeliest | None:
    """The likeliest words with their log-probabilities, where they were asked for."""
    if reading.likeliest is None:
        return None
    return Likeliest(reading.likeliest.words, reading.likeliest.logits - reading.log_mass[..., None])


def _drafts(
    writers: Sequence[AnswerWriter], settled_before: Tensor, state: CanvasState, reading: Reading
) -> Iterator[Draft]:
    numbers = (settled_before, state.guess, reading.entropy, state.steps)
    for writer, *row in zip(writers, *(tensor.tolist() for tensor in numbers), strict=True):
        was_settled, guess, entropy, steps = row
        if not was_settled:
            yield writer.draft(guess, entropy, steps)


def _of_last_step(settled: Tensor, old: Likeliest | None, new: Likeliest | None) -> Likeliest | None:
    """A row that had settled keeps the words of its own last step."""
    if old is None or new is None:
        return new
    return Likeliest(*(torch.where(settled[:, None, None], a, b) for a, b in zip(old, new, strict=True)))


def _listed(likeliest: Likeliest | None, row: int) -> list[LogProbs] | None:
    if likeliest is None:
        return None
    pairs = zip(likeliest.words[row].tolist(), likeliest.logits[row].tolist(), strict=True)
    return [tuple(zip(words, values, strict=True)) for words, values in pairs]
