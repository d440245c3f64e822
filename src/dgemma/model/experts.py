"""The mixture of experts: a router, and grouped work over tokens sorted by expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dgemma.model.config import ModelConfig
from dgemma.model.dispatch import collect, route_in_blocks, route_sorted, spread
from dgemma.model.execution import Execution
from dgemma.model.gated_mlp import gated_gelu
from dgemma.model.norm import rms_norm
from dgemma.model.weight import Matrix, MatrixBank, PlainBank, PlainMatrix

# Shapes: n = tokens of all rows, k = experts per token, pairs = n * k.

# Tokens routed at once. It bounds the sorted copies (pairs x hidden) when 64 canvases share a
# forward; at this count an expert of the released model already has 256 rows.
MAX_TOKENS_AT_ONCE = 4096


class Router(nn.Module):
    """Chooses k experts per token. It reads the raw residual, and norms it itself."""

    scores: Matrix

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.num_chosen = config.experts_per_token
        self.shrink = config.hidden_size**-0.5
        self.scores = PlainMatrix(config.num_experts, config.hidden_size, dtype=dtype, device=device)
        self.scale = nn.Parameter(
            torch.empty(config.hidden_size, dtype=dtype, device=device), requires_grad=False
        )
        self.expert_scale = nn.Parameter(
            torch.empty(config.num_experts, dtype=dtype, device=device), requires_grad=False
        )

    def forward(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 weights [..., k] and expert numbers [..., k] for `residual` [..., hidden]."""
        x = rms_norm(residual, None, self.eps) * self.scale * self.shrink
        probabilities = self.scores.multiply(x).softmax(-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.num_chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.expert_scale[chosen], chosen


class Experts(nn.Module):
    """Many small gated MLPs, of which each token visits k.

    Three forms with the same result. `grouped` is one product for all experts and reads nothing back
    from the device. `by_expert` reads the group sizes back and runs expert after expert, which is what
    the exact way needs, and the plain twin of the others. At inference both are equally fast on a CPU,
    and padding the groups to one size is not faster (benchmarks/results/*-expert_forms.json).
    `in_blocks` pads each group to whole blocks and has fixed shapes: small models train with it, see
    `Execution.expert_block`.
    """

    gate_up: MatrixBank
    down: MatrixBank

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        count, hidden, width = config.num_experts, config.hidden_size, config.expert_size
        self.gate_up = PlainBank(count, 2 * width, hidden, dtype=dtype, device=device)
        self.down = PlainBank(count, hidden, width, dtype=dtype, device=device)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, execution: Execution) -> Tensor:
        """The weighted answers of each token's experts [n, hidden], for `x` [n, hidden].

        `chosen` and `weights` [n, k] are the router's. The exact way runs every product on exactly
        `expert_tile` rows, which makes a row's bits independent of its company.
        """
        if execution.expert_block is not None and not execution.exact:
            route = route_in_blocks(chosen, self.gate_up.num_experts, execution.expert_block)
            blocks = self.in_blocks(spread(x, route), route.expert_of_block)
            return collect(blocks, weights, route)
        answers = []
        parts = zip(*(t.split(MAX_TOKENS_AT_ONCE) for t in (x, chosen, weights)), strict=True)
        for part, wanted, shares in parts:
            expert_of_pair, route = route_sorted(wanted)
            sorted_x = spread(part, route)  # [pairs, hidden]
            if execution.grouped_experts and not execution.exact:
                sorted_y = self.grouped(sorted_x, expert_of_pair)
            else:
                tile = execution.expert_tile if execution.exact else None
                sorted_y = self.by_expert(sorted_x, expert_of_pair, tile)
            answers.append(collect(sorted_y, shares, route))
        return answers[0] if len(answers) == 1 else torch.cat(answers)

    def in_blocks(self, x: Tensor, expert_of_block: Tensor) -> Tensor:
        blocks = x.unflatten(0, (len(expert_of_block), -1))
        gate, up = self.gate_up.multiply_blocks(blocks, expert_of_block).chunk(2, dim=-1)
        return self.down.multiply_blocks(gated_gelu(gate, up), expert_of_block).flatten(0, 1)

    def grouped(self, x: Tensor, expert_of_pair: Tensor) -> Tensor:
        every_expert = torch.arange(self.gate_up.num_experts, device=x.device)
        ends = torch.searchsorted(expert_of_pair, every_expert, right=True).to(torch.int32)
        gate, up = self.gate_up.multiply_grouped(x, ends).chunk(2, dim=-1)
        return self.down.multiply_grouped(gated_gelu(gate, up), ends)

    def by_expert(self, x: Tensor, expert_of_pair: Tensor, tile: int | None) -> Tensor:
        counts = torch.bincount(expert_of_pair, minlength=self.gate_up.num_experts).tolist()
        answers = []
        for expert, group in enumerate(x.split(counts)):
            if tile is None:
                if len(group):
                    answers.append(self._one(expert, group))
                continue
            for rows in group.split(tile):
                if len(rows):
                    padded = nn.functional.pad(rows, (0, 0, 0, tile - len(rows)))
                    answers.append(self._one(expert, padded)[: len(rows)])
        return torch.cat(answers)

    def _one(self, expert: int, x: Tensor) -> Tensor:
        gate, up = self.gate_up.multiply(expert, x).chunk(2, dim=-1)
        return self.down.multiply(expert, gated_gelu(gate, up))
