"""Requests whose canvases are shorter than the model's own: what they may ask for, and what they take."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma.checkpoint.presets import PRESETS
from dgemma.engine.request import EngineRequest, ValidatedRequest, validate_request
from dgemma.errors import InputError
from dgemma.params import GenerationParams

CONFIG = dataclasses.replace(PRESETS["tiny"].config, canvas_len=32, max_positions=100)


def validated(
    canvas_len: int | None, prompt_len: int = 10, max_tokens: int | None = None
) -> ValidatedRequest:
    params = GenerationParams(canvas_len=canvas_len, max_tokens=max_tokens)
    request = EngineRequest(prompt=(7,) * prompt_len, seed=0, params=params)
    return validate_request(request, CONFIG, adapters=[None])


def test_a_canvas_longer_than_the_models_own_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"canvas_len is 33; this model's own canvas has 32 tokens\. Give at most these\."
    ):
        validated(33)


@given(canvas_len=st.integers(1, 32), prompt_len=st.integers(1, 99), max_tokens=st.integers(1, 99))
def test_whole_canvases_fit_after_the_prompt_and_only_the_last_is_not_encoded(
    canvas_len: int, prompt_len: int, max_tokens: int
) -> None:
    room = (100 - prompt_len) // canvas_len * canvas_len
    if max_tokens > room:
        with pytest.raises(InputError, match=r"leaves|then has no room"):
            validated(canvas_len, prompt_len, max_tokens)
        return
    found = validated(canvas_len, prompt_len, max_tokens)
    assert found.canvas_len == canvas_len
    canvases = -(-max_tokens // canvas_len)
    assert found.max_len == prompt_len + (canvases - 1) * canvas_len
    assert found.max_len + canvas_len <= 100, "the last canvas ends within the context"


def test_a_short_canvas_fits_where_the_models_own_does_not() -> None:
    with pytest.raises(InputError, match="then has no room for a canvas of 32"):
        validated(None, prompt_len=90)
    assert validated(8, prompt_len=90).max_tokens == 8
