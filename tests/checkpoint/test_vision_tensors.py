"""The vision tower is loaded, saved, counted and left alone, as the tables of tensors say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion

import dgemma
from comparison import worst
from dgemma.checkpoint.names import VISION_PREFIXES, vision_specs
from dgemma.checkpoint.parameter_count import count_parameters
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.checkpoint.source import open_checkpoint
from dgemma.errors import CheckpointError
from dgemma.model.config import ModelConfig
from parity.test_vision_equals_oracle import TOLERANCE, oracle_soft_tokens, soft_tokens
from vision_oracle import VISION_CASES, VisionCase, vision_oracle

# With clipping, standardized.
CASE = VISION_CASES[5]


@pytest.mark.parametrize("case", VISION_CASES, ids=lambda case: case.name)
def test_the_table_has_every_tensor_of_the_tower(case: VisionCase) -> None:
    oracle = vision_oracle(case)
    config = ModelConfig.from_json(oracle.config.to_dict())
    stored = {n: tuple(t.shape) for n, t in oracle.state_dict().items() if n.startswith(VISION_PREFIXES)}
    assert {spec.name: spec.shape for spec in vision_specs(config)} == stored
    assert count_parameters(config).vision_parameters == sum(
        t.numel() for n, t in oracle.state_dict().items() if n.startswith(VISION_PREFIXES)
    )
    again = ModelConfig.from_json(config.to_json())
    assert (again.vision, again.sees_whole_images) == (config.vision, True)


def test_a_checkpoint_of_the_oracle_loads_with_its_tower(tmp_path: Path) -> None:
    oracle = vision_oracle(CASE)
    oracle.save_pretrained(tmp_path)
    lm = dgemma.load(tmp_path, dtype="float32")
    assert worst(soft_tokens(lm, CASE), oracle_soft_tokens(oracle, CASE)) <= TOLERANCE
    assert open_checkpoint(tmp_path).nbytes == lm.nbytes - _derived_bytes(lm)
    in_bf16 = dgemma.load(tmp_path, dtype="bfloat16").transformer.vision
    assert in_bf16 is not None
    assert {tensor.dtype for tensor in in_bf16.state_dict().values()} == {torch.bfloat16}
    assert in_bf16.frequencies.dtype == torch.float32


def _derived_bytes(lm: dgemma.LanguageModel) -> int:
    """Of frequencies, which are in no file."""
    stored = set(lm.transformer.state_dict())
    return sum(t.nbytes for name, t in lm.transformer.named_buffers() if name not in stored)


def test_the_oracle_reads_a_random_checkpoint_with_a_tower(tmp_path: Path) -> None:
    vision = ModelConfig.from_json(vision_oracle(CASE).config.to_dict()).vision
    config = replace(PRESETS["tiny"].config, vision=vision, sees_whole_images=True)
    write_random(tmp_path / "random", config, dtype="F32")
    oracle = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path / "random").eval()
    lm = dgemma.load(tmp_path / "random", dtype="float32")
    assert lm.config.vision == vision
    assert worst(soft_tokens(lm, CASE), oracle_soft_tokens(oracle, CASE)) <= TOLERANCE
    # Without the files it came from, the tower is written from memory.
    dgemma.LanguageModel(lm.transformer).save(tmp_path / "again")
    again = dgemma.load(tmp_path / "again", dtype="float32")
    assert again.config == lm.config
    assert torch.equal(soft_tokens(again, CASE), soft_tokens(lm, CASE))


def test_a_fingerprint_does_not_cover_the_tower(tmp_path: Path) -> None:
    config = PRESETS["tiny"].config
    vision = ModelConfig.from_json(vision_oracle(CASE).config.to_dict()).vision
    write_random(tmp_path / "text", config)
    write_random(tmp_path / "images", replace(config, vision=vision))
    text, images = (dgemma.load(tmp_path / name) for name in ("text", "images"))
    assert text.fingerprint() == images.fingerprint()


def test_without_its_tensors_it_is_a_model_of_text(tmp_path: Path) -> None:
    write_random(tmp_path, PRESETS["tiny"].config)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"vision_config": {"model_type": "gemma4_vision"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    lm = dgemma.load(tmp_path)
    assert lm.config.vision is None
    assert lm.transformer.vision is None


def test_a_tower_that_lacks_a_tensor_or_has_another_shape_is_refused(tmp_path: Path) -> None:
    oracle = vision_oracle(CASE)
    oracle.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def refused(match: str, **changes: object) -> None:
        changed = {**config, "vision_config": {**config["vision_config"], **changes}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=match):
            open_checkpoint(tmp_path)

    refused(r"lacks \d+ tensors: 'model.encoder.vision_tower.encoder.layers.2", num_hidden_layers=3)
    refused(r"'model.encoder.vision_tower.\S+' has shape \[24, 24\]; .* \[48, 24\]", num_attention_heads=6)
