"""How the previous step's guess enters the next one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dgemma.model.config import ModelConfig
from dgemma.model.gated_mlp import GatedMlp
from dgemma.model.norm import RmsNorm, rms_norm


class SelfConditioning(nn.Module):
    """Adds a processed soft embedding to the canvas embedding, then norms the sum (no weight)."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.norm = RmsNorm(config.hidden_size, config.norm_eps, dtype=dtype, device=device)
        self.mlp = GatedMlp(config.hidden_size, config.mlp_size, dtype=dtype, device=device)

    def forward(self, embedded: Tensor, soft: Tensor | None) -> Tensor:
        """`soft` [rows, canvas, hidden]; None stands for zeros, whose term is exactly zero."""
        if soft is not None:
            embedded = embedded + self.mlp(self.norm(soft))
        return rms_norm(embedded, None, self.eps)
