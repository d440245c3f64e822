"""One transformer layer: attention, the shared MLP and the experts side by side."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dgemma.model.attention import Attend, Attention
from dgemma.model.config import LayerKind, LayerShape, ModelConfig
from dgemma.model.execution import Execution, by_block
from dgemma.model.experts import Experts, Router
from dgemma.model.gated_mlp import GatedMlp
from dgemma.model.norm import RmsNorm

# Shapes: rows = sequences, tokens = computed now, k = experts per token.


class Door(enum.Enum):
    ENCODE = "encode"
    DENOISE = "denoise"


@dataclass(frozen=True, kw_only=True)
class ForwardPlan:
    """What all layers of one forward share."""

    door: Door
    execution: Execution
    rope: dict[LayerKind, tuple[Tensor, Tensor]]  # [rows, tokens, 1, dim]
    attend: dict[LayerKind, Attend]
    block: int | None  # tokens per block, if blocks are run one by one


class Layer(nn.Module):
    def __init__(
        self, config: ModelConfig, shape: LayerShape, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.kind = shape.kind

        def norm() -> RmsNorm:
            return RmsNorm(config.hidden_size, config.norm_eps, dtype=dtype, device=device)

        self.attention = Attention(config, shape, dtype=dtype, device=device)
        self.mlp = GatedMlp(config.hidden_size, config.mlp_size, dtype=dtype, device=device)
        self.router = Router(config, dtype=dtype, device=device)
        self.experts = Experts(config, dtype=dtype, device=device)
        self.before_attention = norm()
        self.after_attention = norm()
        self.before_mlp = norm()
        self.after_mlp = norm()
        self.before_experts = norm()
        self.after_experts = norm()
        self.after_both = norm()
        # The one thing the two doors do not share.
        for door in Door:
            self.register_buffer(f"{door.value}_scalar", torch.empty(1, dtype=dtype, device=device))

    def forward(
        self, x: Tensor, past_k: Tensor, past_v: Tensor, plan: ForwardPlan
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> the new residual [rows, tokens, hidden], and the keys and values computed on the way."""
        cos, sin = plan.rope[self.kind]
        query, key, value = by_block(plan.block, self._before, x, cos, sin)
        mixed = plan.attend[self.kind](query, past_k, past_v, key, value).flatten(2)
        x, shared, expert_input, chosen, weights = by_block(plan.block, self._between, x, mixed)
        answers = self.experts(
            *(t.flatten(0, 1) for t in (expert_input, chosen, weights)), plan.execution
        ).unflatten(0, x.shape[:2])
        x = by_block(plan.block, self._after, x, shared, answers)
        return x * self.get_buffer(f"{plan.door.value}_scalar"), key, value

    def _before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return self.attention.project(self.before_attention(x), cos, sin)

    def _between(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, ...]:
        x = x + self.after_attention(self.attention.output.multiply(mixed))
        shared = self.after_mlp(self.mlp(self.before_mlp(x)))
        weights, chosen = self.router(x)
        return x, shared, self.before_experts(x), chosen, weights

    def _after(self, x: Tensor, shared: Tensor, answers: Tensor) -> Tensor:
        change: Tensor = self.after_both(shared + self.after_experts(answers))
        return x + change
