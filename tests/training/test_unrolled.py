"""Gradients flow through several refinement steps along the soft embeddings, and are those of the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dgemma.language_model import LanguageModel
from dgemma.model.lora import LoraSettings, lora_parameters
from oracle import CASES, make_oracle, make_ours, tokens

CASE = CASES[5]  # every expert for every token: a small step cannot flip a routing choice
CANVAS = tokens(CASE, 1, CASE.canvas_len, seed=2)
TARGET = tokens(CASE, 1, CASE.canvas_len, seed=3)[0]
TEMPERATURES = (0.8, 0.667, 0.533)
LIMIT = 0.01
Pass = Callable[[Tensor], Tensor]


def through(soft: Tensor) -> Tensor:
    return soft


def cut(soft: Tensor) -> Tensor:
    return soft.detach()


@pytest.fixture(scope="module")
def base() -> LanguageModel:
    return make_ours(make_oracle(CASE))


def unrolled(lm: LanguageModel, start: Tensor, hand_on: Pass = through) -> Tensor:
    """The loss behind three steps. In float64, because a loss near 10 has steps of 1e-6 in float32."""
    cache = lm.new_cache()
    lm.encode(tokens(CASE, 1, 13, seed=1), cache)
    soft = start
    for temperature in TEMPERATURES:
        logits = lm.logits(lm.denoise(CANVAS, cache, soft))
        soft = hand_on(lm.soft_embedding(logits / temperature))
    return F.cross_entropy(logits[0].double(), TARGET)


def start_of(lm: LanguageModel) -> Tensor:
    """The embedding of the noise: as large as a soft embedding of a model that is sure of itself."""
    return lm.soft_embedding(20 * F.one_hot(CANVAS, lm.config.vocab_size).float()).detach()


def error_of_gradient(lm: LanguageModel, start: Tensor, moved: Tensor, hand_on: Pass = through) -> float:
    """How far the gradient is from the slope measured along it, by its own length."""
    (gradient,) = torch.autograd.grad(unrolled(lm, start, hand_on), [moved])
    length = gradient.norm().item()
    way = 1e-3 / length  # the loss changes by so much to either side, a thousand times its rounding
    with torch.no_grad():
        moved += way / length * gradient
        up = unrolled(lm, start)
        moved -= 2 * way / length * gradient
        down = unrolled(lm, start)
        moved += way / length * gradient
    return abs((up - down).item() / (2 * way) / length - 1)


NAMES = [
    "self_conditioning.mlp.gate.weight",
    "self_conditioning.mlp.down.weight",
    "self_conditioning.norm.weight",
    "layers.0.experts.gate_up.weight",
    "layers.2.experts.down.weight",
    "layers.1.attention.query.weight",
    "layers.1.router.scores.weight",
    "embedding.weight",
]


@pytest.fixture
def trained(base: LanguageModel, request: Any) -> Any:
    parameter = base.transformer.get_parameter(request.param)
    yield parameter.requires_grad_()
    parameter.requires_grad_(False)


@pytest.mark.parametrize("trained", NAMES, indirect=True)
def test_the_gradient_of_three_steps_is_the_slope_of_their_loss(trained: Tensor, base: LanguageModel) -> None:
    assert error_of_gradient(base, start_of(base), trained) < LIMIT


@pytest.mark.parametrize("trained", NAMES, indirect=True)
def test_with_the_soft_path_cut_the_gradient_is_another(trained: Tensor, base: LanguageModel) -> None:
    """The test above would see a step that hands on no gradient."""
    assert error_of_gradient(base, start_of(base), trained, cut) > 5 * LIMIT


def test_the_last_steps_loss_reaches_what_the_first_step_saw(base: LanguageModel) -> None:
    start = start_of(base).requires_grad_()
    assert error_of_gradient(base, start, start) < LIMIT
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(unrolled(base, start, cut), [start])


@pytest.mark.parametrize("part", ["self_conditioning", "experts", "attention"])
def test_an_adapters_factors_get_the_gradient_of_three_steps(part: str, base: LanguageModel) -> None:
    lm = base.with_adapter(LoraSettings(rank=4, expert_rank=4, alpha=4, expert_alpha=4, targets=(part,)))
    factors = lora_parameters(lm.transformer)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, factor in factors.items():
            if name.endswith(".up"):  # zeros would hide `down`
                factor.copy_(0.1 * torch.randn(factor.shape, generator=generator))
    for name in list(factors)[:2]:
        assert error_of_gradient(lm, start_of(lm), factors[name]) < LIMIT, name
