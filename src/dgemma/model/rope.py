"""Rotary positions, one table per layer kind and forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dgemma.model.config import LayerKind, ModelConfig

# Shapes: rows = sequences of the batch, tokens = positions computed now, dim = head size.


def inverse_frequencies(head_dim: int, theta: float, rotated_share: float) -> Tensor:
    """Angle per position for each half-dimension; the part that does not rotate has zeros."""
    num_angles = int(rotated_share * head_dim // 2)
    exponents = torch.arange(0, 2 * num_angles, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / theta**exponents
    return torch.nn.functional.pad(frequencies, (0, head_dim // 2 - num_angles))  # [dim / 2]


class Rope(nn.Module):
    """Cosine and sine tables of all layer kinds.

    The frequencies stay fp32 whatever the model's dtype, and are made on the CPU on every device,
    because `pow` differs in its last bits between devices.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__()
        # MKL sets its vector functions up at their first call. If two threads make that call at once, one
        # may compute with four digits (seen in one process of twenty); one number is one thread.
        torch.ones(1).cos()
        for kind in config.kinds:
            shape = config.rope[kind]
            frequencies = inverse_frequencies(config.head_dim(kind), shape.theta, shape.rotated_share)
            if device.type != "meta":
                frequencies = frequencies.to(device)
            self.register_buffer(kind.value, frequencies, persistent=False)

    def forward(self, positions: Tensor, kind: LayerKind, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tables [rows, tokens, 1, dim] for `positions` [rows, tokens]."""
        angles = positions[..., None].float() * self.get_buffer(kind.value)
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of `x` [rows, tokens, heads, dim]: first half against second half."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
