"""What a step should take: its arithmetic, its bytes and its element-wise work, at this machine's own rates.

Counted from the geometry, and multiplied by what plain torch calls of the same shapes were measured to take:

- a product of `rows` tokens with a weight takes its operations over the rate of so many rows, or its bytes
  over the rate of reading, whichever is more; experts have a rate of their own, being small and many;
- norms, gates, copies of rows to their experts and the weighted sum back have a time per number each;
- the vocabulary's element-wise part has a time per position and word, measured on one canvas.

So a step that reaches the prediction loses nothing to planning, to blocks, to Python, or to its company.
`roofline_s` is the same without the element-wise work, all products at the best rate: what nobody reaches.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from dgemma.model.config import LayerKind, ModelConfig
from dgemma.model.layers import rms_norm
from dgemma.model.linear import ExpertLinear, Linear, PlainLinear
from dgemma.model.quantized_linear import QuantizedExpertLinear, QuantizedLinear, QuantizedWeight
from dgemma.model.quantized_tensor import QuantizedTensor
from dgemma.model.transformer import Layer, Transformer
from dgemma.sampling.rng import noise_key
from dgemma.sampling.vocab_scan import scan_vocab

ROWS = (1, 4, 16, 32, 64, 128, 256, 1024, 4096)
SIDE = 1024  # of the square products whose rate is measured


@dataclass(frozen=True)
class Machine:
    rates: tuple[float, ...]  # operations per second of a product, by ROWS
    expert_rates: tuple[float, ...]  # the same of an expert's
    bytes_per_s: float  # read
    number_bytes: float  # of a weight, in a matrix
    expert_bytes: float  # and in an expert
    norm_s: float  # per number
    gate_s: float
    copy_s: float
    add_s: float
    word_s: float  # the element-wise part of the walk, per position and word

    def product_s(self, rows: float, numbers: float) -> float:
        read_s = numbers * self.number_bytes / self.bytes_per_s
        return max(2 * rows * numbers / between(self.rates, rows), read_s)

    def expert_s(self, rows: float, numbers: float) -> float:
        read_s = numbers * self.expert_bytes / self.bytes_per_s
        return max(2 * rows * numbers / between(self.expert_rates, rows), read_s)


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
def measure_machine(stack: Transformer) -> Machine:
    """This machine's rates with the kinds of weights that `stack` has: plain, or in few bits."""
    config, dtype = stack.config, stack.embedding.dtype
    canvas, hidden = config.canvas_len, config.hidden_size
    layer = stack.layers[0]
    assert isinstance(layer, Layer)
    rates = product_rates([like(layer.mlp.gate, SIDE, SIDE, dtype) for _ in range(8)], dtype)
    experts_linear = layer.experts.gate_up
    large = torch.zeros(256 << 20, dtype=torch.uint8)
    bytes_per_s = large.numel() / typical(lambda: large.view(torch.int64).sum())
    x = torch.randn(1, canvas, hidden, dtype=dtype)
    wide, weight = x.float(), torch.ones(hidden, dtype=dtype)
    row_of = torch.randint(canvas, (canvas * config.experts_per_token,))
    walk_s = typical(lambda: scan_vocab(x, stack.head, torch.ones(1), noise_key([0], [0], [0], x.device)))
    machine = Machine(
        rates=rates,
        expert_rates=expert_rates(experts_linear, dtype),
        bytes_per_s=bytes_per_s,
        number_bytes=layer.mlp.gate.nbytes / (hidden * config.mlp_size),
        expert_bytes=experts_linear.nbytes / (config.num_experts * 2 * config.expert_size * hidden),
        norm_s=typical(lambda: rms_norm(x, weight, 1e-6)) / x.numel(),
        gate_s=typical(lambda: nn.functional.gelu(x, approximate="tanh") * x) / x.numel(),
        copy_s=typical(lambda: x[0].index_select(0, row_of)) / (len(row_of) * hidden),
        add_s=typical(lambda: wide + x * wide[..., :1]) / x.numel(),
        word_s=0.0,
    )
    products_s = 2 * machine.product_s(canvas, config.vocab_size * hidden)
    return replace(machine, word_s=max(0.0, walk_s - products_s) / (canvas * config.vocab_size))


def like(weight: Linear | ExpertLinear, out: int, inner: int, dtype: torch.dtype) -> Linear:
    """A matrix of random numbers of the same kind."""
    if not isinstance(weight, QuantizedWeight):
        plain = PlainLinear(out, inner, dtype=dtype, device=torch.device("cpu"))
        nn.init.normal_(plain.weight)
        return plain
    quantized = weight.quantized
    groups = 1 if quantized.scale.shape[-1] == 1 else inner // quantized.group_len
    stored = torch.randint(256, (out, inner // quantized.kind.per_byte), dtype=torch.uint8)
    scale = torch.rand(out, groups).to(quantized.scale.dtype)
    global_scale = None if quantized.global_scale is None else torch.ones(out, 1)
    qdata = QuantizedTensor(
        quantized.kind,
        stored.view(quantized.qdata.dtype),
        scale,
        None,
        global_scale,
        quantized.global_scale_divides,
    )
    return QuantizedLinear(qdata, dtype=dtype, rounds_activations=weight.rounds_activations)


def expert_rates(experts_linear: ExpertLinear, dtype: torch.dtype) -> tuple[float, ...]:
    """All experts in turn, as in a layer: one alone would stay in the cache."""
    if not isinstance(experts_linear, QuantizedExpertLinear):
        few = [
            like(experts_linear, experts_linear.out_features, experts_linear.in_features, dtype)
            for _ in range(experts_linear.num_experts)
        ]
        return product_rates(few, dtype)
    rates = []
    for rows in ROWS:
        count = experts_linear.num_experts if rows < 1024 else 8
        some = QuantizedExpertLinear(
            experts_linear.quantized[:count], rounds_activations=experts_linear.rounds_activations
        )
        x = torch.randn(rows * count, experts_linear.in_features, dtype=dtype)
        ends = torch.arange(rows, rows * count + 1, rows, dtype=torch.int32)
        seconds = typical(partial(some.multiply_grouped, x, ends), 5)
        rates.append(2 * rows * count * experts_linear.in_features * experts_linear.out_features / seconds)
    return tuple(rates)


def product_rates(weights: Sequence[Linear], dtype: torch.dtype) -> tuple[float, ...]:
    rates = []
    numbers = weights[0].in_features * weights[0].out_features
    for rows in ROWS:
        x = torch.randn(rows, weights[0].in_features, dtype=dtype)
        used = weights if rows < 1024 else weights[:8]  # large products need no company to be slow

        def run(x: torch.Tensor = x, used: Sequence[Linear] = used) -> object:
            return [weight.multiply(x) for weight in used]

        rates.append(len(used) * 2 * rows * numbers / typical(run, 5))
    return tuple(rates)


def step_s(machine: Machine, config: ModelConfig, canvases: int, context: int) -> float:
    """A denoise step of so many canvases after `context` tokens each."""
    rows, hidden, k = canvases * config.canvas_len, config.hidden_size, config.experts_per_token

    def dense(numbers: float) -> float:
        return machine.product_s(rows, numbers)

    total = 3 * dense(hidden * config.mlp_size)  # self-conditioning
    total += rows * (2 * hidden * machine.norm_s + config.mlp_size * machine.gate_s)
    touched = config.num_experts * (1 - (1 - k / config.num_experts) ** rows)
    expert = 3 * hidden * config.expert_size
    for layer in config.layers:
        queries, keys = config.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        total += dense(hidden * (2 * queries + 2 * keys))
        total += 3 * dense(hidden * config.mlp_size) + dense(hidden * config.num_experts)
        total += touched * machine.expert_s(rows * k / touched, expert)
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


def roofline_s(machine: Machine, config: ModelConfig, canvases: int) -> float:
    """Products alone, at the best rate there is, or their weights once."""
    rows, hidden = canvases * config.canvas_len, config.hidden_size
    shared, routed = 3.0 * hidden * config.mlp_size, 0.0
    for layer in config.layers:
        wide = 2 * config.num_heads * layer.head_dim + 2 * layer.num_kv_heads * layer.head_dim
        shared += hidden * (wide + 3 * config.mlp_size + config.num_experts)
        routed += 3 * hidden * config.expert_size
    shared += 2 * config.vocab_size * hidden
    operations = 2 * rows * (shared + config.experts_per_token * routed)
    weights = machine.number_bytes * shared + machine.expert_bytes * config.num_experts * routed
    return max(operations / max(machine.rates), weights / machine.bytes_per_s)
