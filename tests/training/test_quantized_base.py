"""An adapter trains on a base in few bits as on the plain base those bits stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import dgemma
from dgemma.checkpoint.names import tensor_specs
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.quantized.quantization_config import NAMES, quantization_config_for
from dgemma.checkpoint.quantized.writer import from_random, write_quantized
from dgemma.checkpoint.random_weights import tokenizer_files
from dgemma.errors import InputError
from dgemma.language_model import LanguageModel
from dgemma.loading import load
from dgemma.model.quantized_linear import QuantizedWeight
from dgemma.model.transformer import Transformer
from dgemma.training.recipe import DataRecipe, OptimizerRecipe, Recipe
from dgemma.training.setup import prepare
from dgemma.training.trainer import Trainer, TrainingOutcome
from sizes import IS_FULL
from training.test_trainer import Notes

CONFIG = PRESETS["tiny"].config


def quantized(path: Path, name: str) -> Path:
    with tokenizer_files() as companions:
        write_quantized(
            path, from_random(CONFIG, seed=3, companions=companions), quantization_config_for(name, CONFIG)
        )
    return path


def decoded(lm: LanguageModel) -> LanguageModel:
    """The same model with plain weights."""
    stack = Transformer(CONFIG, dtype=torch.float32, device="cpu")
    for spec in tensor_specs(CONFIG):
        parent, _, leaf = spec.path.rpartition(".")
        module = lm.transformer.get_submodule(parent)
        numbers = (
            module.quantized.dequantize(torch.float32)
            if isinstance(module, QuantizedWeight)
            else getattr(module, leaf)
        )
        getattr(stack.get_submodule(parent), leaf).data.copy_(numbers)
    return lm.with_transformer(stack)


def recipe_of(model: Path, tmp_path: Path, **changes: object) -> Recipe:
    file = tmp_path / "sums.jsonl"
    lines = [json.dumps({"prompt": f"{a} and 2?", "response": f"{a} and 2 make {a + 2}. "}) for a in range(8)]
    file.write_text("\n".join(lines))
    basic = {
        "model": str(model),
        "out": str(tmp_path / "run"),
        "data": DataRecipe(path=str(file), max_length=96),
        "steps": 3,
        "batch": 4,
        "precision": "fp32",
        "optimizer": OptimizerRecipe(learning_rate=1e-3),
    }
    return Recipe(**{**basic, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES if IS_FULL else ["int4"])
def test_losses_and_factors_are_those_on_the_decoded_base(tmp_path: Path, name: str) -> None:
    model = quantized(tmp_path / "q", name)
    lm = load(model, dtype="float32")
    found = []
    for number, base in enumerate((lm, decoded(lm))):
        recipe = recipe_of(model, tmp_path, out=str(tmp_path / f"run{number}"))
        trainer = Trainer(recipe, lm=base)
        notes = Notes()
        assert trainer.run(notes) is TrainingOutcome.FINISHED
        found.append(([report.loss for report in notes.steps], trainer.directory.load_state(3)))
    (losses, factors), (plain_losses, plain_factors) = found
    assert losses == pytest.approx(plain_losses, rel=1e-4)
    assert factors.keys() == plain_factors.keys()
    assert any("experts" in path for path in factors)
    for path, factor in factors.items():
        assert torch.allclose(factor, plain_factors[path], rtol=1e-2, atol=2e-4), path


def test_the_adapter_is_kept_with_its_quantized_base(tmp_path: Path) -> None:
    model = quantized(tmp_path / "q", "int4")
    assert Trainer(recipe_of(model, tmp_path)).run(Notes()) is TrainingOutcome.FINISHED
    adapter = tmp_path / "run" / "adapter"
    assert load(model, adapter=adapter).generate("1 and 2?", max_tokens=8, seed=1).tokens
    other = quantized(tmp_path / "q8", "int8")
    with pytest.raises(dgemma.CheckpointError, match="was made for the base"):
        load(other, adapter=adapter)


def test_a_quantized_base_is_frozen_and_not_compiled(tmp_path: Path) -> None:
    model = quantized(tmp_path / "q", "int4")
    with pytest.raises(InputError, match="train is 'all', but the model is quantized"):
        prepare(recipe_of(model, tmp_path, train="all"))
    with pytest.raises(InputError, match="compile is on, but the model is quantized"):
        prepare(recipe_of(model, tmp_path, compile=True))
