"""The released geometry: names and shapes equal the oracle's, counts equal the published ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextConfig,
)

from dgemma.checkpoint.names import VISION_PREFIXES, tensor_specs
from dgemma.checkpoint.parameter_count import count_parameters
from dgemma.checkpoint.presets import PRESETS
from dgemma.model.config import ModelConfig
from dgemma.model.transformer import Transformer
from oracle import tiny_vision_config

RELEASED = DiffusionGemmaTextConfig(
    vocab_size=262_144, hidden_size=2816, intermediate_size=2112, num_hidden_layers=30,
    num_attention_heads=16, num_key_value_heads=8, head_dim=256, global_head_dim=512,
    num_global_key_value_heads=2, sliding_window=1024, num_experts=128, top_k_experts=8,
    moe_intermediate_size=704, max_position_embeddings=262_144,
)  # fmt: skip


@pytest.fixture(scope="module")
def oracle_config() -> DiffusionGemmaConfig:
    return DiffusionGemmaConfig(text_config=RELEASED, vision_config=tiny_vision_config())


def test_our_config_of_the_released_geometry_is_the_26b_preset(
    oracle_config: DiffusionGemmaConfig,
) -> None:
    found = ModelConfig.from_json(oracle_config.to_dict())
    assert replace(found, vision=None) == PRESETS["26b"].config  # of the language model


def test_names_and_shapes_equal_the_oracles_state_dict(oracle_config: DiffusionGemmaConfig) -> None:
    with torch.device("meta"):
        oracle = DiffusionGemmaForBlockDiffusion(oracle_config)
    specs = list(tensor_specs(PRESETS["26b"].config))
    tied = {name for spec in specs for name in spec.tied_names}
    theirs = {
        name: tuple(tensor.shape)
        for name, tensor in oracle.state_dict().items()
        if name not in tied and not name.startswith(VISION_PREFIXES)
    }
    assert theirs == {spec.name: spec.shape for spec in specs}
    assert tied <= oracle.state_dict().keys()
    transformer = Transformer(PRESETS["26b"].config, dtype=torch.bfloat16, device="meta")
    ours = {path: tuple(tensor.shape) for path, tensor in transformer.state_dict().items()}
    assert ours == {spec.path: spec.shape for spec in specs}


def test_counts_are_the_published_ones() -> None:
    counts = count_parameters(PRESETS["26b"].config)
    parts = counts.parameters_by_part
    assert counts.total_parameters // 10**8 == 252
    assert round(counts.active_parameters / 1e8) == 38
    assert round(parts["experts"] / 1e7) == 2284
    assert round(parts["attention"] / 1e7) == 111
    assert round(parts["shared_mlp"] / 1e6) == 535
    assert round(parts["embedding"] / 1e6) == 738
    assert round(parts["self_conditioning"] / 1e6) == 18
    assert sum(parts.values()) == counts.total_parameters
    assert counts.bytes["bf16"] == 2 * counts.total_parameters
    # 25 sliding layers x 8 heads x 256, 5 full ones x 2 x 512, K and V in bf16
    assert counts.kv_bytes_per_1k_tokens == {"sliding": 204_800_000, "full": 20_480_000}
    assert round(counts.kv_window_bytes / 1e6) == 210


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_config_round_trips_and_the_oracle_reads_it(name: str) -> None:
    config = PRESETS[name].config
    raw = config.to_json()
    assert ModelConfig.from_json(raw) == config
    theirs = DiffusionGemmaConfig(**raw)
    # Without a vision_config the oracle has a tower of its own defaults.
    assert replace(ModelConfig.from_json(theirs.to_dict()), vision=None) == config
