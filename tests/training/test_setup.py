"""A run made ready: what compiling may not change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor
from torch._inductor import cpp_builder

from dgemma.checkpoint.presets import PRESETS, layers
from dgemma.checkpoint.random_weights import write_random
from dgemma.training.data.canvases import make_batch
from dgemma.training.objective import token_losses
from dgemma.training.recipe import DataRecipe, Recipe
from dgemma.training.setup import TrainingSetup, disable_slp_vectorizer, prepare
from sizes import IS_FULL

ROWS = 8


def gradients(setup: TrainingSetup) -> dict[str, Tensor]:
    batch = make_batch(setup.stream.take(0, ROWS), range(ROWS), setup.canvases)
    losses = token_losses(setup.lm.transformer, batch)
    (losses.diffusion * batch.weights).sum().backward()
    return {name: part.grad.float() for name, part in setup.trained.items() if part.grad is not None}


def test_generated_code_is_built_without_the_vectorizer_that_breaks_transposed_tiles() -> None:
    """Torch has no setting for a flag of one's own: this fails when it no longer passes ours on."""
    disable_slp_vectorizer()
    flags = cpp_builder.CppTorchOptions().get_cflags()
    assert not cpp_builder.is_gcc() or any("fno-tree-slp-vectorize" in flag for flag in flags)


@pytest.mark.skipif(not IS_FULL, reason="a layer takes minutes to compile: make test-full")
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_compiled_gradients_are_the_plain_ones_where_a_head_is_as_wide_as_a_transposed_tile(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    config = replace(
        PRESETS["tiny"].config,
        layers=layers(1, head_dim=64, kv_heads=2, full_head_dim=64, full_kv_heads=2),
        num_experts=2,  # both of them take every token: no routing choice to flip
        canvas_len=64,
    )
    write_random(model, config, seed=3)
    text = "The sea is blue, and the sky above it is blue as well. " * 8
    recipe = Recipe(
        model=str(model),
        out=str(tmp_path / "run"),
        data=DataRecipe(records=[{"text": text}], max_length=257),
        batch=ROWS,
        steps=1,
        train="all",
        freeze=(),
    )
    plain = gradients(prepare(recipe))
    fused = gradients(prepare(replace(recipe, compile=True)))
    assert plain.keys() == fused.keys()
    for name, gradient in plain.items():
        assert float((fused[name] - gradient).norm()) < 0.05 * float(gradient.norm()), name
