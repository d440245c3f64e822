"""What a forward should take: its arithmetic, its bytes and its element-wise work, at this machine's rates.

Counted from the geometry, at the speed that single torch calls of the same shapes are measured to have:

- a product of `rows` tokens with a weight takes its operations over the rate at so many rows, or its bytes
  over the bandwidth, whichever is more; experts have their own rate, being small and many;
- norms, gates, copies of rows to their experts and the weighted sum back have a time per number each;
- the element-wise part of the vocabulary scan has a time per position and token, measured on one canvas.

A step that reaches the prediction loses nothing to planning, blocks or Python. `roofline_s` has the products
alone: all operations at the best rate of this machine, or all weights once, whichever takes longer.
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

from dgemma.model.block_tensor import BlockTensor
from dgemma.model.config import LayerKind, ModelConfig
from dgemma.model.execution import Execution
from dgemma.model.kv_cache import KVCache
from dgemma.model.layers import gated_gelu, rms_norm
from dgemma.model.linear import HAS_BF16_INSTRUCTIONS, ExpertLinear, Linear, PlainLinear
from dgemma.model.quantized_linear import QuantizedExpertLinear, QuantizedLinear, QuantizedWeight
from dgemma.model.quantized_tensor import QuantizedTensor
from dgemma.model.transformer import Layer, Transformer
from dgemma.sampling.rng import noise_key
from dgemma.sampling.vocab_scan import scan_vocab

ROWS = (1, 4, 16, 32, 64, 128, 256, 1024, 4096)
MAX_SIDE = 1024  # of the square products whose rate is measured
_PEAK_SIDE = 2048  # of the one that is the machine's limit


@dataclass(frozen=True)
class MachineRates:
    """Measured speeds of this machine with the kinds of weights that a model has."""

    product_flops: tuple[float, ...]  # operations per second of a product, by ROWS
    expert_flops: tuple[float, ...]  # the same of an expert's
    peak_flops: float  # the best product of any dtype here
    bytes_per_s: float  # read
    weight_bytes: float  # of a number in a matrix
    expert_bytes: float  # and in an expert
    norm_s: float  # per number
    gate_s: float
    copy_s: float
    add_s: float
    scan_s: float  # the element-wise part of the vocabulary scan, per position and token
    calls_s: float = 0.0  # a layer's operations on next to nothing: calling them costs time

    def product_s(self, rows: float, numbers: float) -> float:
        read_s = numbers * self.weight_bytes / self.bytes_per_s
        return max(2 * rows * numbers / between(self.product_flops, rows), read_s)

    def expert_s(self, rows: float, numbers: float) -> float:
        read_s = numbers * self.expert_bytes / self.bytes_per_s
        return max(2 * rows * numbers / between(self.expert_flops, rows), read_s)


@torch.inference_mode()
def measure_rates(transformer: Transformer, max_rows: int = ROWS[-1]) -> MachineRates:
    """This machine's rates with the weights of `transformer`: plain or quantized. On a CPU.

    max_rows: more rows than this are taken to be as fast; it saves seconds.
    """
    config, dtype = transformer.config, transformer.embedding.dtype
    canvas, hidden = config.canvas_len, config.hidden_size
    side = min(MAX_SIDE, -(-hidden // 128) * 128)
    layer = transformer.layers[0]
    assert isinstance(layer, Layer)
    products = product_rates([_like(layer.mlp.gate, side, side, dtype) for _ in range(8)], dtype, max_rows)
    experts = layer.experts.gate_up
    large = torch.zeros(256 << 20, dtype=torch.uint8)
    bytes_per_s = large.numel() / typical_s(lambda: large.view(torch.int64).sum())
    x = torch.randn(1, canvas, hidden, dtype=dtype)
    wide, weight = x.float(), torch.ones(hidden, dtype=dtype)
    row_of = torch.randint(canvas, (canvas * config.experts_per_token,))
    key = noise_key([0], [0], [0], x.device)
    whole_s = typical_s(lambda: scan_vocab(x, transformer.head, torch.ones(1), key), 3)
    found = MachineRates(
        product_flops=products,
        expert_flops=expert_rates(experts, dtype, max_rows),
        peak_flops=max(*products, peak_flops()),
        bytes_per_s=bytes_per_s,
        weight_bytes=layer.mlp.gate.nbytes / (hidden * config.mlp_size),
        expert_bytes=experts.nbytes / (config.num_experts * 2 * config.expert_size * hidden),
        norm_s=typical_s(lambda: rms_norm(x, weight, 1e-6)) / x.numel(),
        gate_s=typical_s(lambda: gated_gelu(x, x)) / x.numel(),
        copy_s=typical_s(lambda: x[0].index_select(0, row_of)) / (len(row_of) * hidden),
        add_s=typical_s(lambda: wide + x * wide[..., :1]) / x.numel(),
        scan_s=0.0,
    )
    products_s = 2 * found.product_s(canvas, config.vocab_size * hidden)
    # One token through all layers, less its products.
    token, context = (
        torch.zeros((1, 1), dtype=torch.int64),
        KVCache(config, 1, dtype=dtype, device=x.device).context(),
    )
    plain = transformer.with_execution(Execution())  # exact execution has no forward of a single token
    token_s = typical_s(lambda: plain.encode(token, context))
    return replace(
        found,
        scan_s=max(0.0, whole_s - products_s) / (canvas * config.vocab_size),
        calls_s=max(0.0, token_s - _token_products_s(found, config, 1)) / len(config.layers),
    )


@torch.inference_mode()
def peak_flops() -> float:
    """Operations per second of a large square product, in the dtype that is fastest here, at its best."""
    dtype = torch.bfloat16 if HAS_BF16_INSTRUCTIONS else torch.float32
    a, b = (torch.randn(_PEAK_SIDE, _PEAK_SIDE).to(dtype) for _ in range(2))
    return 2 * _PEAK_SIDE**3 / min(times_s(partial(nn.functional.linear, a, b), 5))


def step_s(rates: MachineRates, config: ModelConfig, canvases: int, context: int) -> float:
    """A denoising step of so many canvases after `context` tokens each."""
    rows, hidden = canvases * config.canvas_len, config.hidden_size
    total = 3 * rates.product_s(rows, hidden * config.mlp_size)  # self-conditioning
    total += rows * (2 * hidden * rates.norm_s + config.mlp_size * rates.gate_s)
    total += _layers_s(rates, config, rows, context + config.canvas_len)
    total += 2 * rates.product_s(rows, config.vocab_size * hidden)
    return total + rows * config.vocab_size * rates.scan_s


def encode_s(rates: MachineRates, config: ModelConfig, tokens: int, context: int) -> float:
    """A causal pass over `tokens` tokens after `context`, without the head: a prompt or a commit."""
    return _layers_s(rates, config, tokens, context + tokens // 2)


def _layers_s(rates: MachineRates, config: ModelConfig, rows: int, seen_by_each: int) -> float:
    hidden, k, touched, total = (
        config.hidden_size,
        config.experts_per_token,
        touched_experts(config, rows),
        0.0,
    )

    def dense(numbers: float) -> float:
        return rates.product_s(rows, numbers)

    total += len(config.layers) * rates.calls_s
    for layer in config.layers:
        queries, keys = config.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        total += dense(hidden * (2 * queries + 2 * keys))
        total += 3 * dense(hidden * config.mlp_size) + dense(hidden * config.num_experts)
        total += touched * rates.expert_s(rows * k / touched, 3 * hidden * config.expert_size)
        scores = 2 * _seen(config, layer.kind, seen_by_each) * queries
        total += 2 * rows * scores / between(rates.product_flops, config.canvas_len)
        total += rows * rates.norm_s * (8 * hidden + queries + 2 * keys)
        total += rows * rates.gate_s * (config.mlp_size + k * config.expert_size)
        total += rows * rates.copy_s * 2 * k * hidden  # to the experts and back
        # Weighted sum, residual, rotary positions.
        total += rows * rates.add_s * (k * hidden + 4 * hidden + 2 * (queries + keys))
    return total


def causal_s(rates: MachineRates, config: ModelConfig, rows: int, context: int) -> float:
    """A causal forward of one token for each of `rows` answers, with the head."""
    total = rates.product_s(rows, config.vocab_size * config.hidden_size)
    total += rows * config.vocab_size * rates.scan_s
    total += _token_products_s(rates, config, rows) + len(config.layers) * rates.calls_s
    for layer in config.layers:
        keys = layer.num_kv_heads * layer.head_dim
        total += rows * 2 * _seen(config, layer.kind, context) * keys * 4 / rates.bytes_per_s
    return total


def _token_products_s(rates: MachineRates, config: ModelConfig, rows: int) -> float:
    """The products of all layers for one token of each row."""
    hidden, k, touched, total = (
        config.hidden_size,
        config.experts_per_token,
        touched_experts(config, rows),
        0.0,
    )
    for layer in config.layers:
        queries, keys = config.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        total += rates.product_s(rows, hidden * (2 * queries + 2 * keys + 3 * config.mlp_size))
        total += touched * rates.expert_s(rows * k / touched, 3 * hidden * config.expert_size)
    return total


def roofline_s(rates: MachineRates, config: ModelConfig, canvases: int) -> float:
    """The products of a denoising step at the best rate of this machine, or their weights read once."""
    rows, hidden = canvases * config.canvas_len, config.hidden_size
    shared, routed = 3.0 * hidden * config.mlp_size, 0.0
    for layer in config.layers:
        wide = 2 * config.num_heads * layer.head_dim + 2 * layer.num_kv_heads * layer.head_dim
        shared += hidden * (wide + 3 * config.mlp_size + config.num_experts)
        routed += 3 * hidden * config.expert_size
    shared += 2 * config.vocab_size * hidden
    operations = 2 * rows * (shared + config.experts_per_token * routed)
    weights = rates.weight_bytes * shared + rates.expert_bytes * config.num_experts * routed
    return max(operations / rates.peak_flops, weights / rates.bytes_per_s)


def touched_experts(config: ModelConfig, rows: float) -> float:
    """How many experts `rows` tokens use, if each picks its own."""
    share_left: float = (1 - config.experts_per_token / config.num_experts) ** rows
    return config.num_experts * (1 - share_left)


def between(rates: Sequence[float], rows: float) -> float:
    """The rate at `rows`, in proportion between two measured sizes."""
    at = bisect_left(ROWS, rows)
    if at in (0, len(ROWS)):
        return rates[min(at, len(ROWS) - 1)]
    share = (rows - ROWS[at - 1]) / (ROWS[at] - ROWS[at - 1])
    return rates[at - 1] + share * (rates[at] - rates[at - 1])


def typical_s(run: Callable[[], object], rounds: int = 7) -> float:
    """The median: what it is compared with is a mean over the same machine's good and bad moments."""
    return statistics.median(times_s(run, rounds))


def times_s(run: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each of `rounds` runs, after one that warms up."""
    run()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return times


def product_rates(weights: Sequence[Linear], dtype: torch.dtype, max_rows: int) -> tuple[float, ...]:
    rates = list[float]()
    numbers = weights[0].in_features * weights[0].out_features
    for rows in ROWS:
        if rows > max_rows:
            rates.append(rates[-1])
            continue
        x = torch.randn(rows, weights[0].in_features, dtype=dtype)
        used = weights if rows < 1024 else weights[:8]  # a large product does not stay in the cache alone

        def run(x: torch.Tensor = x, used: Sequence[Linear] = used) -> object:
            return [weight.multiply(x) for weight in used]

        rates.append(len(used) * 2 * rows * numbers / typical_s(run, 5))
    return tuple(rates)


def expert_rates(experts: ExpertLinear, dtype: torch.dtype, max_rows: int) -> tuple[float, ...]:
    """All experts in turn, as in a layer: one alone would stay in the cache."""
    if not isinstance(experts, QuantizedExpertLinear):
        few = [
            _like(experts, experts.out_features, experts.in_features, dtype)
            for _ in range(experts.num_experts)
        ]
        return product_rates(few, dtype, max_rows)
    rates = list[float]()
    for rows in ROWS:
        if rows > max_rows:
            rates.append(rates[-1])
            continue
        count = experts.num_experts if rows < 1024 else 8
        some = QuantizedExpertLinear(experts.quantized[:count], rounds_activations=experts.rounds_activations)
        x = torch.randn(rows * count, experts.in_features, dtype=dtype)
        ends = torch.arange(rows, rows * count + 1, rows, dtype=torch.int32)
        seconds = typical_s(partial(some.multiply_grouped, x, ends), 5)
        rates.append(2 * rows * count * experts.in_features * experts.out_features / seconds)
    return tuple(rates)


def _like(weight: Linear | ExpertLinear, out: int, inner: int, dtype: torch.dtype) -> Linear:
    """A matrix of random numbers of the same kind."""
    if not isinstance(weight, QuantizedWeight):
        plain = PlainLinear(out, inner, dtype=dtype, device=torch.device("cpu"))
        nn.init.normal_(plain.weight)
        return plain
    quantized = weight.quantized
    if isinstance(quantized, BlockTensor):
        row_bytes = inner // quantized.format.block_len * quantized.format.block_bytes
        blocks = quantized.with_parts({"qdata": torch.zeros(out, row_bytes, dtype=torch.uint8)})
        return QuantizedLinear(blocks, dtype=dtype, rounds_activations=weight.rounds_activations)
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
        None if quantized.bias is None else torch.zeros_like(scale),
    )
    return QuantizedLinear(qdata, dtype=dtype, rounds_activations=weight.rounds_activations)


def _seen(config: ModelConfig, kind: LayerKind, tokens: int) -> int:
    """Of so many tokens, how many a layer of this kind attends to; a canvas sees itself whole."""
    return min(tokens, config.window - 1 + config.canvas_len) if kind is LayerKind.SLIDING else tokens
