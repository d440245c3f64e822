"""Strings of a language over a canvas, against every string written out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from chi_square import chi_square
from dgemma.diffusion.paths import best, draw, machine_of, marginals, what_follows

NUM_CLASSES, LENGTH = 3, 4


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def random_case(seed: int, states: int) -> tuple[Ints, Floats, Bools]:
    """Arrows, masses and last states."""
    generator = np.random.default_rng(seed)
    maps = generator.integers(-1, states, (NUM_CLASSES, states))
    masses = generator.normal(0.0, 3.0, (LENGTH, NUM_CLASSES))
    return maps, masses, generator.random(states) < 0.6


def exponential_clocks(generator: np.random.Generator) -> Floats:
    return np.log(generator.exponential(size=(LENGTH, NUM_CLASSES)))


def strings(maps: Ints, masses: Floats, last: Bools) -> dict[tuple[int, ...], float]:
    """Every string of the language with its log-probability, up to a constant."""
    found = {}
    for string in itertools.product(range(NUM_CLASSES), repeat=LENGTH):
        state, total = 0, 0.0
        for at, letter in enumerate(string):
            state = int(maps[letter, state]) if state >= 0 else -1
            total += float(masses[at, letter])
        if state >= 0 and last[state]:
            found[string] = total
    return found


cases = given(st.integers(0, 1 << 30), st.integers(1, 5))
many = settings(max_examples=700, deadline=None, derandomize=True, database=None)


@cases
@many
def test_marginals_are_those_of_all_strings(seed: int, states: int) -> None:
    maps, masses, last = random_case(seed, states)
    known = strings(maps, masses, last)
    machine = machine_of(maps)
    follows = what_follows(machine, masses, last)
    if not known:
        assert follows[0, 0] == -math.inf
        return
    found = marginals(machine, masses, 0, follows)
    total = math.fsum(map(math.exp, known.values()))
    assert math.isclose(follows[0, 0], math.log(total), abs_tol=1e-9)
    for at, letter in itertools.product(range(LENGTH), range(NUM_CLASSES)):
        share = math.fsum(math.exp(v) for string, v in known.items() if string[at] == letter) / total
        assert abs(found[at, letter] - share) < 1e-9


@cases
@many
def test_the_best_string_is_the_likeliest_of_the_language(seed: int, states: int) -> None:
    maps, masses, last = random_case(seed, states)
    known = strings(maps, masses, last)
    if known:
        found = tuple(best(machine_of(maps), masses, 0, last).tolist())
        assert math.isclose(known[found], max(known.values()), abs_tol=1e-9)


@cases
@many
def test_a_draw_is_a_string_of_the_language(seed: int, states: int) -> None:
    maps, masses, last = random_case(seed, states)
    known = strings(maps, masses, last)
    machine = machine_of(maps)
    follows = what_follows(machine, masses, last)
    if known:
        clocks = exponential_clocks(np.random.default_rng(seed))
        assert tuple(draw(machine, masses, 0, follows, clocks).tolist()) in known


def test_draws_follow_the_conditioned_distribution() -> None:
    for seed in (1, 4, 6):
        maps, masses, last = random_case(seed, 4)
        known = strings(maps, masses, last)
        machine = machine_of(maps)
        follows = what_follows(machine, masses, last)
        generator = np.random.default_rng(seed)
        draws = 4000
        index = {string: number for number, string in enumerate(known)}
        counts = torch.zeros(len(known))
        for _ in range(draws):
            clocks = exponential_clocks(generator)
            counts[index[tuple(draw(machine, masses, 0, follows, clocks).tolist())]] += 1
        logs = torch.tensor(list(known.values())).double()
        assert abs(chi_square(counts, logs.softmax(-1) * draws)) < 4
        # The test can fail: against a slightly hotter distribution it does.
        assert chi_square(counts, (logs / 1.3).softmax(-1) * draws) > 4
