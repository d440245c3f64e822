"""Which way of writing the causal text is cheaper: canvases that are verified, or one forward per token?

A roofline in its simplest form: a forward takes as long as its arithmetic or its memory traffic, whichever
is slower. The machine's two numbers are rough, and only their ratio matters.
"""

from __future__ import annotations

from dataclasses import dataclass

from dgemma.model.linear import ExpertLinear, Linear
from dgemma.model.transformer import Transformer

# Tokens that are written one by one after a canvas that did not pay: the first time, and at most.
FIRST_PAUSE, MAX_PAUSE = 16, 512


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


@dataclass(frozen=True)
class DecodeCost:
    """Seconds of the three kinds of forward that write causal text."""

    token_s: float  # one token, left to right
    step_s: float  # a step of a canvas
    verify_s: float  # the causal pass over a canvas

    @classmethod
    def of(cls, stack: Transformer, device_type: str) -> DecodeCost:
        roof = ROOFS.get(device_type, ROOFS["cpu"])
        canvas_len = stack.config.canvas_len
        return cls(
            token_s=forward_seconds(stack, roof, 1, with_soft=False),
            step_s=forward_seconds(stack, roof, canvas_len, with_soft=True),
            verify_s=forward_seconds(stack, roof, canvas_len, with_soft=False),
        )


@dataclass
class DecodeChooser:
    """decode "auto": canvases that the causal pass verifies, as long as they pay; else left to right.

    The text is the same either way. A canvas that cost more than its tokens would have cost one by one is
    followed by tokens one by one, and then another try; twice as many after each such canvas. Costs are those
    of the cost model, not measured: the same request goes the same way each time.
    """

    cost: DecodeCost
    pause: int = FIRST_PAUSE
    wait: int = 0

    @property
    def choice(self) -> str:
        return "causal" if self.wait else "lossless"

    def wrote_token(self) -> None:
        self.wait = max(0, self.wait - 1)

    def wrote_canvas(self, steps: int, num_tokens: int) -> None:
        cost = self.cost
        if num_tokens * cost.token_s >= steps * cost.step_s + cost.verify_s:
            self.pause = FIRST_PAUSE
        else:
            self.wait, self.pause = self.pause, min(2 * self.pause, MAX_PAUSE)
