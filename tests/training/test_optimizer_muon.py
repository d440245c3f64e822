"""Muon moves a matrix as torch's does, the matrices of a bank one by one, and all directions equally far."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dgemma.errors import InputError
from dgemma.model.transformer import Transformer
from dgemma.training.optimizer import (
    Muon,
    Optimizer,
    TrainedWeights,
    is_orthogonalized,
    orthogonalize,
    state_bytes,
)
from dgemma.training.recipe import DataRecipe, OptimizerRecipe, Recipe
from oracle import CASES, make_oracle, make_ours


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(16, 16), (24, 16), (16, 40)])
def test_a_matrix_moves_as_torchs_muon_moves_it(shape: tuple[int, int]) -> None:
    ours, theirs = nn.Parameter(random(*shape)), nn.Parameter(random(*shape))
    mine = Muon([ours], lr=0.02, momentum=0.9, weight_decay=0.1)
    plain = torch.optim.Muon(
        [theirs], lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for seed in range(1, 6):
        ours.grad, theirs.grad = random(*shape, seed=seed), random(*shape, seed=seed)
        mine.step()
        plain.step()
    moved = float((theirs.detach() - random(*shape)).norm())
    assert float((ours - theirs).detach().norm()) < 0.01 * moved  # both round to bfloat16, in another order


def test_a_bank_moves_as_its_matrices_would_alone_whatever_else_has_their_shape() -> None:
    bank, other = nn.Parameter(random(3, 8, 12)), nn.Parameter(random(12, 8, seed=7))
    alone = [nn.Parameter(matrix.clone()) for matrix in bank.detach()]
    together = Muon([other, bank], lr=0.02, momentum=0.95, weight_decay=0.0)
    rules = [Muon([matrix], lr=0.02, momentum=0.95, weight_decay=0.0) for matrix in alone]
    for seed in range(3):
        bank.grad, other.grad = random(3, 8, 12, seed=seed), random(12, 8, seed=seed)
        together.step()
        for number, (matrix, rule) in enumerate(zip(alone, rules, strict=True)):
            matrix.grad = random(3, 8, 12, seed=seed)[number]
            rule.step()
    torch.testing.assert_close(bank.detach(), torch.stack(alone).detach(), atol=2e-4, rtol=0)


def test_every_direction_gets_a_like_length() -> None:
    """Singular values a thousandfold apart end within a factor of two."""
    left, right = torch.linalg.qr(random(16, 16)).Q, torch.linalg.qr(random(32, 16, seed=1)).Q
    skewed = left @ torch.diag(torch.logspace(0, -2, 16)) @ right.mT
    lengths = torch.linalg.svdvals(orthogonalize(skewed[None])[0])
    assert 0.6 < float(lengths.min()) <= float(lengths.max()) < 1.3


def test_an_update_has_the_size_of_adams() -> None:
    weight = nn.Parameter(torch.zeros(64, 32))
    weight.grad = random(64, 32)
    Muon([weight], lr=1.0, momentum=0.0, weight_decay=0.0).step()
    assert float(weight.detach().pow(2).mean().sqrt()) == pytest.approx(0.2, rel=0.2)


def test_gradients_of_nothing_move_nothing() -> None:
    weight = nn.Parameter(random(4, 4))
    weight.grad = torch.zeros(4, 4)
    Muon([weight], lr=1.0, momentum=0.9, weight_decay=0.0).step()
    assert torch.equal(weight, random(4, 4))


def test_it_takes_the_matrices_and_adam_the_rest() -> None:
    stack: Transformer = make_ours(make_oracle(CASES[0])).transformer
    taken = {name for name, p in stack.named_parameters() if is_orthogonalized(name, p)}
    assert {"layers.0.attention.query.weight", "layers.0.experts.down.weight"} <= taken
    assert {"layers.0.mlp.gate.weight", "self_conditioning.mlp.up.weight"} <= taken
    left = {name for name, p in stack.named_parameters() if p.ndim > 1} - taken
    assert left == {
        "embedding.weight",
        *(f"layers.{n}.router.scores.weight" for n in range(len(stack.layers))),
    }
    weights = TrainedWeights(dict(stack.named_parameters()))
    optimizer = Optimizer(weights, OptimizerRecipe(kind="muon"))
    for parameter in stack.parameters():
        parameter.grad = torch.ones_like(parameter)
    weights.collect_gradients()
    optimizer.step(1e-3)
    held = optimizer.tensors()
    assert {name for name in weights.masters if f"momentum.{name}" in held} == taken
    assert {name for name in weights.masters if f"exp_avg.{name}" in held} == set(weights.masters) - taken
    moments = [value for key, value in held.items() if not key.startswith(("master.", "step."))]
    assert state_bytes(weights, OptimizerRecipe(kind="muon")) == sum(value.nbytes for value in moments)


def test_it_is_refused_for_adapters() -> None:
    data = DataRecipe(records=[{"tokens": [1, 2]}])
    with pytest.raises(InputError, match=r"optimizer\.kind is 'muon' with train 'lora'.*train: all"):
        Recipe(model="m", out="o", data=data, optimizer=OptimizerRecipe(kind="muon"))
    Recipe(model="m", out="o", data=data, train="all", optimizer=OptimizerRecipe(kind="muon"))
