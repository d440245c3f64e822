"""Tokens reach their experts and come back the same, whatever the form; backward is forward's inverse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dgemma.model import moe
from dgemma.model.execution import Execution
from dgemma.model.linear import ExpertLinear, PlainExpertLinear
from dgemma.model.moe import (
    MAX_TOKENS_AT_ONCE,
    Experts,
    Route,
    combine,
    dispatch,
    sort_by_expert,
    sort_in_blocks,
)
from oracle import CASES, make_oracle, make_ours

FORMS = {
    "by expert": Execution(grouped_experts=False),
    "grouped": Execution(),
    "blocks of 4": Execution(expert_block=4),
    "blocks of 64": Execution(expert_block=64),
}


def routes(chosen: Tensor, num_experts: int, block: int) -> list[Route]:
    return [sort_by_expert(chosen)[1], sort_in_blocks(chosen, num_experts, block)]


def random_choice(n: int, k: int, num_experts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, num_experts, generator=generator).topk(k).indices


@given(st.integers(1, 40), st.integers(1, 3), st.integers(3, 9), st.integers(1, 20), st.integers(0, 1 << 30))
def test_every_pair_has_its_own_slot_in_a_block_of_its_expert(
    n: int, k: int, num_experts: int, block: int, seed: int
) -> None:
    chosen = random_choice(n, k, num_experts, seed)
    route = sort_in_blocks(chosen, num_experts, block)
    slots = route.slot_of_pair.flatten()
    assert len(set(slots.tolist())) == n * k
    assert torch.equal(route.expert_of_block[slots // block], chosen.flatten())
    assert torch.equal(route.pair_of_slot[slots], torch.arange(n * k))
    assert torch.equal(route.token_of_slot[slots], torch.arange(n * k) // k)
    assert (~route.is_padding).sum() == n * k
    assert not route.is_padding[slots].any()
    assert torch.equal(route.expert_of_block, route.expert_of_block.sort().values)
    assert len(route.token_of_slot) == (n * k // block + num_experts) * block  # known from shapes alone


@pytest.mark.parametrize("which", [0, 1])
def test_gradients_of_spread_and_collect_are_those_of_plain_indexing(which: int) -> None:
    chosen = random_choice(17, 3, 5, seed=1)
    route = routes(chosen, 5, block=4)[which]
    x = torch.randn(17, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(17, 3, dtype=torch.float64, requires_grad=True)
    out = torch.randn(17, 6, dtype=torch.float64)
    experts = torch.randn(len(route.token_of_slot), 6, dtype=torch.float64)  # each slot has its own

    def plainly() -> Tensor:
        rows = x[route.token_of_slot] ** 2 * experts
        return (rows[route.slot_of_pair] * weights[..., None]).sum(1)

    ours = combine(dispatch(x, route) ** 2 * experts, weights, route)
    torch.testing.assert_close(ours, plainly())
    expected = torch.autograd.grad((plainly() * out).sum(), [x, weights])
    # Sums run in fp32.
    torch.testing.assert_close(
        torch.autograd.grad((ours * out).sum(), [x, weights]), expected, atol=1e-5, rtol=1e-5
    )


def experts_of(case: int = 0) -> Experts:
    experts: Experts = make_ours(make_oracle(CASES[case])).transformer.layers[0].experts
    experts.requires_grad_(True)
    return experts


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("skewed", [False, True])
def test_expert_kernels_agree_with_the_reference_in_value_and_gradient(form: str, skewed: bool) -> None:
    chosen = random_choice(50, 2, 8, seed=3)
    if skewed:  # all tokens to two experts, six get none
        chosen = torch.tensor([6, 1]).expand(50, 2)
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(50, 32, generator=generator), torch.rand(50, 2, generator=generator)

    def run(execution: Execution) -> list[Tensor]:
        experts = experts_of()
        inputs = [x.clone().requires_grad_(True), weights.clone().requires_grad_(True)]
        y = experts(inputs[0], chosen, inputs[1], execution)
        y.sin().sum().backward()
        tensors = (*inputs, *experts.parameters())
        return [y.detach(), *(t.grad for t in tensors if t.grad is not None)]

    ours, plain = run(FORMS[form]), run(FORMS["by expert"])
    assert len(ours) == len(plain) == 5
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("without", ["", "kernels", "exact products"])
@pytest.mark.parametrize("count", [50, MAX_TOKENS_AT_ONCE + 3])
def test_exact_experts_give_a_row_the_same_bits_in_any_company(
    without: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the processor has no kernels, or no products whose rows are independent."""
    if without == "kernels":
        monkeypatch.setattr(moe, "kernels_for", lambda x: None)
    if without == "exact products":
        monkeypatch.setattr(PlainExpertLinear, "multiply_exact", lambda *_: None)
    chosen = random_choice(count, 2, 8, seed=3)
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(count, 32, generator=generator), torch.rand(count, 2, generator=generator)
    experts, exact = experts_of(), Execution(exact=True)
    whole = experts(x, chosen, weights, exact)
    torch.testing.assert_close(whole, experts(x, chosen, weights, FORMS["by expert"]), atol=1e-5, rtol=1e-5)
    for rows in (slice(0, 1), slice(7, 20), slice(count - 9, count)):
        assert torch.equal(experts(x[rows], chosen[rows], weights[rows], exact), whole[rows])
    in_blocks = Execution(exact=True, expert_block=4)  # exact execution never uses blocks
    assert torch.equal(experts(x, chosen, weights, in_blocks), whole)


@torch.no_grad()
def test_only_the_grouped_form_uses_the_grouped_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every backend has it."""
    experts, chosen = experts_of(), random_choice(9, 2, 8, seed=3)
    x, weights = torch.randn(9, 32), torch.rand(9, 2)
    counts = dict.fromkeys(FORMS, 0)

    def count(self: PlainExpertLinear, x: Tensor, ends: Tensor) -> Tensor:
        counts[form] += 1
        return original(self, x, ends)

    original = PlainExpertLinear.multiply_grouped
    monkeypatch.setattr(PlainExpertLinear, "multiply_grouped", count)
    for form, execution in (FORMS | {"exact": Execution(exact=True)}).items():
        counts.setdefault(form, 0)
        experts(x, chosen, weights, execution)
    assert {form: n for form, n in counts.items() if n} == {"grouped": 2}


def test_a_bank_without_blocks_of_its_own_uses_its_grouped_product() -> None:
    experts_linear = experts_of().gate_up
    x = torch.randn(3, 4, 32)
    expert_of_block = torch.tensor([1, 1, 5])
    torch.testing.assert_close(
        ExpertLinear.multiply_blocks(experts_linear, x, expert_of_block),
        experts_linear.multiply_blocks(x, expert_of_block),
    )
