"""A configuration is read as released, and round-trips."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma import ConfigError, LayerKind, ModelConfig
from dgemma.checkpoint.presets import PRESETS
from oracle import CASES, make_oracle


def released(**changes: Any) -> dict[str, Any]:
    """The tiny preset with changes, in one spelling of the full layers' shape: `per_layer_config`."""
    raw = PRESETS["tiny"].config.to_json()
    for name in ("global_head_dim", "num_global_key_value_heads"):
        raw["text_config"].pop(name)
    raw["text_config"].update(changes)
    return raw


@pytest.mark.parametrize("spelling", ["both", "per_layer_config", "global fields"])
def test_either_spelling_of_the_full_layers_reads_the_same(spelling: str) -> None:
    config = PRESETS["26b"].config
    raw = config.to_json()
    text = raw["text_config"]
    assert (text["global_head_dim"], text["num_global_key_value_heads"]) == (512, 2)
    if spelling == "per_layer_config":
        del text["global_head_dim"], text["num_global_key_value_heads"]
    elif spelling == "global fields":
        del text["per_layer_config"]
    assert ModelConfig.from_json(raw) == config


@pytest.mark.parametrize(("name", "value"), [("global_head_dim", 64), ("num_global_key_value_heads", 4)])
def test_spellings_that_contradict_each_other_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}, but per_layer_config.*must agree"):
        ModelConfig.from_json(released(**{name: value}))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_oracles_configuration_round_trips(case: Any) -> None:
    config = ModelConfig.from_json(make_oracle(case).config.to_dict())
    assert ModelConfig.from_json(config.to_json()) == config


def test_zero_padded_layer_keys_name_their_layer() -> None:
    raw = released(num_hidden_layers=12, layer_types=None, per_layer_config={"05": {"head_dim": 16}})
    raw["text_config"]["per_layer_config"]["11"] = {"head_dim": 16}
    config = ModelConfig.from_json(raw)
    assert [s.head_dim for s in config.layers if s.kind is LayerKind.FULL] == [16, 16]
    assert [i for i, s in enumerate(config.layers) if s.kind is LayerKind.FULL] == [5, 11]


def test_defaults_are_the_references() -> None:
    raw = released(rope_parameters=None, layer_types=None, final_logit_softcapping=None)
    raw["text_config"].pop("per_layer_config")
    config = ModelConfig.from_json(raw)
    assert config.logit_cap == 30
    assert config.rope[LayerKind.SLIDING].theta == 1e4
    assert config.rope[LayerKind.FULL].rotated_share == 0.25
    assert config.layers[-1].kind is LayerKind.FULL
    assert config.layers[-1].head_dim == 512


def test_a_sliding_layer_may_rotate_a_part_of_its_head_too() -> None:
    raw = released()
    part = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e4}
    raw["text_config"]["rope_parameters"]["sliding_attention"] = part
    config = ModelConfig.from_json(raw)
    assert config.rope[LayerKind.SLIDING].rotated_share == 0.5
    assert ModelConfig.from_json(config.to_json()) == config


def test_the_last_layer_is_full_whatever_the_list_says() -> None:
    raw = released(layer_types=["sliding_attention"] * 3)
    assert ModelConfig.from_json(raw).layers[-1].kind is LayerKind.FULL


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": 2.0}, "rms_norm_eps is 2.0"),
        ({"rms_norm_eps": "small"}, "must be a number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is too large"),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping is -1.0"),
        ({"head_dim": 15, "layer_types": ["sliding_attention"] * 3}, "even number"),
        ({"layer_types": "full"}, "must be a list of 3"),
        ({"per_layer_config": 3}, "per_layer_config is a int"),
        ({"per_layer_config": {"9" * 5000: {}}}, "does not name a layer"),
        ({"per_layer_config": {"0": {"head_dim": 32}}}, "layers of one kind share"),
        ({"rope_parameters": {}}, "lacks an entry for 'sliding_attention'"),
        ({"vocab_size": True}, "must be a whole number"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"attention_bias": True}, "attention_bias is True"),
    ],
)
def test_a_bad_value_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    raw = released(**changes)
    if "per_layer_config" in changes and isinstance(changes["per_layer_config"], dict):
        raw["text_config"]["layer_types"] = ["sliding_attention"] * 3
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_json(raw)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("full_attention", {"factor": 8.0}, "scaling factor"),
        ("full_attention", {"rope_theta": 0.5}, "out of range"),
        ("sliding_attention", {"partial_rotary_factor": 0.5}, "not supported"),
    ],
)
def test_a_bad_rope_is_refused_by_name(kind: str, values: dict[str, Any], message: str) -> None:
    raw = released()
    raw["text_config"]["rope_parameters"][kind].update(values)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_json(raw)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "siglip"}, "vision_config: model_type is 'siglip'"),
        ({"hidden_size": 0}, "vision_config: hidden_size is 0"),
        ({"head_dim": 18}, "head_dim is 18; rotary positions on two axes"),
        ({"num_key_value_heads": 5}, "query heads cannot share 5 KV heads evenly"),
        ({"rms_norm_eps": 1.0}, "rms_norm_eps is 1.0"),
        ({"standardize": 1}, "standardize is 1; it must be true or false"),
        ({"rope_parameters": {"rope_theta": 0.5}}, "rope_theta is 0.5"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
    ],
)
def test_a_bad_vision_tower_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    raw = released()
    raw["vision_config"] = {"model_type": "gemma4_vision", **changes}
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_json(raw)


def test_a_model_without_layers_is_refused() -> None:
    import dataclasses

    with pytest.raises(ConfigError, match="has 0 layers"):
        dataclasses.replace(PRESETS["tiny"].config, layers=())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(sorted(released()["text_config"])), json_values, max_size=3), json_values
)
@settings(max_examples=300)
def test_arbitrary_values_are_read_or_refused_but_never_crash(changes: dict[str, Any], whole: Any) -> None:
    for raw in (released(**changes), whole):
        with contextlib.suppress(ConfigError):
            ModelConfig.from_json(raw)
