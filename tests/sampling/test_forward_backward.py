"""Strings of a language over a canvas, against every string written out; by the kernel and by numpy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import sizes
from chi_square import chi_square
from dgemma.kernels.forward_backward import kernel
from dgemma.sampling import forward_backward
from dgemma.sampling.forward_backward import backward, class_dfa, marginals, sample_path, viterbi

NUM_CLASSES, LENGTH = 3, 4


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@pytest.fixture(scope="module", params=["kernel", "numpy"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(forward_backward, "kernel", lambda: None)
        elif kernel() is None:
            pytest.skip("no kernel: there is no C++ compiler, or no AVX2")
        yield request.param


pytestmark = pytest.mark.usefixtures("way")


def random_case(seed: int, states: int) -> tuple[Ints, Floats, Bools]:
    """Arrows, masses and last states."""
    generator = np.random.default_rng(seed)
    transitions = generator.integers(-1, states, (NUM_CLASSES, states))
    emissions = generator.normal(0.0, 3.0, (LENGTH, NUM_CLASSES))
    return transitions, emissions, generator.random(states) < 0.6


def exponential_clocks(generator: np.random.Generator) -> Floats:
    return np.log(generator.exponential(size=(LENGTH, NUM_CLASSES)))


def constraint(transitions: Ints, emissions: Floats, last: Bools) -> dict[tuple[int, ...], float]:
    """Every string of the language with its log-probability, up to a constant."""
    found = {}
    for string in itertools.product(range(NUM_CLASSES), repeat=LENGTH):
        state, total = 0, 0.0
        for at, symbol in enumerate(string):
            state = int(transitions[symbol, state]) if state >= 0 else -1
            total += float(emissions[at, symbol])
        if state >= 0 and last[state]:
            found[string] = total
    return found


cases = given(st.integers(0, 1 << 30), st.integers(1, 5))
many = settings(max_examples=sizes.cases(700, 250), deadline=None, derandomize=True, database=None)


@cases
@many
def test_marginals_are_those_of_all_strings(seed: int, states: int) -> None:
    transitions, emissions, last = random_case(seed, states)
    known = constraint(transitions, emissions, last)
    dfa = class_dfa(transitions)
    betas = backward(dfa, emissions, last)
    if not known:
        assert betas[0, 0] == -math.inf
        return
    found = marginals(dfa, emissions, 0, betas)
    total = math.fsum(map(math.exp, known.values()))
    assert math.isclose(betas[0, 0], math.log(total), abs_tol=1e-9)
    for at, symbol in itertools.product(range(LENGTH), range(NUM_CLASSES)):
        share = math.fsum(math.exp(v) for string, v in known.items() if string[at] == symbol) / total
        assert abs(found[at, symbol] - share) < 1e-9


@cases
@many
def test_the_best_string_is_the_most_likely_of_the_language(seed: int, states: int) -> None:
    transitions, emissions, last = random_case(seed, states)
    known = constraint(transitions, emissions, last)
    if known:
        found = tuple(viterbi(class_dfa(transitions), emissions, 0, last).tolist())
        assert math.isclose(known[found], max(known.values()), abs_tol=1e-9)


@cases
@many
def test_a_draw_is_a_string_of_the_language(seed: int, states: int) -> None:
    transitions, emissions, last = random_case(seed, states)
    known = constraint(transitions, emissions, last)
    dfa = class_dfa(transitions)
    betas = backward(dfa, emissions, last)
    if known:
        races = exponential_clocks(np.random.default_rng(seed))
        assert tuple(sample_path(dfa, emissions, 0, betas, races).tolist()) in known


def test_draws_follow_the_conditioned_distribution() -> None:
    for seed in (1, 4, 6):
        transitions, emissions, last = random_case(seed, 4)
        known = constraint(transitions, emissions, last)
        dfa = class_dfa(transitions)
        betas = backward(dfa, emissions, last)
        generator = np.random.default_rng(seed)
        draws = 4000
        index = {string: number for number, string in enumerate(known)}
        counts = torch.zeros(len(known))
        for _ in range(draws):
            races = exponential_clocks(generator)
            counts[index[tuple(sample_path(dfa, emissions, 0, betas, races).tolist())]] += 1
        logs = torch.tensor(list(known.values())).double()
        assert abs(chi_square(counts, logs.softmax(-1) * draws)) < 4
        # The test can fail: against a slightly hotter distribution it does.
        assert chi_square(counts, (logs / 1.3).softmax(-1) * draws) > 4


def test_the_kernel_computes_what_numpy_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the size of a JSON schema, with masses that a float could not hold side by side."""
    generator = np.random.default_rng(0)
    states, classes, length = 300, 90, 120
    transitions = np.where(
        generator.random((classes, states)) < 0.03, generator.integers(0, states, (classes, states)), -1
    )
    transitions[0] = np.arange(1, states + 1) % states  # from each state a path leads on
    emissions = generator.normal(0.0, 200.0, (length, classes))
    emissions[generator.random((length, classes)) < 0.2] = -math.inf
    emissions[:, 0] = -900.0
    races = np.log(generator.exponential(size=(length, classes)))
    final = generator.random(states) < 0.5
    dfa, found = class_dfa(transitions), []
    for compute in (kernel, lambda: None):
        monkeypatch.setattr(forward_backward, "kernel", compute)
        betas = backward(dfa, emissions, final)
        shares = marginals(dfa, emissions, 0, betas)
        paths = sample_path(dfa, emissions, 0, betas, races), viterbi(dfa, emissions, 0, final)
        found.append((betas, shares, *paths))
    for ours, plain in zip(*found, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(found[0][1].sum(1), 1.0, rtol=1e-9)


def test_a_path_that_cannot_go_on_is_an_error() -> None:
    dfa = class_dfa(np.array([[1, -1]]))
    with pytest.raises(ValueError):
        sample_path(dfa, np.zeros((2, 1)), 0, np.zeros((3, 2)), np.zeros((2, 1)))
