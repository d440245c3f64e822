"""What a step should take: its arithmetic, its bytes and its element-wise work, at this machine's own rates.

Counted from the geometry, and multiplied by what plain torch calls of the same shapes were measured to take:

- a product of `rows` tokens with a weight takes its operations over the rate of so many rows, or its bytes
  over the rate of reading, whichever is more; experts have a rate of their own, being small and many;
- norms, gates, copies of rows to their experts and the weighted sum back have a time per number each;
- the vocabulary's element-wise part has a time per position and word, measured on one canvas.

So a step that reaches the prediction loses nothing to planning, to pages, to Python, or to its company.
`roofline_s` is the same without the element-wise work, all products at the best rate: what nobody reaches.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dgemma.diffusion.noise import place_at
from dgemma.diffusion.walk import walk
from dgemma.model.config import LayerKind, ModelConfig
from dgemma.model.norm import rms_norm
from dgemma.model.stack import Stack

ROWS = (1, 4, 16, 32, 64, 128, 256, 1024, 4096)
SIDE = 1024  # of the square products whose rate is measured


@dataclass(frozen=True)
class Machine:
    rates: tuple[float, ...]  # operations per second of a product, by ROWS
    expert_rates: tuple[float, ...]  # the same of an expert's
    bytes_per_s: float  # read
    norm_s: float  # per number
    gate_s: float
    copy_s: float
    add_s: float
    word_s: float  # the element-wise part of the walk, per position and word

    def product_s(self, rows: float, numbers: float, item_bytes: int) -> float:
        return max(2 * rows * numbers / between(self.rates, rows), numbers * item_bytes / self.bytes_per_s)

    def expert_s(self, rows: float, numbers: float, item_bytes: int) -> float:
        rate = between(self.expert_rates, rows)
        return max(2 * rows * numbers / rate, numbers * item_bytes / self.bytes_per_s)


def between(rates: Sequence[float], rows: float) -> float:
    """Between two measured sizes, in proportion."""
    at = bisect_left(ROWS, rows)
    if at in (0, len(ROWS)):
        return rates[min(at, len(ROWS) - 1)]
    share = (rows - ROWS[at - 1]) / (ROWS[at] - ROWS[at - 1])
    return rates[at - 1] + share * (rates[at] - rates[at - 1])


def typical(run: Callable[[], object], rounds: int = 7) -> float:
    """The median: what it is compared with is a mean over the same machine's good and bad moments."""
    run()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@torch.inference_mode()
def measure_machine(stack: Stack) -> Machine:
    config, dtype = stack.config, stack.embedding.dtype
    canvas, hidden = config.canvas_len, config.hidden_size
    squares = [torch.randn(SIDE, SIDE, dtype=dtype) for _ in range(8)]
    rates = product_rates(squares)
    # All experts in turn, as in a layer: one alone would stay in the cache.
    experts = list(torch.randn(config.num_experts, 2 * config.expert_size, hidden, dtype=dtype))
    large = torch.zeros(256 << 20, dtype=torch.uint8)
    bytes_per_s = large.numel() / typical(lambda: large.view(torch.int64).sum())
    x = torch.randn(1, canvas, hidden, dtype=dtype)
    wide, weight = x.float(), torch.ones(hidden, dtype=dtype)
    row_of = torch.randint(canvas, (canvas * config.experts_per_token,))
    walk_s = typical(lambda: walk(x, stack.head, torch.ones(1), place_at([0], [0], [0], x.device)))
    words = config.vocab_size * hidden
    products_s = 2 * max(2 * canvas * words / between(rates, canvas), words * dtype.itemsize / bytes_per_s)
    return Machine(
        rates=rates,
        expert_rates=product_rates(experts),
        bytes_per_s=bytes_per_s,
        norm_s=typical(lambda: rms_norm(x, weight, 1e-6)) / x.numel(),
        gate_s=typical(lambda: nn.functional.gelu(x, approximate="tanh") * x) / x.numel(),
        copy_s=typical(lambda: x[0].index_select(0, row_of)) / (len(row_of) * hidden),
        add_s=typical(lambda: wide + x * wide[..., :1]) / x.numel(),
        word_s=max(0.0, walk_s - products_s) / (canvas * config.vocab_size),
    )


def product_rates(weights: Sequence[torch.Tensor]) -> tuple[float, ...]:
    rates = []
    for rows in ROWS:
        x = torch.randn(rows, weights[0].shape[1], dtype=weights[0].dtype)
        used = weights if rows < 1024 else weights[:8]  # large products need no company to be slow

        def run(x: torch.Tensor = x, used: Sequence[torch.Tensor] = used) -> object:
            return [nn.functional.linear(x, weight) for weight in used]

        rates.append(len(used) * 2 * rows * weights[0].numel() / typical(run, 5))
    return tuple(rates)


def step_s(machine: Machine, config: ModelConfig, item_bytes: int, canvases: int, context: int) -> float:
    """A denoise step of so many canvases behind `context` tokens each."""
    rows, hidden, k = canvases * config.canvas_len, config.hidden_size, config.experts_per_token

    def dense(numbers: float) -> float:
        return machine.product_s(rows, numbers, item_bytes)

    total = 3 * dense(hidden * config.mlp_size)  # self-conditioning
    total += rows * (2 * hidden * machine.norm_s + config.mlp_size * machine.gate_s)
    touched = config.num_experts * (1 - (1 - k / config.num_experts) ** rows)
    expert = 3 * hidden * config.expert_size
    for layer in config.layers:
        queries, keys = config.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        total += dense(hidden * (2 * queries + 2 * keys))
        total += 3 * dense(hidden * config.mlp_size) + dense(hidden * config.num_experts)
        total += touched * machine.expert_s(rows * k / touched, expert, item_bytes)
        seen = min(context, config.window - 1) if layer.kind is LayerKind.SLIDING else context
        scores = 2 * (seen + config.canvas_len) * queries
        total += 2 * rows * scores / between(machine.rates, config.canvas_len)
        total += rows * machine.norm_s * (8 * hidden + queries + 2 * keys)
        total += rows * machine.gate_s * (config.mlp_size + k * config.expert_size)
        total += rows * machine.copy_s * 2 * k * hidden  # to the experts and back
        total += (
            rows * machine.add_s * (k * hidden + 4 * hidden + 2 * (queries + keys))
        )  # sum, residual, rope
    total += 2 * dense(config.vocab_size * hidden) + rows * config.vocab_size * machine.word_s
    return total


def roofline_s(machine: Machine, config: ModelConfig, item_bytes: int, canvases: int) -> float:
    """Products alone, at the best rate there is, or their weights once."""
    rows, hidden = canvases * config.canvas_len, config.hidden_size
    shared, routed = 3.0 * hidden * config.mlp_size, 0.0
    for layer in config.layers:
        wide = 2 * config.num_heads * layer.head_dim + 2 * layer.num_kv_heads * layer.head_dim
        shared += hidden * (wide + 3 * config.mlp_size + config.num_experts)
        routed += 3 * hidden * config.expert_size
    shared += 2 * config.vocab_size * hidden
    operations = 2 * rows * (shared + config.experts_per_token * routed)
    weights = item_bytes * (shared + config.num_experts * routed)
    return max(operations / max(machine.rates), weights / machine.bytes_per_s)
