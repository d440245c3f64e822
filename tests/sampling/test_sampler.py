"""The parts of a step: what each keeps, what it leaves, and that fixed positions never count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dgemma.model.linear import PlainLinear
from dgemma.model.transformer import Head
from dgemma.params import GenerationParams
from dgemma.sampling.rng import NoiseStream, noise_key, random_tokens
from dgemma.sampling.sampler import (
    Acceptance,
    ConfidenceThreshold,
    EntropyBound,
    EntropyScore,
    FixedCount,
    LinearSchedule,
    Sampler,
    StableAndConfident,
    SurpriseScore,
    make_sampler,
    open_canvas,
    step,
)
from dgemma.sampling.vocab_scan import VocabScan, scale, scan_dense, scan_vocab
from fake_cuda import DEVICE, FakeCuda
from oracle import CASES, make_oracle, make_ours, tokens

CPU = torch.device("cpu")
EVERY = torch.ones(1, 5, dtype=torch.bool)
UNSURE = torch.tensor([[0.30, 0.01, 0.02, 5.00, 0.06]])


def kept(accept: Acceptance, free: torch.Tensor = EVERY) -> list[int]:
    return accept(UNSURE, free)[0].nonzero().flatten().tolist()


def test_entropy_bound_leaves_the_largest_out_of_its_sum_and_keeps_one_at_least() -> None:
    assert kept(EntropyBound(bound=0.1)) == [0, 1, 2, 4]  # 0.01 + 0.02 + 0.06 = 0.09, and 0.30 on top
    assert kept(EntropyBound(bound=0.02)) == [1, 2]
    assert kept(EntropyBound(bound=1e-9)) == [1]
    assert kept(EntropyBound(bound=100.0)) == [0, 1, 2, 3, 4]


def test_the_other_rules_keep_what_they_say() -> None:
    assert kept(ConfidenceThreshold(at_most=0.06)) == [1, 2, 4]
    assert kept(ConfidenceThreshold(at_most=0.0)) == [1]
    assert kept(FixedCount(count=2)) == [1, 2]
    assert kept(FixedCount(count=99)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("rule", [EntropyBound(), ConfidenceThreshold(at_most=9.0), FixedCount(count=9)])
def test_fixed_positions_are_never_accepted(rule: Acceptance) -> None:
    free = torch.tensor([[True, False, True, True, False]])
    assert 1 not in kept(rule, free)
    assert 4 not in kept(rule, free)
    assert 2 in kept(rule, free)


def test_scores_are_small_where_the_model_is_sure() -> None:
    scan = scan_dense(torch.tensor([[[9.0, 0, 0, 0], [1.0, 1, 1, 1]]]), None)
    for score in (EntropyScore(), SurpriseScore()):
        uncertainty = score(scan)[0]
        assert uncertainty[0] < 0.01 < uncertainty[1]
    assert SurpriseScore()(scan)[0, 1].item() == pytest.approx(1.3863, abs=1e-4)


def test_the_schedule_begins_at_t_max_and_never_reaches_t_min() -> None:
    schedule = LinearSchedule()
    assert schedule(torch.tensor(48), 48).item() == pytest.approx(0.8)
    assert schedule(torch.tensor(1), 48).item() == pytest.approx(0.4 + 0.4 / 48)


def reading_of(argmax: list[list[int]], entropy: float) -> VocabScan:
    tokens_ = torch.tensor(argmax)
    flat = torch.full(tokens_.shape, entropy)
    return VocabScan(argmax=tokens_, sampled=tokens_, entropy=flat, log_mass=flat, top_logit=flat)


def test_a_canvas_settles_when_its_guess_stays_and_it_is_sure() -> None:
    sampler = Sampler(num_steps=9, stop=StableAndConfident(stability=2, confidence=0.1))
    state = open_canvas(torch.tensor([[7, 7]]))
    for argmax, entropy, settled in (
        ([[7, 7]], 0.01, False),  # equal to the noise, but nothing was guessed before
        ([[7, 7]], 0.01, False),
        ([[7, 8]], 0.01, False),
        ([[7, 8]], 0.01, False),
        ([[7, 8]], 0.50, False),  # stable, not sure
        ([[7, 8]], 0.01, True),
    ):
        state = step(state, reading_of(argmax, entropy), torch.zeros(1, 2, dtype=torch.long), sampler)
        assert bool(state.settled) is settled
    after = step(state, reading_of([[1, 1]], 0.0), torch.zeros(1, 2, dtype=torch.long), sampler)
    assert torch.equal(after.argmax, state.argmax)  # settled stays settled
    assert torch.equal(after.canvas, state.canvas)
    assert int(after.steps) == 6


def test_the_step_cap_settles_whatever_the_entropy() -> None:
    state = open_canvas(torch.tensor([[3, 3]]))
    sampler = Sampler(num_steps=2)
    for number in range(2):
        state = step(state, reading_of([[number, 5]], 9.0), torch.zeros(1, 2, dtype=torch.long), sampler)
    assert bool(state.settled)
    assert int(state.steps) == 2


def test_fixed_positions_keep_their_token_and_do_not_make_a_canvas_scan_settled() -> None:
    free = torch.tensor([[False, False, False, True]])
    noise = torch.tensor([[9, 9, 9, 9]])
    state = open_canvas(torch.tensor([[1, 2, 3, 4]]))
    scan = reading_of([[8, 8, 8, 8]], 0.0)
    uncertainty = VocabScan(
        argmax=scan.argmax,
        sampled=scan.sampled,
        entropy=torch.tensor([[0.0, 0.0, 0.0, 1.0]]),  # the mean of all four would be low
        log_mass=scan.log_mass,
        top_logit=scan.top_logit,
    )
    sampler = Sampler(stop=StableAndConfident(stability=0, confidence=0.5))
    state = step(state, uncertainty, noise, sampler, free)
    assert state.canvas[0, :3].tolist() == [1, 2, 3]
    assert state.argmax[0].tolist() == [1, 2, 3, 8]
    assert not bool(state.settled)


@torch.no_grad()
def test_the_scan_of_the_real_head_equals_the_dense_way() -> None:
    case = CASES[0]
    lm = make_ours(make_oracle(case))
    cache = lm.new_cache(2)
    lm.encode(tokens(case, 2, 9, seed=1), cache)
    hidden = lm.denoise(tokens(case, 2, 8, seed=2), cache)
    heat, key = torch.tensor([0.8, 0.5]), noise_key([1, 2], [0, 0], [4, 4], CPU)
    found = scan_vocab(hidden, lm.transformer.head, heat, key)
    scaled = scale(lm.logits(hidden), heat)
    dense = scan_dense(scaled, key)
    assert torch.equal(found.argmax, dense.argmax)
    assert torch.equal(found.sampled, dense.sampled)
    torch.testing.assert_close(found.entropy, dense.entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.soft, lm.soft_embedding(scaled), atol=1e-5, rtol=0)


@torch.no_grad()
def test_scan_and_step_run_under_fake_cuda() -> None:
    with FakeCuda():
        matrix = PlainLinear(262_144, 64, dtype=torch.bfloat16, device=DEVICE)
        hidden = torch.zeros(3, 256, 64, dtype=torch.bfloat16, device=DEVICE)
        key = noise_key([1, 2, 3], [0, 0, 0], [0, 0, 0], DEVICE)
        scan = scan_vocab(hidden, Head(matrix, 30.0, 8.0), torch.ones(3, device=DEVICE), key)
        noise = random_tokens(key, NoiseStream.RENOISE, 256, 262_144)
        state = step(open_canvas(noise), scan, noise, Sampler())
        assert state.canvas.shape == (3, 256)
        assert state.settled.device.type == "cuda"
        assert scan.soft is not None
        assert scan.soft.dtype == torch.bfloat16


def test_a_sum_that_equals_the_entropy_bound_is_within_it() -> None:
    uncertainty = torch.tensor([[0.25, 0.5, 0.75]])  # sums without the largest: 0, 0.25, 0.75, all exact
    free = torch.ones(1, 3, dtype=torch.bool)
    assert EntropyBound(bound=0.25)(uncertainty, free).tolist() == [[True, True, False]]
    assert EntropyBound(bound=0.75)(uncertainty, free).tolist() == [[True, True, True]]


@pytest.mark.parametrize(("temperature", "heat"), [(0.0, 1.0), (1.0, 1.0), (0.5, 0.5), (2.0, 2.0)])
def test_the_temperature_scales_the_schedule_and_0_leaves_it(temperature: float, heat: float) -> None:
    made = make_sampler(GenerationParams(temperature=temperature, t_min=0.25, t_max=0.75))
    assert made.schedule == LinearSchedule(t_min=0.25 * heat, t_max=0.75 * heat)


def test_each_acceptance_rule_gets_its_own_option_and_score() -> None:
    def made(**options: Any) -> Sampler:
        return make_sampler(GenerationParams(**options))

    entropy = made(acceptance="entropy_bound", entropy_bound=0.3)
    assert (entropy.accept, entropy.score) == (EntropyBound(bound=0.3), EntropyScore())
    confidence = made(acceptance="confidence", min_confidence=0.5)
    assert isinstance(confidence.accept, ConfidenceThreshold)
    assert confidence.accept.at_most == pytest.approx(0.6931, abs=1e-4)
    assert confidence.score == SurpriseScore()
    fixed = made(acceptance="fixed", accept_per_step=3)
    assert (fixed.accept, fixed.score) == (FixedCount(count=3), EntropyScore())
    stop = made(stability_threshold=4, confidence_threshold=0.125, max_denoising_steps=7)
    assert (stop.stop, stop.num_steps) == (StableAndConfident(stability=4, confidence=0.125), 7)
