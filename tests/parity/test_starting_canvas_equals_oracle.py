"""A starting canvas is the oracle's `decoder_input_ids`: whole generations, token by token."""

from __future__ import annotations

import pytest
import torch

from dgemma.sampling.sampler import Sampler
from oracle import CASES, Case, calm_oracle, make_ours, tokens
from replay import generate_with_oracle, replay_with_ours
from sizes import cases

SIXTEEN = Sampler(num_steps=16)


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3]], ids=lambda case: case.name)
@torch.no_grad()
def test_generations_from_a_given_canvas_are_token_identical(case: Case) -> None:
    """The oracle draws the noise that it does not use, and starts its later canvases from noise: so do we."""
    oracle = calm_oracle(case)
    ours = make_ours(oracle)
    others = 0
    for seed in range(cases(full=20, part=4)):
        prompt = tokens(case, 1, 4 + seed, seed=seed)
        canvas = tokens(case, 1, case.canvas_len, seed=100 + seed)
        recorded = generate_with_oracle(oracle, prompt, 2, SIXTEEN, seed, decoder_input_ids=canvas)
        given = {"token_ids": canvas[0].tolist()}
        answer, num_steps = replay_with_ours(ours, recorded, prompt, 2, SIXTEEN, canvas=given)
        assert torch.equal(answer, recorded.sequence), seed
        assert num_steps == recorded.forwards
        from_noise = generate_with_oracle(oracle, prompt, 2, SIXTEEN, seed)
        others += not torch.equal(from_noise.sequence, recorded.sequence)
    assert others > 0, "the canvas made a difference"
