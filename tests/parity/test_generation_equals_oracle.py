"""Whole generations, token by token, on the oracle's own draws."""

from __future__ import annotations

import pytest
import torch

from dgemma.sampling.sampler import EntropyBound, LinearSchedule, Sampler, StableAndConfident
from oracle import CASES, Case, calm_oracle, make_oracle, make_ours, tokens
from replay import generate_with_oracle, replay_with_oracles_forward, replay_with_ours
from sizes import IS_FULL, cases

GENERATED = [CASES[0], CASES[2], CASES[3], CASES[5], CASES[8], CASES[9]]
SIXTEEN = Sampler(num_steps=16)
# The few have an early stop and an end in every geometry.
SEEDS = range(35) if IS_FULL else (8, 16, 24, 30, 32)


@pytest.mark.parametrize("case", GENERATED, ids=lambda case: case.name)
@torch.no_grad()
def test_generations_are_token_identical(case: Case) -> None:
    """Over several canvases, with ends and early stops among them."""
    oracle = calm_oracle(case)
    ours = make_ours(oracle)
    canvases, early, ended, several, changed = 3, 0, 0, 0, 0.0
    for seed in SEEDS:
        prompt = tokens(case, 1, 3 + seed % 20, seed=seed)
        recorded = generate_with_oracle(oracle, prompt, canvases, SIXTEEN, seed)
        answer, num_steps = replay_with_ours(ours, recorded, prompt, canvases, SIXTEEN)
        assert torch.equal(answer, recorded.sequence), seed
        assert num_steps == recorded.forwards
        used = len(answer) // case.canvas_len
        changed += (recorded.randints[0][0] != answer[: case.canvas_len]).float().mean().item() / len(SEEDS)
        early += num_steps < 16 * used
        several += used > 1
        ended += int(torch.isin(answer, torch.tensor([1, 5])).any())
    print(
        f"{case.name}: {early} stopped early, {several} of several canvases, {ended} ended, of {len(SEEDS)}; "
        f"{changed:.0%} of the first noise was changed"
    )
    assert changed > 0.3
    assert several > 0
    assert ended > 0
    assert early > 0


@pytest.mark.parametrize("case", GENERATED, ids=lambda case: case.name)
@torch.no_grad()
def test_our_loop_around_the_oracles_forward_is_bitwise_on_any_weights(case: Case) -> None:
    oracle = make_oracle(case)
    for seed in range(cases(full=8, part=2)):
        prompt = tokens(case, 1, 5 + seed, seed=seed)
        recorded = generate_with_oracle(oracle, prompt, 2, SIXTEEN, seed)
        answer, num_steps = replay_with_oracles_forward(oracle, recorded, prompt, 2, SIXTEEN)
        assert torch.equal(answer, recorded.sequence)
        assert num_steps == recorded.forwards


@pytest.mark.parametrize("stability", [0, 1, 2, 3])
@pytest.mark.parametrize("confidence", [0.0005, 0.005, 0.05, 0.5])
@torch.no_grad()
def test_the_stop_rule_is_the_oracles(stability: int, confidence: float) -> None:
    case = CASES[0]
    oracle = calm_oracle(case)
    ours = make_ours(oracle)
    sampler = Sampler(
        num_steps=16,
        stop=StableAndConfident(stability=stability, confidence=confidence),
        accept=EntropyBound(bound=0.3),
        schedule=LinearSchedule(t_min=0.2, t_max=0.7),
    )
    for seed in range(cases(full=6, part=1)):
        prompt = tokens(case, 1, 6, seed=seed)
        recorded = generate_with_oracle(oracle, prompt, 2, sampler, seed)
        answer, num_steps = replay_with_ours(ours, recorded, prompt, 2, sampler)
        assert torch.equal(answer, recorded.sequence)
        assert num_steps == recorded.forwards
        assert num_steps >= min(stability + 1, 16)
