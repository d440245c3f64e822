"""Self-correction: how many cells change after they were first accepted, and what forbidding it costs.

    python -m benchmarks.sudoku_revision                  (300 puzzles per band)

A cell is accepted when a step keeps its draw, and hands it to the next step, instead of renoising it. The
sampler may change it later. Here the same canvases are also refined with every accepted cell frozen, as
masked diffusion models do.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import record
from dgemma.engine.model_runner import scan_rows
from dgemma.evaluation.results import seed_of
from dgemma.language_model import LanguageModel
from dgemma.loading import load
from dgemma.params import GenerationParams
from dgemma.sampling.rng import NoiseStream, noise_key, random_tokens
from dgemma.sampling.sampler import Sampler, make_sampler, open_canvas, step
from dgemma.sudoku.puzzles import BANDS, Puzzle, held_out
from dgemma.sudoku.tokens import CELL_PLACES, VOCABULARY, to_text

# Shapes: rows = puzzles of a batch, canvas = tokens of an answer.


@dataclass(frozen=True)
class Refined:
    """What became of a batch."""

    guess: Tensor  # [rows, canvas] what is committed
    first: Tensor  # [rows, canvas] the token a position held when it was first accepted
    accepted: Tensor  # [rows, canvas] whether it ever was
    steps: Tensor  # [rows]


@dataclass(frozen=True)
class Given:
    """An acceptance that was decided before."""

    accepted: Tensor

    def __call__(self, unsure: Tensor, free: Tensor) -> Tensor:
        return self.accepted


@torch.inference_mode()
def refine(
    lm: LanguageModel, puzzles: Sequence[Puzzle], seeds: Sequence[int], sampler: Sampler, frozen: bool
) -> Refined:
    """One canvas per puzzle, refined until it settles. `frozen`: what was accepted stays."""
    params = GenerationParams()
    prompts = [[2, *lm.tokenizer.encode(to_text(puzzle.clues))] for puzzle in puzzles]
    cache = lm.new_cache(batch=len(prompts))
    lm.encode(torch.tensor(prompts), cache)
    place = noise_key(list(seeds), [0] * len(seeds), [0] * len(seeds), lm.device)
    words = lm.config.vocab_size
    state = open_canvas(random_tokens(place, NoiseStream.OPEN, lm.config.canvas_len, words))
    free = torch.ones_like(state.canvas, dtype=torch.bool)
    ever = torch.zeros_like(free)
    everywhere = free
    first = torch.zeros_like(state.canvas)
    soft = None
    while not bool(state.settled.all()):
        running = ~state.settled[:, None]
        left = (sampler.num_steps - state.steps).to(torch.int32)
        hidden = lm.denoise(state.canvas, cache, soft)
        reading = scan_rows(lm.transformer, hidden, sampler.schedule(left, sampler.num_steps), place, params)
        # Frozen cells are judged with the others, or their share of the bound would go to unsure ones.
        accepted = sampler.accept(sampler.score(reading), everywhere) & free & running
        noise = random_tokens(place, NoiseStream.RENOISE, lm.config.canvas_len, words)
        state = step(state, reading, noise, replace(sampler, accept=Given(accepted)), free)
        if frozen:
            free = free & ~accepted
            # A canvas whose every cell is frozen has nothing left to decide.
            state = replace(state, settled=state.settled | ~free.any(-1))
        # The step that settles a canvas commits its guess: what it accepts is never held.
        held = accepted & ~state.settled[:, None]
        first = torch.where(held & ~ever, reading.sampled, first)
        ever = ever | held
        soft = reading.soft
        place = replace(place, step=place.step + 1)
    return Refined(state.argmax, first, ever, state.steps)


def told(puzzles: Sequence[Puzzle], parts: Sequence[Refined]) -> dict[str, Any]:
    guess, first, accepted, steps = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("guess", "first", "accepted", "steps")
    )
    cells = torch.tensor(CELL_PLACES)
    right = torch.tensor([[VOCABULARY.index(cell) for cell in puzzle.solution.cells] for puzzle in puzzles])
    guess, first, accepted = guess[:, cells], first[:, cells], accepted[:, cells]
    changed = accepted & (guess != first)
    return {
        "exact": round((guess == right).all(1).double().mean().item(), 4),
        "steps_mean": round(steps.double().mean().item(), 2),
        "cells_changed_per_puzzle": round(changed.sum(1).double().mean().item(), 3),
        "puzzles_with_a_change": round(changed.any(1).double().mean().item(), 4),
        "wrong_when_first_accepted_per_puzzle": round(
            (accepted & (first != right)).sum(1).double().mean().item(), 3
        ),
        "changed_from_wrong_to_right": int((changed & (first != right) & (guess == right)).sum()),
        "changed_from_right_to_wrong": int((changed & (first == right) & (guess != right)).sum()),
        "changed_from_wrong_to_wrong": int((changed & (first != right) & (guess != right)).sum()),
    }


def batches(puzzles: Sequence[Puzzle], size: int) -> Iterator[tuple[Sequence[Puzzle], list[int]]]:
    for start in range(0, len(puzzles), size):
        part = puzzles[start : start + size]
        yield part, [seed_of(0, start + number) for number in range(len(part))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="bundled:sudoku")
    parser.add_argument("--limit", type=int, default=300, help="puzzles per band (default: 300)")
    parser.add_argument("--batch", type=int, default=50)
    args = parser.parse_args()
    lm = load(args.model)
    sampler = make_sampler(lm.generation_defaults)
    found: dict[str, Any] = {}
    for band in BANDS:
        puzzles = held_out(band)[: args.limit]
        for name, frozen in (("revised", False), ("frozen", True)):
            parts = [refine(lm, part, seeds, sampler, frozen) for part, seeds in batches(puzzles, args.batch)]
            found.setdefault(name, {})[band] = told(puzzles, parts)
            print(band, name, found[name][band], flush=True)
    record.write("sudoku_revision", {"model": args.model, "puzzles_per_band": args.limit, **found})


if __name__ == "__main__":
    main()
