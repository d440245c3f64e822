"""Gradients flow through both doors, and from a canvas back into the context it read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dgemma.checkpoint.names import tensor_specs, vision_specs
from dgemma.language_model import LanguageModel
from dgemma.model.execution import Execution
from dgemma.model.kv_cache import context_from_new_kv
from oracle import CASES, make_oracle, make_ours, tokens

CASE = CASES[0]


def loss_of(lm: LanguageModel, prompt: Tensor, canvas: Tensor) -> Tensor:
    cache = lm.new_cache()
    lm.encode(prompt, cache)
    lm.encode(canvas, cache)  # a second append: the first context must survive for backward
    logits = lm.logits(lm.denoise(canvas, cache))
    again = lm.logits(lm.denoise(canvas, cache, lm.soft_embedding(logits)))
    return torch.nn.functional.cross_entropy(again[0], canvas[0])


@pytest.mark.parametrize("grouped", [False, True])
def test_every_parameter_gets_the_gradient_of_finite_differences(grouped: bool) -> None:
    # Every expert for every token: a small step cannot flip a routing choice.
    lm = make_ours(make_oracle(CASES[5]), execution=Execution(grouped_experts=grouped))
    assert not any(p.requires_grad for p in lm.transformer.parameters())
    lm.transformer.requires_grad_(True)
    prompt, canvas = tokens(CASE, 1, 13, seed=1), tokens(CASE, 1, 8, seed=2)
    loss_of(lm, prompt, canvas).backward()
    missing = [n for n, p in lm.transformer.named_parameters() if p.grad is None]
    assert [name for name in missing if not name.startswith("vision.")] == [], "no image was shown"
    for name in (
        "embedding.weight",
        "layers.0.attention.value.weight",
        "layers.1.attention.key.weight",
        "layers.1.mlp.down.weight",
        "layers.2.router.expert_scale",
        "layers.0.experts.gate_up.weight",
        "self_conditioning.mlp.up.weight",
    ):
        parameter = lm.transformer.get_parameter(name)
        expected = parameter.grad.norm().item()
        step = 1e-4 * parameter.norm() * parameter.grad / expected
        with torch.no_grad():
            parameter += step
            up = loss_of(lm, prompt, canvas)
            parameter -= 2 * step
            down = loss_of(lm, prompt, canvas)
            parameter += step
        measured = ((up - down) / (2 * step.norm())).item()
        assert measured == pytest.approx(expected, rel=0.03), name


def test_context_straight_from_encode_equals_the_cache_and_carries_gradients() -> None:
    lm = make_ours(make_oracle(CASE))
    lm.transformer.requires_grad_(True)
    prompt, canvas = tokens(CASE, 2, 20, seed=1), tokens(CASE, 2, 8, seed=2)
    empty = lm.new_cache(2).context()
    _, fresh = lm.transformer.encode(prompt, empty)
    kinds = lm.config.kinds
    direct = lm.transformer.denoise(canvas, context_from_new_kv(fresh, kinds, torch.tensor([20, 11])))
    cache = lm.new_cache(2)
    lm.encode(prompt, cache, lengths=[20, 11])
    torch.testing.assert_close(direct, lm.denoise(canvas, cache), atol=1e-5, rtol=0)
    direct.sum().backward()
    key = lm.transformer.get_parameter("layers.0.attention.key.weight")
    assert key.grad is not None
    assert key.grad.abs().max() > 0


def test_an_append_without_gradients_does_not_spoil_those_recorded_before() -> None:
    lm = make_ours(make_oracle(CASE))
    lm.transformer.requires_grad_(True)
    cache = lm.new_cache()
    hidden = lm.encode(tokens(CASE, 1, 13, seed=1), cache)
    loss = hidden.sum() + lm.denoise(tokens(CASE, 1, 8, seed=2), cache).sum()
    with torch.no_grad():
        lm.encode(tokens(CASE, 1, 8, seed=3), cache)
    loss.backward()
    assert lm.transformer.get_parameter("layers.0.attention.key.weight").grad is not None


def test_the_table_of_tensors_and_the_stack_agree() -> None:
    lm = make_ours(make_oracle(CASE))
    quantized = {name: tuple(tensor.shape) for name, tensor in lm.transformer.state_dict().items()}
    specs = (*tensor_specs(lm.config), *vision_specs(lm.config))
    assert quantized == {spec.path: spec.shape for spec in specs}
