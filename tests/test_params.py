"""Options are checked once, by name, with a remedy."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from dgemma.errors import InputError
from dgemma.params import PRESETS, GenerateOptions, GenerationParams, InfillOptions, SamplingOptions
from dgemma.structured_output.response_format import FORMAT_OPTIONS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1}, "unknown option 'temprature'; did you mean 'temperature'?"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number at least 1"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5; it must be a whole number"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"canvas_len": 0}, 'canvas_len is 0; it must be a whole number of at least 1, or "auto".'),
        ({"seed": 1 << 64}, "seed is 18446744073709551616"),
        ({"temperature": -1}, "temperature is -1; it must be a number from 0 to 100"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"max_denoising_steps": 1025}, "from 1 to 1024"),
        ({"top_p": 0.0}, "top_p is 0; it must be above 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": 5000}, "top_k is 5000; it must be a whole number from 1 to 1024"),
        ({"t_min": 0.9}, "t_min is 0.9, t_max is 0.8"),
        ({"decode": "difuse"}, "decode is 'difuse'; did you mean 'diffuse'?"),
        ({"acceptance": "all"}, "acceptance is 'all'"),
        ({"preset": "fats"}, "preset is 'fats'; did you mean 'fast'?"),
        ({"deadline_s": -0.1}, "deadline_s is -0.1"),
        ({"stop": 3}, "stop is 3; it must be a string or a list of strings"),
        ({"stop": ["ok", ""]}, "stop has a string of 0 characters"),
        ({"stop": ["a" * 257]}, "stop has a string of 257 characters"),
        ({"stop": ["a"] * 17}, "stop has 17 strings; at most 16"),
        ({"end_tokens": (-1,)}, "end_tokens is"),
        ({"end_tokens": 5}, "end_tokens is 5; it must be a list of whole numbers of 0 or more"),
        ({"end_tokens": {5}}, "end_tokens is {5}"),
        ({"max_tokens": 10**400}, "it must be a whole number from 1 to 4.61169e+18"),
        ({"t_max": 10**400}, "it must be a number from 0 to 100"),
        ({"deadline_s": 10**400}, "it must be a number from 0 to 4.61169e+18"),
        ({"deadline_s": float("inf")}, "deadline_s is inf"),
        ({"logprobs": 21}, "logprobs is 21"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        GenerationParams.make(**options)
    assert message in str(caught.value)


def test_a_checkpoints_defaults_are_taken_and_null_means_ours() -> None:
    params = GenerationParams.from_generation_config(
        {
            "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.25},
            "t_max": 0.9,
            "t_min": None,
            "max_denoising_steps": 20,
            "eos_token_id": [1, 106],
            "max_new_tokens": 256,
            "something_else": "ignored",
        }
    )
    assert params.entropy_bound == 0.25
    assert (params.t_min, params.t_max) == (0.4, 0.9)
    assert params.max_denoising_steps == 20
    assert params.end_tokens == (1, 106)
    assert params.max_tokens is None, "a canvas's length is not a user's limit"
    assert GenerationParams.from_generation_config({"eos_token_id": 7}).end_tokens == (7,)
    assert GenerationParams.from_generation_config({"sampler_config": None}) == GenerationParams()


def test_options_go_over_a_preset_which_goes_over_the_defaults() -> None:
    defaults = GenerationParams(entropy_bound=0.7, t_max=0.9)
    fast = GenerationParams.make(defaults, preset="fast", max_denoising_steps=5, seed=None)
    assert fast.entropy_bound == PRESETS["fast"]["entropy_bound"]
    assert fast.max_denoising_steps == 5
    assert fast.t_max == 0.9
    assert GenerationParams.make(defaults, preset="balanced") == defaults
    assert GenerationParams.make(stop="END").stop == ("END",)
    assert GenerationParams.make(end_tokens=[1, 2]).end_tokens == (1, 2)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid(preset: str) -> None:
    GenerationParams.make(preset=preset)


def test_typed_keyword_options_are_the_fields_of_the_parameters_and_the_response_formats() -> None:
    names = {field.name for field in fields(GenerationParams)}
    assert set(GenerateOptions.__annotations__) == names | {"pins", "canvas"} | set(FORMAT_OPTIONS)
    assert set(SamplingOptions.__annotations__) == names - {"max_tokens", "stop", "deadline_s"}
    assert set(InfillOptions.__annotations__) == set(SamplingOptions.__annotations__) | set(FORMAT_OPTIONS)
