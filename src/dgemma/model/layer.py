"""One transformer layer: attention, the shared MLP and the experts side by side."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dgemma.model.attention import Attend, Attention, Past
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


LayerInput = tuple[Tensor, Past, Past, ForwardPlan]
"""The residual [rows, tokens, hidden], past keys and values, and how to go about it."""


class _Middle(NamedTuple):
    """A part between attention and experts."""

    x: Tensor
    shared: Tensor
    routed: tuple[Tensor, ...]  # what the experts take: inputs, chosen, weights
    key: Tensor
    value: Tensor


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
        self, x: Tensor, past_k: Past, past_v: Past, plan: ForwardPlan
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> the new residual [rows, tokens, hidden], and the keys and values computed on the way."""
        return self.forward_all([(x, past_k, past_v, plan)])[0]

    def forward_all(self, parts: Sequence[LayerInput]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Parts of one forward, each through its own door. Their tokens visit the experts together, which
        are most of the weights: they are read once."""
        seen = [self._until_experts(*part) for part in parts]
        inputs = [
            torch.cat([t.flatten(0, 1) for t in kind]) for kind in zip(*(s.routed for s in seen), strict=True)
        ]
        answers = self.experts(*inputs, parts[0][3].execution).split(
            [s.x.shape[0] * s.x.shape[1] for s in seen]
        )
        results = []
        for part, middle, answer in zip(parts, seen, answers, strict=True):
            plan = part[3]
            x = by_block(plan.block, self._after, middle.x, middle.shared, answer.view_as(middle.x))
            results.append((x * self.get_buffer(f"{plan.door.value}_scalar"), middle.key, middle.value))
        return results

    def _until_experts(self, x: Tensor, past_k: Past, past_v: Past, plan: ForwardPlan) -> _Middle:
        cos, sin = plan.rope[self.kind]
        query, key, value = by_block(plan.block, self._before, x, cos, sin)
        mixed = plan.attend[self.kind](query, past_k, past_v, key, value).flatten(2)
        x, shared, *routed = by_block(plan.block, self._between, x, mixed)
        return _Middle(x, shared, tuple(routed), key, value)

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
