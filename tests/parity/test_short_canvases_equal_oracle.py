"""A request's own canvas length gives what the oracle gives with that length in its config."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dgemma.sampling.sampler import Sampler
from oracle import CASES, Case, calm_oracle, make_ours, new_calm_oracle, tokens
from replay import generate_with_oracle, replay_with_ours
from sizes import IS_FULL

SIXTEEN = Sampler(num_steps=16)
SEEDS = range(20) if IS_FULL else (8, 24)


@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[9]], ids=lambda case: case.name)
@torch.no_grad()
def test_a_request_with_a_shorter_canvas_is_token_identical(case: Case) -> None:
    ours = make_ours(calm_oracle(case))
    lengths = range(1, case.canvas_len + 1) if IS_FULL else (1, 2, case.canvas_len - 1)
    several = 0
    for canvas_len in lengths:
        oracle = new_calm_oracle(replace(case, canvas_len=canvas_len))
        for seed in SEEDS:
            prompt = tokens(case, 1, 3 + seed % 20, seed=seed)
            recorded = generate_with_oracle(oracle, prompt, 3, SIXTEEN, seed)
            answer, num_steps = replay_with_ours(ours, recorded, prompt, 3, SIXTEEN, canvas_len)
            assert torch.equal(answer, recorded.sequence), (canvas_len, seed)
            assert num_steps == recorded.forwards
            several += len(answer) > canvas_len
    assert several > 0
