"""The mixture of experts (MoE): router, dispatch of tokens to experts, and the experts themselves.

The router chooses k experts per token. Dispatch copies each token to one slot per chosen expert, with slots
sorted by expert, and combines the results again. Dispatch and combine are gathers, forward and backward: each
uses the other's inverse permutation. torch would make the backward of a gather a scatter-add, which is slow
on a CPU and not deterministic on an accelerator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dgemma.kernels.elementwise import kernels_for
from dgemma.model.config import ModelConfig
from dgemma.model.execution import Execution
from dgemma.model.layers import gated_gelu, rms_norm
from dgemma.model.linear import ExpertLinear, Linear, PlainExpertLinear, PlainLinear
from dgemma.model.model_part import ModelPart
from dgemma.model.ranks import ALONE, Ranks

# Shapes: n = tokens of all rows, k = experts per token, pairs = n * k (token, expert) pairs,
# slots = pairs sorted by expert, with padding.

# Tokens dispatched at once. It bounds the sorted copies (pairs x hidden) when 64 canvases share a
# forward; at this count an expert of the released model already has 256 rows.
MAX_TOKENS_AT_ONCE = 4096


class Router(nn.Module):
    """Chooses k experts per token. It reads the raw residual and applies its own norm."""

    scores: Linear

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.num_chosen = config.experts_per_token
        self.shrink = config.hidden_size**-0.5
        self.scores = PlainLinear(config.num_experts, config.hidden_size, dtype=dtype, device=device)
        self.scale = nn.Parameter(
            torch.empty(config.hidden_size, dtype=dtype, device=device), requires_grad=False
        )
        self.expert_scale = nn.Parameter(
            torch.empty(config.num_experts, dtype=dtype, device=device), requires_grad=False
        )

    def forward(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 routing weights [..., k] and expert indices [..., k] for `residual` [..., hidden]."""
        x = rms_norm(residual, None, self.eps) * self.scale * self.shrink
        probabilities = self.scores.multiply(x).softmax(-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.num_chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.expert_scale[chosen], chosen


class Experts(nn.Module):
    """Many small gated MLPs, of which each token uses k.

    Three implementations with the same result. `grouped` is one grouped matrix product for all experts and
    reads nothing back from the device. `by_expert` reads the group sizes back and runs one expert after the
    other; exact execution needs it, and it is the reference implementation of the others. At inference both
    are equally fast on a CPU, and padding the groups to one size is not faster
    (benchmarks/results/*-expert_forms.json). `in_blocks` pads each group to whole blocks and has fixed
    shapes: small models train with it, see `Execution.expert_block`.

    A rank holds the experts `part.experts`. Pairs of other ranks' experts are sorted behind its own and have
    no share in its sum; the ranks' sums are added up.
    """

    gate_up: ExpertLinear
    down: ExpertLinear

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        part: ModelPart | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.own = slice(0, config.num_experts) if part is None else part.experts
        count, hidden, width = self.own.stop - self.own.start, config.hidden_size, config.expert_size
        self.gate_up = PlainExpertLinear(count, 2 * width, hidden, dtype=dtype, device=device)
        self.down = PlainExpertLinear(count, hidden, width, dtype=dtype, device=device)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, execution: Execution) -> Tensor:
        """The weighted sum of each token's expert outputs [n, hidden], for `x` [n, hidden].

        `chosen` and `weights` [n, k] are the router's. Exact execution makes a row's bits independent of
        the rest of the batch: by products that are so themselves, else on exactly `expert_tile` rows each.
        """
        if self.ranks.size > 1:
            is_own = (chosen >= self.own.start) & (chosen < self.own.stop)
            chosen = torch.where(is_own, chosen - self.own.start, self.gate_up.num_experts)
            weights = torch.where(is_own, weights, 0.0)
        elif execution.expert_block is not None and not execution.exact:
            route = sort_in_blocks(chosen, self.gate_up.num_experts, execution.expert_block)
            blocks = self.in_blocks(dispatch(x, route), route.expert_of_block)
            return combine(blocks, weights, route)
        outputs = []
        chunks = zip(*(t.split(MAX_TOKENS_AT_ONCE) for t in (x, chosen, weights)), strict=True)
        for chunk, chunk_chosen, chunk_weights in chunks:
            expert_of_pair, route = sort_by_expert(chunk_chosen)
            sorted_x = dispatch(chunk, route)  # [pairs, hidden]
            if execution.grouped_experts and not execution.exact:
                sorted_y = self.grouped(sorted_x, expert_of_pair)
            else:
                tile = execution.expert_tile if execution.exact else None
                exact_y = None if tile is None else self.grouped_exact(sorted_x, expert_of_pair, tile)
                sorted_y = self.by_expert(sorted_x, expert_of_pair, tile) if exact_y is None else exact_y
            if self.ranks.size > 1:  # rows past the own experts' hold anything: none of them computed these
                sorted_y = torch.where((expert_of_pair < self.gate_up.num_experts)[:, None], sorted_y, 0.0)
            outputs.append(combine(sorted_y, chunk_weights, route))
        return self.ranks.sum(outputs[0] if len(outputs) == 1 else torch.cat(outputs))

    def in_blocks(self, x: Tensor, expert_of_block: Tensor) -> Tensor:
        blocks = x.unflatten(0, (len(expert_of_block), -1))
        gate, up = self.gate_up.multiply_blocks(blocks, expert_of_block).chunk(2, dim=-1)
        return self.down.multiply_blocks(gated_gelu(gate, up), expert_of_block).flatten(0, 1)

    def grouped_exact(self, x: Tensor, expert_of_pair: Tensor, tile: int) -> Tensor | None:
        """`grouped`, if there are products whose rows do not depend on each other; else None."""
        ends = self._ends(expert_of_pair)
        gate_up = self.gate_up.multiply_exact(x, ends)
        if gate_up is None:
            return None
        if kernels_for(gate_up) is not None:  # a row's bits do not depend on the others
            return self.down.multiply_exact(gated_gelu(*gate_up.chunk(2, dim=-1)), ends)
        # One tile of fixed shape at a time: the vector tails of torch's functions depend on the count.
        tiles = nn.functional.pad(gate_up, (0, 0, 0, -len(x) % tile)).split(tile)
        gated = torch.cat([gated_gelu(*part.chunk(2, dim=-1)) for part in tiles])
        return self.down.multiply_exact(gated[: len(x)], ends)

    def _ends(self, expert_of_pair: Tensor) -> Tensor:
        every_expert = torch.arange(self.gate_up.num_experts, device=expert_of_pair.device)
        return torch.searchsorted(expert_of_pair, every_expert, right=True).to(torch.int32)

    def grouped(self, x: Tensor, expert_of_pair: Tensor) -> Tensor:
        ends = self._ends(expert_of_pair)
        gate, up = self.gate_up.multiply_grouped(x, ends).chunk(2, dim=-1)
        return self.down.multiply_grouped(gated_gelu(gate, up), ends)

    def by_expert(self, x: Tensor, expert_of_pair: Tensor, tile: int | None) -> Tensor:
        counts = torch.bincount(expert_of_pair, minlength=self.gate_up.num_experts).tolist()
        outputs = []
        for expert, group in enumerate(x.split(counts)):
            if expert == self.gate_up.num_experts:  # of other ranks
                outputs.append(torch.zeros_like(group))
                continue
            if tile is None:
                if len(group):
                    outputs.append(self._run_expert(expert, group))
                continue
            for rows in group.split(tile):
                if len(rows):
                    padded = nn.functional.pad(rows, (0, 0, 0, tile - len(rows)))
                    outputs.append(self._run_expert(expert, padded)[: len(rows)])
        return torch.cat(outputs)

    def _run_expert(self, expert: int, x: Tensor) -> Tensor:
        gate, up = self.gate_up.multiply(expert, x).chunk(2, dim=-1)
        return self.down.multiply(expert, gated_gelu(gate, up))


@dataclass(frozen=True)
class Route:
    """Which token is in which slot."""

    token_of_slot: Tensor  # [slots]; any token where the slot is padding
    slot_of_pair: Tensor  # [n, k]
    # Where slots are padded to whole blocks of one expert:
    pair_of_slot: Tensor  # [slots]; any pair where the slot is padding
    is_padding: Tensor | None  # [slots]
    expert_of_block: Tensor  # [blocks]; empty where there are no blocks


def sort_by_expert(chosen: Tensor) -> tuple[Tensor, Route]:
    """Sort the pairs of `chosen` [n, k] by expert -> the expert of each slot [pairs], and the route."""
    expert_of_slot, order = chosen.flatten().sort(stable=True)
    pair = torch.arange(order.shape[0], device=order.device)
    slot_of_pair = torch.empty_like(order).scatter_(0, order, pair).view_as(chosen)
    return expert_of_slot, Route(order // chosen.shape[-1], slot_of_pair, order, None, order[:0])


def sort_in_blocks(chosen: Tensor, num_experts: int, block: int) -> Route:
    """The same with each expert's slots padded to whole blocks; the block count depends on shapes only."""
    n, k = chosen.shape
    device = chosen.device
    expert_of_pair, order = chosen.flatten().sort(stable=True)
    every = torch.arange(num_experts, device=device)
    ends = torch.searchsorted(expert_of_pair, every, right=True)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    blocks = (counts + block - 1) // block
    block_ends = blocks.cumsum(0)
    # Offset of an expert's slots from its sorted pairs, due to the padding of earlier experts.
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


def dispatch(x: Tensor, route: Route) -> Tensor:
    """Copy each token to the slots of its experts: [n, hidden] -> [slots, hidden]."""
    return _run(_Dispatch, x, route.token_of_slot, route.slot_of_pair)


def combine(outputs: Tensor, weights: Tensor, route: Route) -> Tensor:
    """The sum of each token's expert outputs, weighted, in fp32: [slots, hidden] -> [n, hidden].

    Experts are added in the router's order: the order of the sum does not depend on the batch, and no
    fp32 tensor of size [n, k, hidden] is allocated. `weights` [n, k].
    """
    return _run(_Combine, outputs, weights, route.slot_of_pair, route.pair_of_slot, route.is_padding)


def _run(function: Any, *args: Tensor | None) -> Tensor:
    # Without gradients only the forward runs, so that a compiled graph has nothing else in it.
    result: Tensor = function.apply(*args) if torch.is_grad_enabled() else function.forward(*args)
    return result


class _Dispatch(torch.autograd.Function):
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


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        outputs: Tensor,
        weights: Tensor,
        slot_of_pair: Tensor,
        pair_of_slot: Tensor,
        is_padding: Tensor | None,
    ) -> Tensor:
        kernels = kernels_for(outputs)
        if kernels is not None and weights.dtype == torch.float32:
            return kernels.combine(outputs, weights, slot_of_pair)
        total = outputs.index_select(0, slot_of_pair[:, 0]) * weights[:, :1]
        for rank in range(1, slot_of_pair.shape[1]):
            total = total + outputs.index_select(0, slot_of_pair[:, rank]) * weights[:, rank : rank + 1]
        return total.to(outputs.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        outputs, weights, slot_of_pair, pair_of_slot, is_padding = inputs
        ctx.padded = is_padding is not None
        kept = (outputs, weights, slot_of_pair, pair_of_slot)
        ctx.save_for_backward(*kept, *((is_padding,) if ctx.padded else ()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        outputs, weights, slot_of_pair, pair_of_slot, *padding = ctx.saved_tensors
        grad = grads[0].float()
        share = weights.flatten().index_select(0, pair_of_slot)
        if ctx.padded:
            share = torch.where(padding[0], torch.zeros_like(share), share)
        for_slots = grad.index_select(0, pair_of_slot // weights.shape[1]) * share[:, None]
        for_weights = [
            (outputs.index_select(0, slot_of_pair[:, rank]) * grad).sum(-1)
            for rank in range(weights.shape[1])
        ]
        return for_slots.to(outputs.dtype), torch.stack(for_weights, 1), None, None, None
