"""The state of all canvases is made once and stays small."""

from __future__ import annotations

import torch

from dgemma.checkpoint.presets import PRESETS
from dgemma.engine.canvas_store import CanvasStore


def state_bytes(preset: str, count: int) -> int:
    config = PRESETS[preset].config
    return CanvasStore(config, count, dtype=torch.bfloat16, device=torch.device("meta")).nbytes


def test_64_slots_of_the_released_geometry_hold_less_than_a_gigabyte() -> None:
    assert state_bytes("26b", 64) < 0.2e9


def test_what_a_slot_holds_does_not_grow_with_the_vocabulary() -> None:
    config = PRESETS["26b"].config
    per_position = state_bytes("26b", 1) / config.canvas_len
    assert per_position < 2 * config.hidden_size + 2 * 8 + 2, "a soft embedding, two token ids, a flag"
