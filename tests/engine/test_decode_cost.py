"""The cost model: what a canvas and a token cost, by a roofline."""

from __future__ import annotations

import pytest
import torch

from dgemma.checkpoint.presets import PRESETS
from dgemma.engine.decode_cost import ROOFS, Roof, cheaper_decode, forward_seconds
from dgemma.model.transformer import Transformer

RELEASED = Transformer(PRESETS["26b"].config, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("device", ROOFS)
def test_short_answers_are_cheaper_token_by_token_and_long_ones_are_not(device: str) -> None:
    choices = [cheaper_decode(RELEASED, device, n) for n in (1, 2, 256, 1024)]
    assert choices[0] == "causal"
    assert choices[-1] == "diffuse"
    # One border: once canvases win they go on winning, up to a canvas's length.
    within = [cheaper_decode(RELEASED, device, n) for n in range(1, 257)]
    assert within == sorted(within)


def test_a_step_at_full_size_is_what_it_is_computed_to_be() -> None:
    """2.34 TFLOP per step of 256 positions, of which the vocabulary takes 0.76."""
    roof = Roof(flops=1e12, bytes=1e15)  # arithmetic alone
    assert forward_seconds(RELEASED, roof, 256, with_soft=True) == pytest.approx(2.34, rel=0.02)
    body = forward_seconds(RELEASED, roof, 256, with_soft=False) * 2 - 2.34  # less the head's half
    assert 2.34 - body == pytest.approx(0.76, rel=0.03)
