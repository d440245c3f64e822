"""What a step should take: bytes and arithmetic, over what this machine was measured to do.

A product of `rows` tokens with a weight takes as long as its arithmetic at the rate measured for so many
rows, or as its weight takes to be read, whichever is more. The vocabulary's element-wise part is counted per
position and word.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from dgemma.diffusion.noise import place_at
from dgemma.diffusion.walk import walk
from dgemma.model.config import LayerKind, ModelConfig
from dgemma.model.stack import Stack

ROWS = (1, 4, 16, 32, 64, 128, 256, 1024, 4096)
SIDE = 1024  # of the square products whose rate is measured


@dataclass(frozen=True)
class Machine:
    rates: tuple[float, ...]  # operations per second of a product, by ROWS
    bytes_per_s: float  # read
    word_s: float  # the element-wise part of the walk, per position and word

    def rate(self, rows: float) -> float:
        """Between two measured sizes, in proportion."""
        at = bisect_left(ROWS, rows)
        if at == 0 or at == len(ROWS):
            return self.rates[min(at, len(ROWS) - 1)]
        low, high = ROWS[at - 1], ROWS[at]
        share = (rows - low) / (high - low)
        return self.rates[at - 1] + share * (self.rates[at] - self.rates[at - 1])

    def product_s(self, rows: float, weight_numbers: float, weight_bytes: float) -> float:
        return max(2 * rows * weight_numbers / self.rate(rows), weight_bytes / self.bytes_per_s)


def best_of(run: Callable[[], object], rounds: int = 5) -> float:
    run()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


@torch.inference_mode()
def measure_machine(stack: Stack) -> Machine:
    dtype = stack.embedding.dtype
    weights = [torch.randn(SIDE, SIDE, dtype=dtype) for _ in range(8)]
    rates = []
    for rows in ROWS:
        x = torch.randn(rows, SIDE, dtype=dtype)
        seconds = best_of(lambda x=x: [nn.functional.linear(x, weight) for weight in weights])  # type: ignore[misc]
        rates.append(len(weights) * 2 * rows * SIDE * SIDE / seconds)
    large = torch.zeros(256 << 20, dtype=torch.uint8)
    bytes_per_s = large.numel() / best_of(lambda: large.view(torch.int64).sum())
    config = stack.config
    hidden = torch.randn(1, config.canvas_len, config.hidden_size, dtype=dtype)
    place = place_at([0], [0], [0], hidden.device)
    walk_s = best_of(lambda: walk(hidden, stack.head, torch.ones(1), place))
    numbers = config.vocab_size * config.hidden_size
    machine = Machine(tuple(rates), bytes_per_s, 0.0)
    products_s = 2 * machine.product_s(config.canvas_len, numbers, numbers * dtype.itemsize)
    word_s = max(0.0, walk_s - products_s) / (config.canvas_len * config.vocab_size)
    return Machine(tuple(rates), bytes_per_s, word_s)


def step_s(machine: Machine, config: ModelConfig, item_bytes: int, canvases: int, context: int) -> float:
    """A denoise step of so many canvases behind `context` tokens each."""
    rows = canvases * config.canvas_len
    hidden = config.hidden_size

    def dense(numbers: float) -> float:
        return machine.product_s(rows, numbers, numbers * item_bytes)

    total = 3 * dense(hidden * config.mlp_size)  # self-conditioning
    used = config.experts_per_token / config.num_experts
    touched = config.num_experts * (1 - (1 - used) ** rows)
    per_expert = rows * config.experts_per_token / touched
    expert = 3 * hidden * config.expert_size
    for layer in config.layers:
        queries, keys = config.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        total += dense(hidden * (2 * queries + 2 * keys))
        total += 3 * dense(hidden * config.mlp_size) + dense(hidden * config.num_experts)
        total += touched * machine.product_s(per_expert, expert, expert * item_bytes)
        seen = min(context, config.window - 1) if layer.kind is LayerKind.SLIDING else context
        scores = 2 * (seen + config.canvas_len) * queries
        total += 2 * rows * scores / machine.rate(config.canvas_len)
    words = config.vocab_size * hidden
    total += 2 * dense(words) + rows * config.vocab_size * machine.word_s
    return total
