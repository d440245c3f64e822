"""How tokens get to their experts and back: each token is copied to a slot for each of its experts.

Both ways are gathers, forward and backward: each knows the other's inverse. torch would make the backward
of a gather a scatter that adds, which is slow on a CPU and not deterministic on an accelerator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Shapes: n = tokens, k = experts per token, pairs = n * k, slots = places for pairs, sorted by expert.


@dataclass(frozen=True)
class Route:
    """Which token stands in which slot."""

    token_of_slot: Tensor  # [slots]; any token where the slot is padding
    slot_of_pair: Tensor  # [n, k]
    # Where slots are padded to whole blocks of one expert:
    pair_of_slot: Tensor  # [slots]; any pair where the slot is padding
    is_padding: Tensor | None  # [slots]
    expert_of_block: Tensor  # [blocks]; empty where there are no blocks


def route_sorted(chosen: Tensor) -> tuple[Tensor, Route]:
    """Slots without padding -> the expert of each slot [pairs], and the route."""
    expert_of_slot, order = chosen.flatten().sort(stable=True)
    pair = torch.arange(order.shape[0], device=order.device)
    slot_of_pair = torch.empty_like(order).scatter_(0, order, pair).view_as(chosen)
    return expert_of_slot, Route(order // chosen.shape[-1], slot_of_pair, order, None, order[:0])


def route_in_blocks(chosen: Tensor, num_experts: int, block: int) -> Route:
    """Each expert's slots padded to whole blocks; the number of blocks depends on the shapes only."""
    n, k = chosen.shape
    device = chosen.device
    expert_of_pair, order = chosen.flatten().sort(stable=True)
    every = torch.arange(num_experts, device=device)
    ends = torch.searchsorted(expert_of_pair, every, right=True)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    blocks = (counts + block - 1) // block
    block_ends = blocks.cumsum(0)
    # An expert's slots begin so far behind where its sorted pairs do.
    shift = (block_ends - blocks) * block - (ends - counts)
    slots = torch.arange(n * k, device=device) + shift[expert_of_pair]
    num_blocks = n * k // block + num_experts
    pair_of_slot = order.new_zeros(num_blocks * block).scatter(0, slots, order)
    is_padding = torch.ones_like(pair_of_slot, dtype=torch.bool).scatter(0, slots, False)
    numbers = torch.arange(num_blocks, device=device)
    return Route(
        token_of_slot=pair_of_slot // k,
        slot_of_pair=torch.empty_like(order).scatter_(0, order, slots).view(n, k),
        pair_of_slot=pair_of_slot,
        is_padding=is_padding,
        expert_of_block=torch.searchsorted(block_ends, numbers, right=True).clamp(max=num_experts - 1),
    )


def spread(x: Tensor, route: Route) -> Tensor:
    """A copy of each token's row for each of its experts: [n, hidden] -> [slots, hidden]."""
    return _run(_Spread, x, route.token_of_slot, route.slot_of_pair)


def collect(answers: Tensor, weights: Tensor, route: Route) -> Tensor:
    """Weigh and sum in fp32 what stands in each token's slots: [slots, hidden] -> [n, hidden].

    One expert after the other: the order of the sum is fixed whatever the batch, and nothing of size
    [n, k, hidden] is ever held in fp32. `weights` [n, k].
    """
    return _run(_Collect, answers, weights, route.slot_of_pair, route.pair_of_slot, route.is_padding)


def select_experts(weight: Tensor, expert_of_block: Tensor) -> Tensor:
    """Each block's expert's weights: [experts, out, in] -> [blocks, out, in]."""
    return _run(_SelectExperts, weight, expert_of_block)


def _run(function: Any, *args: Tensor | None) -> Tensor:
    # Without gradients the function is its forward, and a compiled graph has nothing else in it.
    result: Tensor = function.apply(*args) if torch.is_grad_enabled() else function.forward(*args)
    return result


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, token_of_slot: Tensor, slot_of_pair: Tensor) -> Tensor:
        return x.index_select(0, token_of_slot)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slot_of_pair,) = ctx.saved_tensors
        total = grads[0].index_select(0, slot_of_pair[:, 0]).float()
        for rank in range(1, slot_of_pair.shape[1]):
            total = total + grads[0].index_select(0, slot_of_pair[:, rank])
        return total.to(grads[0].dtype), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        answers: Tensor,
        weights: Tensor,
        slot_of_pair: Tensor,
        pair_of_slot: Tensor,
        is_padding: Tensor | None,
    ) -> Tensor:
        total = answers.index_select(0, slot_of_pair[:, 0]) * weights[:, :1]
        for rank in range(1, slot_of_pair.shape[1]):
            total = total + answers.index_select(0, slot_of_pair[:, rank]) * weights[:, rank : rank + 1]
        return total.to(answers.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        answers, weights, slot_of_pair, pair_of_slot, is_padding = inputs
        ctx.padded = is_padding is not None
        kept = (answers, weights, slot_of_pair, pair_of_slot)
        ctx.save_for_backward(*kept, *((is_padding,) if ctx.padded else ()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        answers, weights, slot_of_pair, pair_of_slot, *padding = ctx.saved_tensors
        grad = grads[0].float()
        share = weights.flatten().index_select(0, pair_of_slot)
        if ctx.padded:
            share = torch.where(padding[0], torch.zeros_like(share), share)
        for_slots = grad.index_select(0, pair_of_slot // weights.shape[1]) * share[:, None]
        for_weights = [
            (answers.index_select(0, slot_of_pair[:, rank]) * grad).sum(-1)
            for rank in range(weights.shape[1])
        ]
        return for_slots.to(answers.dtype), torch.stack(for_weights, 1), None, None, None


class _SelectExperts(torch.autograd.Function):
    @staticmethod
    def forward(weight: Tensor, expert_of_block: Tensor) -> Tensor:
        return weight.index_select(0, expert_of_block)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.num_experts = inputs[0].shape[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (expert_of_block,) = ctx.saved_tensors
        every = torch.arange(ctx.num_experts, device=expert_of_block.device)[:, None]
        # A sum over each expert's blocks as a product: experts / rows of the block's own work.
        belongs = (expert_of_block == every).to(grads[0].dtype)
        return (belongs @ grads[0].flatten(1)).unflatten(1, grads[0].shape[1:]), None
