"""The cost model: what a canvas and a token cost, by a roofline; and which of them "auto" chooses."""

from __future__ import annotations

import pytest
import torch

from dgemma.checkpoint.presets import PRESETS
from dgemma.engine.decode_cost import (
    FIRST_PAUSE,
    MAX_PAUSE,
    ROOFS,
    DecodeChooser,
    DecodeCost,
    Roof,
    forward_seconds,
)
from dgemma.model.transformer import Transformer

RELEASED = Transformer(PRESETS["26b"].config, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("device", ROOFS)
def test_a_canvas_costs_more_than_a_token_and_less_than_its_tokens(device: str) -> None:
    cost = DecodeCost.of(RELEASED, device)
    assert cost.token_s < cost.verify_s < cost.step_s < 256 * cost.token_s


def test_canvases_are_tried_again_after_ever_longer_pauses() -> None:
    chooser = DecodeChooser(DecodeCost(token_s=1.0, step_s=2.0, verify_s=1.0))
    pauses = []
    for _ in range(8):
        assert chooser.choice == "lossless"
        chooser.wrote_canvas(steps=4, num_tokens=8)  # 8 seconds' worth in 9
        pauses.append(0)
        while chooser.choice == "causal":
            chooser.wrote_token()
            pauses[-1] += 1
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == MAX_PAUSE


def test_a_canvas_that_pays_is_followed_by_another() -> None:
    chooser = DecodeChooser(DecodeCost(token_s=1.0, step_s=2.0, verify_s=1.0))
    chooser.wrote_canvas(steps=4, num_tokens=8)
    for _ in range(FIRST_PAUSE):
        chooser.wrote_token()
    chooser.wrote_canvas(steps=4, num_tokens=9)
    assert chooser.choice == "lossless"
    chooser.wrote_canvas(steps=4, num_tokens=8)
    assert chooser.wait == FIRST_PAUSE  # the pause is short again


def test_a_step_at_full_size_is_what_it_is_computed_to_be() -> None:
    """2.34 TFLOP per step of 256 positions, of which the vocabulary takes 0.76."""
    roof = Roof(flops=1e12, bytes=1e15)  # arithmetic alone
    assert forward_seconds(RELEASED, roof, 256, with_soft=True) == pytest.approx(2.34, rel=0.02)
    body = forward_seconds(RELEASED, roof, 256, with_soft=False) * 2 - 2.34  # less the head's half
    assert 2.34 - body == pytest.approx(0.76, rel=0.03)
