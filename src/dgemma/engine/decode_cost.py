"""Which way of writing is cheaper: a few refined canvases, or one forward per token?

A roofline in its simplest form: a forward takes as long as its arithmetic or its memory traffic, whichever
is slower. The machine's two numbers are rough, and only their ratio matters.
"""

from __future__ import annotations

from dataclasses import dataclass

from dgemma.model.linear import ExpertLinear, Linear
from dgemma.model.transformer import Transformer

# Denoise steps that a canvas is expected to take: 12 to 16 are typical for the released model.
EXPECTED_STEPS = 14


@dataclass(frozen=True)
class Roof:
    """What a kind of machine does in a second."""

    flops: float
    bytes: float

    def seconds(self, flops: float, num_bytes: float) -> float:
        return max(flops / self.flops, num_bytes / self.bytes)


ROOFS = {
    "cpu": Roof(flops=1e12, bytes=2e10),
    "cuda": Roof(flops=2e14, bytes=2e12),
    "mps": Roof(flops=2e13, bytes=4e11),
}


def forward_seconds(stack: Transformer, roof: Roof, num_tokens: int, *, with_soft: bool) -> float:
    """A forward of one row's `num_tokens` tokens, context left out: both ways read it alike."""
    config = stack.config
    flops, num_bytes = 0.0, 0.0
    # Every token picks its own experts: which share of them is read at all.
    used = config.experts_per_token / config.num_experts
    touched = 1 - (1 - used) ** num_tokens
    for weight in stack.modules():
        if isinstance(weight, ExpertLinear):
            size = weight.num_experts * weight.in_features * weight.out_features
            flops += 2 * num_tokens * size * used
            num_bytes += weight.nbytes * touched
        elif isinstance(weight, Linear):
            # The embedding is the head, and mixes the next step's soft embedding.
            reads = 2 if weight is stack.embedding and with_soft else 1
            flops += 2 * num_tokens * weight.in_features * weight.out_features * reads
            num_bytes += weight.nbytes * reads
    return roof.seconds(flops, num_bytes)


def cheaper_decode(stack: Transformer, device_type: str, max_tokens: int) -> str:
    """ "diffuse" or "causal", for an answer of `max_tokens` tokens."""
    roof = ROOFS.get(device_type, ROOFS["cpu"])
    canvas_len = stack.config.canvas_len
    canvases = -(-max_tokens // canvas_len)
    diffuse = canvases * EXPECTED_STEPS * forward_seconds(stack, roof, canvas_len, with_soft=True)
    causal = max_tokens * forward_seconds(stack, roof, 1, with_soft=False)
    return "causal" if causal < diffuse else "diffuse"
