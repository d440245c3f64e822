"""What is trained keeps every small change, in float32; what is frozen, and a bad step, keep every bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dgemma.checkpoint.names import tensor_specs
from dgemma.errors import CheckpointError, InputError
from dgemma.model.lora import PARTS
from dgemma.model.transformer import Transformer
from dgemma.training.optimizer import Optimizer, TrainedWeights, choose_trained
from dgemma.training.recipe import OptimizerRecipe
from oracle import CASES, make_oracle, make_ours

BF16, FP32 = torch.bfloat16, torch.float32
EVERY_PART = ("embedding", "norms", *PARTS)


@pytest.fixture(scope="module")
def stack() -> Transformer:
    return make_ours(make_oracle(CASES[0])).transformer


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes = {"matrix": (4, 3), "bank": (2, 3, 4), "scale": (5,), "scalar": (1,)}
    return {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}


def optimizer(
    trained: dict[str, nn.Parameter], **options: Any
) -> tuple[TrainedWeights, Optimizer, OptimizerRecipe]:
    recipe = OptimizerRecipe(**options)
    weights = TrainedWeights(trained)
    return weights, Optimizer(weights, recipe), recipe


def give_gradients(trained: dict[str, nn.Parameter], seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained.values():
        grad = size * torch.randn(parameter.shape, generator=generator)
        parameter.grad = grad.to(parameter.dtype)


def copies(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# What is trained


@pytest.mark.parametrize("part", EVERY_PART)
def test_a_frozen_part_is_left_alone_and_the_rest_is_trained(part: str, stack: Transformer) -> None:
    chosen = choose_trained(stack, [part])
    left = {name for name, parameter in stack.named_parameters() if not parameter.requires_grad}
    assert left == {name for name, _ in stack.named_parameters()} - set(chosen)
    markers = {
        "embedding": {"embedding.weight"},
        "norms": {"norm.weight", "layers.0.before_attention.weight", "layers.2.after_both.weight"},
        "attention": {"layers.0.attention.query.weight", "layers.1.attention.key_norm.weight"},
        "mlp": {"layers.0.mlp.gate.weight", "layers.2.mlp.down.weight"},
        "experts": {"layers.0.experts.gate_up.weight", "layers.1.experts.down.weight"},
        "self_conditioning": {"self_conditioning.mlp.up.weight", "self_conditioning.norm.weight"},
        "router": {"layers.0.router.scores.weight", "layers.0.router.scale", "layers.1.router.expert_scale"},
    }
    assert markers[part] <= left
    assert not left & set().union(*(names for other, names in markers.items() if other != part))
    assert all(chosen[name] is stack.get_parameter(name) for name in chosen)


def test_the_parts_cover_every_parameter_once(stack: Transformer) -> None:
    every = {name for name, _ in stack.named_parameters() if not name.startswith("vision.")}
    assert set(choose_trained(stack, [])) == every, "training is on text: the tower stays as it is"
    frozen = [every - set(choose_trained(stack, [part])) for part in EVERY_PART]
    assert sorted(name for names in frozen for name in names) == sorted(every)


def test_freezing_is_undone_by_freezing_less(stack: Transformer) -> None:
    choose_trained(stack, EVERY_PART[:-1])
    assert set(choose_trained(stack, ["router"])) == {
        spec.path
        for spec in tensor_specs(stack.config)
        if spec.part != "router" and not spec.path.endswith("_scalar")  # the two scalars are buffers
    }


def test_freezing_everything_is_refused(stack: Transformer) -> None:
    with pytest.raises(InputError, match=r"freeze is \['attention', .*which leaves nothing to train"):
        choose_trained(stack, EVERY_PART)


def test_the_number_of_trained_parameters_counts_each_once() -> None:
    assert TrainedWeights(parameters(BF16)).num_parameters == 12 + 24 + 5 + 1


# Masters


def test_a_float32_parameter_is_its_own_master_and_a_bf16_one_has_an_equal_one() -> None:
    wide = TrainedWeights(parameters(FP32))
    assert all(wide.masters[name] is parameter for name, parameter in wide.parameters.items())
    narrow = TrainedWeights(parameters(BF16))
    for name, parameter in narrow.parameters.items():
        assert narrow.masters[name].dtype == FP32
        assert torch.equal(narrow.masters[name], parameter.float())
        assert narrow.masters[name].data_ptr() != parameter.data_ptr()


def test_masters_keep_changes_that_bf16_would_lose() -> None:
    """One step moves 1 by 1e-4, which bf16 (steps of 0.004 there) rounds away, every time."""
    lone = nn.Parameter(torch.ones(1, 1, dtype=BF16))
    weights, adam, _ = optimizer({"x": lone}, weight_decay=0.0, clip=None)
    naive = torch.ones(1, 1, dtype=BF16)
    for number in range(100):
        lone.grad = torch.ones_like(lone)
        weights.collect_gradients()
        adam.step(1e-4)
        naive -= 1e-4
        if number == 0:
            assert lone.item() == 1
    assert naive.item() == 1
    assert weights.masters["x"].item() == pytest.approx(0.99, abs=1e-5)
    assert lone.item() == pytest.approx(0.99, abs=0.002)


def test_the_forward_computes_with_the_rounded_master_after_each_step() -> None:
    trained = parameters(BF16)
    weights, adam, _ = optimizer(trained)
    for seed in range(3):
        give_gradients(trained, seed)
        weights.collect_gradients()
        adam.step(0.05)
        for name, parameter in trained.items():
            assert torch.equal(parameter, weights.masters[name].to(BF16))


def test_gradients_of_many_forwards_add_up_in_float32() -> None:
    """256 + 1 is 256 in bf16: added up there, the small ones would be lost."""
    parameter = nn.Parameter(torch.zeros(1, 1, dtype=BF16))
    weights = TrainedWeights({"x": parameter})
    for value in (256.0, *[1.0] * 16):
        (parameter * value).sum().backward()
        weights.collect_gradients()
        assert parameter.grad is None
    assert weights.masters["x"].grad is not None
    assert weights.masters["x"].grad.item() == 272
    assert weights.masters["x"].grad.dtype == FP32


def test_a_parameter_that_no_forward_reached_keeps_what_was_collected() -> None:
    trained = parameters(BF16)
    weights = TrainedWeights(trained)
    give_gradients(trained, 0)
    weights.collect_gradients()
    before = copies({name: master.grad for name, master in weights.masters.items()})
    weights.collect_gradients()  # every grad is None now
    assert same(before, {name: master.grad for name, master in weights.masters.items()})


# Steps


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_step_equals_torchs_adam_on_float32(dtype: torch.dtype) -> None:
    trained = parameters(dtype)
    weights, adam, recipe = optimizer(trained, clip=None, weight_decay=0.1)
    twins = {name: nn.Parameter(p.detach().float().clone()) for name, p in trained.items()}
    groups = [
        {"params": [twin for twin in twins.values() if twin.ndim > 1], "weight_decay": 0.1},
        {"params": [twin for twin in twins.values() if twin.ndim == 1], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, betas=recipe.betas, eps=recipe.eps, foreach=False)
    for seed in range(4):
        give_gradients(trained, seed)
        for name, twin in twins.items():
            twin.grad = trained[name].grad.float().clone()
        for group in plain.param_groups:
            group["lr"] = 0.01 * (seed + 1)
        plain.step()
        weights.collect_gradients()
        adam.step(0.01 * (seed + 1))
    for name, twin in twins.items():
        torch.testing.assert_close(weights.masters[name], twin, atol=1e-6, rtol=1e-6)


def test_only_matrices_decay() -> None:
    trained = parameters(FP32)
    before = copies(trained)
    weights, adam, _ = optimizer(trained, weight_decay=0.5)
    for parameter in trained.values():
        parameter.grad = torch.zeros_like(parameter)
    weights.collect_gradients()
    adam.step(0.1)
    for name in ("matrix", "bank"):
        torch.testing.assert_close(trained[name].detach(), before[name] * 0.95)
    for name in ("scale", "scalar"):
        assert torch.equal(trained[name], before[name])


def test_the_norm_is_that_of_all_gradients_before_clipping() -> None:
    for clip in (1e-3, None):
        trained = parameters(FP32)
        weights, adam, _ = optimizer(trained, clip=clip)
        give_gradients(trained, 0, size=10)
        expected = math.sqrt(sum(float(p.grad.pow(2).sum()) for p in trained.values()))
        weights.collect_gradients()
        assert adam.step(0.1) == pytest.approx(expected, rel=1e-6)


def test_clipping_bounds_what_adam_sees() -> None:
    trained = parameters(BF16)
    weights, adam, recipe = optimizer(trained, clip=0.5)
    give_gradients(trained, 0, size=10)
    weights.collect_gradients()
    adam.step(0.1)
    state = adam.tensors()
    seen = torch.cat([state[f"exp_avg.{name}"].flatten() for name in trained]) / (1 - recipe.betas[0])
    assert float(seen.norm()) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_gradients_that_are_not_finite_change_nothing(
    bad: float, clip: float | None, dtype: torch.dtype, kind: str
) -> None:
    trained = parameters(dtype)
    weights, adam, _ = optimizer(trained, clip=clip, kind=kind)
    give_gradients(trained, 0)
    weights.collect_gradients()
    adam.step(0.01)
    before, state = copies(trained), copies(adam.tensors())
    give_gradients(trained, 1)
    trained["bank"].grad[1, 0, 2] = bad
    weights.collect_gradients()
    assert not math.isfinite(adam.step(0.01))
    assert same(before, copies(trained))
    assert same(state, copies(adam.tensors()))
    # The next step is as if the bad one had not been: nothing of it is left in a gradient.
    assert all(master.grad is None for master in weights.masters.values())
    give_gradients(trained, 2)
    weights.collect_gradients()
    assert math.isfinite(adam.step(0.01))
    assert not same(before, copies(trained))


def test_a_step_without_gradients_changes_nothing() -> None:
    trained = parameters(BF16)
    before = copies(trained)
    weights, adam, _ = optimizer(trained, weight_decay=0.5)
    weights.collect_gradients()
    assert adam.step(0.1) == 0
    assert same(before, copies(trained))


# Going on


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_a_restored_optimizer_goes_on_to_the_same_bits(dtype: torch.dtype, kind: str) -> None:
    def steps(trained: dict[str, nn.Parameter], adam: Optimizer, weights: TrainedWeights, r: range) -> None:
        for seed in r:
            give_gradients(trained, seed)
            if seed % 2:  # a parameter that is not reached at some steps
                trained["scale"].grad = None
            weights.collect_gradients()
            adam.step(0.01 / (seed + 1))

    trained = parameters(dtype)
    weights, adam, _ = optimizer(trained, kind=kind)
    steps(trained, adam, weights, range(3))
    kept = copies(adam.tensors())
    assert all(tensor.dtype == FP32 for tensor in kept.values())
    steps(trained, adam, weights, range(3, 7))

    other = {name: nn.Parameter(torch.zeros_like(p)) for name, p in trained.items()}
    again, adam_again, _ = optimizer(other, kind=kind)
    adam_again.restore(kept)
    steps(other, adam_again, again, range(3, 7))
    assert same(copies(trained), copies(other))
    assert same(copies(adam.tensors()), copies(adam_again.tensors()))


def test_a_state_before_the_first_step_restores_too() -> None:
    trained = parameters(BF16)
    weights, adam, _ = optimizer(trained)
    kept = copies(adam.tensors())
    assert set(kept) == {f"master.{name}" for name in trained}
    other = {name: nn.Parameter(torch.zeros_like(p)) for name, p in trained.items()}
    again, adam_again, _ = optimizer(other)
    adam_again.restore(kept)
    assert same(copies(trained), copies(other))
    for those, its, mine in ((trained, weights, adam), (other, again, adam_again)):
        give_gradients(those, 0)
        its.collect_gradients()
        mine.step(0.01)
    assert same(copies(trained), copies(other))


@pytest.mark.parametrize("change", ["missing", "misshapen"])
def test_a_state_of_another_model_is_refused_before_anything_changes(change: str) -> None:
    weights, adam, _ = optimizer(parameters(FP32))
    held = {name: tensor.clone() for name, tensor in adam.tensors().items()}
    if change == "missing":
        del held["master.bank"]
    else:
        held["master.bank"] = torch.zeros(4)  # would broadcast
    before = {name: master.detach().clone() for name, master in weights.masters.items()}
    with pytest.raises(CheckpointError, match=r"for bank; it takes shape \[2, 3, 4\]"):
        adam.restore(held)
    assert all(torch.equal(before[name], master) for name, master in weights.masters.items())
