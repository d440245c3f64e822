"""A cost model of decoding: what a device should write per second, from its data sheet. Imports no torch.

A forward takes max(bytes / bandwidth, operations / peak) / efficiency (a roofline). Bytes are the experts
that its tokens touch, the dense weights, the embedding once for the head and once for the soft embedding, and
the cached context. The efficiency is fitted to published speeds, one per class of devices. No device of the
table was run by us.

Two conventions count the forwards of an answer of n canvases with K denoise steps each:
- published: n * (K + 1), a commit taken to cost a step, the prompt left out;
- dgemma: n * K, since the prompt's last pass and each commit also run the next canvas's first step, and the
  last canvas is not committed. The prompt is included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

from dgemma.bench.devices import (
    DEVICE_CLASSES,
    DEVICES,
    PUBLISHED,
    Device,
    Kind,
    Published,
)
from dgemma.checkpoint.names import tensor_specs
from dgemma.checkpoint.presets import PRESETS
from dgemma.errors import InputError, suggestion
from dgemma.model.config import LayerKind, ModelConfig

RELEASED = PRESETS["26b"].config  # the model of every published speed
ASSUMED_STEPS = 16  # of a published speed that does not state them; 12 to 16 are typical
_EXTRA_BYTES = 2_000_000_000  # beside weights and cache: activations, the runtime
_CACHE_BYTES = 2  # per number: bf16
_CONTEXTS = tuple(1024 << i for i in range(9))
_CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
_CANVASES = (64, 128, 192, 256)
_KINDS: tuple[Kind, ...] = ("diffusion", "causal")
LOSSLESS_LENGTHS = (4, 8, 16, 32)
DRAFT_STEPS = 4  # of a canvas that the causal pass verifies, as `GenerationParams.draft_steps`


@dataclass(frozen=True)
class WeightFormat:
    """Bytes per weight with scales, and the format in which its products are computed."""

    name: str
    experts: float
    dense: float
    embedding: float
    experts_compute: str
    dense_compute: str


# As in the published checkpoints: none quantizes the embedding, and NVFP4 leaves the dense weights in bf16.
# int8 and int4 are formats of storage: weights are dequantized for products in bf16.
FORMATS: dict[str, WeightFormat] = {
    "bf16": WeightFormat("bf16", 2, 2, 2, "bf16", "bf16"),
    "fp8": WeightFormat("fp8", 1, 1, 2, "fp8", "fp8"),
    "int8": WeightFormat("int8", 1, 1, 2, "bf16", "bf16"),
    "nvfp4": WeightFormat("nvfp4", 0.5 + 1 / 16, 2, 2, "fp4", "bf16"),
    "int4": WeightFormat("int4", 0.5 + 2 / 32, 0.5 + 2 / 32, 2, "bf16", "bf16"),
}


@dataclass(frozen=True)
class StepCost:
    """One forward. `memory_s` and `compute_s` are at the device's peak, `seconds` at its efficiency."""

    bytes: float
    operations: float
    memory_s: float
    compute_s: float
    seconds: float
    limited_by: Literal["memory", "compute"]
    experts_touched: float  # per layer


@dataclass(frozen=True)
class _Work:
    """What a forward does for some sequences: denoise a canvas, encode text, or write one causal token."""

    mode: Literal["denoise", "encode", "causal"]
    sequences: int
    tokens: int  # of each sequence
    context: int  # before them


def experts_touched(config: ModelConfig, num_tokens: int) -> float:
    """Distinct experts of a layer that so many tokens choose, if each chooses as if by chance."""
    share = config.experts_per_token / config.num_experts
    return config.num_experts * (1 - (1 - share) ** num_tokens)


def cache_bytes(config: ModelConfig, context: int) -> int:
    """K and V that one sequence's queries read; a sliding layer keeps the window's."""
    return sum(
        2 * _CACHE_BYTES * layer.num_kv_heads * layer.head_dim * _seen(config, layer.kind, context)
        for layer in config.layers
    )


def weight_bytes(config: ModelConfig, weight_format: str | WeightFormat) -> float:
    """Of the weights in memory, vision excluded."""
    form = _format(weight_format)
    parts = _parts(config)
    dense = parts.dense + parts.self_conditioning
    return parts.experts * form.experts + dense * form.dense + parts.embedding * form.embedding


def cache_memory(config: ModelConfig, device: Device, weight_format: str | WeightFormat) -> float:
    """What a device has left for the KV cache."""
    return device.memory_bytes - weight_bytes(config, weight_format) - _EXTRA_BYTES


def step_seconds(
    config: ModelConfig,
    device: Device,
    weight_format: str | WeightFormat,
    *,
    canvases: int = 1,
    context: int = 1024,
    efficiency: float | None = None,
) -> StepCost:
    """A denoise step of so many canvases, each after `context` tokens. efficiency: None means the class's."""
    _check(canvases=canvases, context=context)
    span = _Work("denoise", canvases, config.canvas_len, context)
    return _forward(config, device, _format(weight_format), [span], _efficiency(device, efficiency))


def engine_step_seconds(
    config: ModelConfig,
    device: Device,
    weight_format: str | WeightFormat,
    *,
    canvases: int = 0,
    causal: int = 0,
    encoded: int = 0,
    context: int = 1024,
) -> float:
    """A step of the engine: canvases or left-to-right sequences, and prompt or committed tokens with them."""
    _check(canvases=canvases + 1, causal=causal + 1, encoded=encoded + 1, context=context)
    spans = [
        span
        for span in (
            _Work("denoise", canvases, config.canvas_len, context),
            _Work("causal", causal, 1, context),
            _Work("encode", 1, encoded, context),
        )
        if span.sequences and span.tokens
    ]
    form, name = _format(weight_format), device.device_class
    seconds = _forward(config, device, form, spans, EFFICIENCY[name]).seconds
    if not causal:
        return seconds
    # Published speeds left to right are of one sequence. What they lose more than a canvas does is taken as a
    # time per forward (launches), not as a share: a large batch would lose it once.
    alone = causal_seconds(config, device, form, context=context, efficiency=1.0).seconds
    return seconds + alone * max(0.0, 1 / CAUSAL_EFFICIENCY[name] - 1 / EFFICIENCY[name])


def causal_seconds(
    config: ModelConfig,
    device: Device,
    weight_format: str | WeightFormat,
    *,
    sequences: int = 1,
    context: int = 1024,
    efficiency: float | None = None,
) -> StepCost:
    """One token of each sequence, left to right, with the head."""
    _check(sequences=sequences, context=context)
    chosen = CAUSAL_EFFICIENCY[device.device_class] if efficiency is None else efficiency
    span = _Work("causal", sequences, 1, context)
    return _forward(config, device, _format(weight_format), [span], chosen)


def _forward(
    config: ModelConfig, device: Device, form: WeightFormat, spans: Sequence[_Work], efficiency: float
) -> StepCost:
    """Weights are read once for all spans, caches for each sequence."""
    parts = _parts(config)
    rows = sum(span.sequences * span.tokens for span in spans)
    canvas_rows = sum(span.sequences * span.tokens for span in spans if span.mode == "denoise")
    # The head reads the embedding, and so does the soft embedding of a canvas. A prompt needs neither.
    reads = max({"denoise": 2, "causal": 1, "encode": 0}[span.mode] for span in spans)
    head_rows = canvas_rows + sum(span.sequences for span in spans if span.mode == "causal")
    touched = experts_touched(config, rows)
    dense = parts.dense + (parts.self_conditioning if canvas_rows else 0)
    num_bytes = (
        parts.experts * touched / config.num_experts * form.experts
        + dense * form.dense
        + reads * parts.embedding * form.embedding
        + sum(span.sequences * cache_bytes(config, span.context) for span in spans)
    )
    active = parts.experts * config.experts_per_token / config.num_experts
    operations = [
        (2 * rows * active, form.experts_compute),
        (2 * (rows * parts.dense + canvas_rows * parts.self_conditioning), form.dense_compute),
        (2 * (head_rows + canvas_rows) * parts.embedding, "bf16"),
        (sum(_attention_operations(config, span) for span in spans), "bf16"),
    ]
    memory_s = num_bytes / device.bytes_per_s
    compute_s = sum(count / device.peak(compute) for count, compute in operations)
    return StepCost(
        bytes=num_bytes,
        operations=sum(count for count, _ in operations),
        memory_s=memory_s,
        compute_s=compute_s,
        seconds=max(memory_s, compute_s) / efficiency,
        limited_by="memory" if memory_s >= compute_s else "compute",
        experts_touched=touched,
    )


@dataclass(frozen=True)
class _Parts:
    experts: int = 0
    dense: int = 0  # used in every forward
    self_conditioning: int = 0  # used in denoise steps
    embedding: int = 0


# By geometry without RoPE, which has no weights: walking the tensors for every forward takes a second a page.
_COUNTED: dict[tuple[Any, ...], _Parts] = {}


def _parts(config: ModelConfig) -> _Parts:
    key = tuple(getattr(config, field.name) for field in fields(config) if field.name != "rope")
    if key not in _COUNTED:
        sizes = {field.name: 0 for field in fields(_Parts)}
        for spec in tensor_specs(config):
            sizes[spec.part if spec.part in sizes else "dense"] += spec.size
        _COUNTED[key] = _Parts(**sizes)
    return _COUNTED[key]


def _seen(config: ModelConfig, kind: LayerKind, context: int) -> int:
    return min(context, config.window - 1) if kind is LayerKind.SLIDING else context


def _attention_operations(config: ModelConfig, span: _Work) -> float:
    """Scores and weighted sums: two products of two operations per pair of query and key."""
    total = 0.0
    for layer in config.layers:
        if span.mode == "denoise":
            keys = float(_seen(config, layer.kind, span.context) + span.tokens)
        else:  # causal: the mean over the span
            keys = span.context + (span.tokens + 1) / 2
            if layer.kind is LayerKind.SLIDING:
                keys = min(keys, config.window)
        total += 4 * span.sequences * span.tokens * keys * config.num_heads * layer.head_dim
    return total


def _format(weight_format: str | WeightFormat) -> WeightFormat:
    if isinstance(weight_format, WeightFormat):
        return weight_format
    if weight_format not in FORMATS:
        raise InputError(
            f"{weight_format!r} is not a weight format{suggestion(weight_format, FORMATS)} "
            f"Known: {', '.join(FORMATS)}.",
            field="weight_format",
        )
    return FORMATS[weight_format]


def _check(**counts: int) -> None:
    for name, value in counts.items():
        least = 0 if name == "context" else 1
        if value < least:
            raise InputError.about(name, f"is {value}; it must be at least {least}.")


def _efficiency(device: Device, efficiency: float | None) -> float:
    return EFFICIENCY[device.device_class] if efficiency is None else efficiency


@cache
def ceiling(published: Published) -> float:
    """Tokens per second of the published setting at efficiency 1, by the published convention."""
    device, form, count = DEVICES[published.device], published.weight_format, published.canvases
    if published.kind == "causal":
        return count / causal_seconds(RELEASED, device, form, sequences=count, efficiency=1.0).seconds
    steps = ASSUMED_STEPS if published.steps is None else published.steps
    step = step_seconds(RELEASED, device, form, canvases=count, efficiency=1.0)
    return count * RELEASED.canvas_len / ((steps + 1) * step.seconds)


def fitted_to(device_class: str, kind: Kind, without: Published | None = None) -> tuple[Published, ...]:
    """The published speeds that decide a class's efficiency.

    Those with fixed steps, if the class has any; otherwise those that do not state their steps, taken as
    `ASSUMED_STEPS`. A speed above its ceiling is left out: its setting cannot be the one assumed.
    """
    usable = [
        one
        for one in PUBLISHED
        if one.is_usable and one.kind == kind and one is not without
        if DEVICES[one.device].device_class == device_class and one.figure <= ceiling(one)
    ]
    stated = [one for one in usable if one.steps is not None]
    return tuple(stated or usable)


def fit_efficiency(kind: Kind, without: Published | None = None) -> dict[str, float]:
    """Published speed over ceiling, the geometric mean of each class.

    A class without a diffusion figure gets the mean of the others. A class without a causal figure gets its
    diffusion efficiency, so that its ratio is that of equal efficiency.
    """
    found = {
        name: _geometric_mean(one.figure / ceiling(one) for one in figures)
        for name in DEVICE_CLASSES
        if (figures := fitted_to(name, kind, without))
    }
    if kind == "causal":
        return {name: found.get(name, EFFICIENCY[name]) for name in DEVICE_CLASSES}
    others = _geometric_mean(found.values())
    return {name: found.get(name, others) for name in DEVICE_CLASSES}


def _geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


EFFICIENCY: dict[str, float] = fit_efficiency("diffusion")
CAUSAL_EFFICIENCY: dict[str, float] = fit_efficiency("causal")


@dataclass(frozen=True)
class Comparison:
    """The model beside one published speed, in that speed's own setting."""

    published: Published
    predicted: float
    error: float  # predicted / published - 1
    error_left_out: float  # the same with an efficiency that was not fitted to this speed
    is_fitted: bool
    share_of_ceiling: float
    lost_s: float  # per forward: the published time beyond the ceiling's
    implied_steps: float | None  # steps per canvas that would make a speed without fixed steps come true


@dataclass(frozen=True)
class LosslessPoint:
    """Lossless decoding if every canvas added so many tokens: those accepted, and the causal pass's own."""

    tokens_per_canvas: int
    tokens_per_s: float
    ratio: float  # to left to right, each at its own efficiency


@dataclass(frozen=True)
class Prediction:
    """Speeds of all sequences together, in tokens per second."""

    device: Device
    weight_format: str
    steps: int
    tokens: int
    canvases: int
    context: int
    step: StepCost
    causal: StepCost
    efficiency: float
    causal_efficiency: float
    ceiling_tokens_per_s: float
    tokens_per_s: float  # published convention
    causal_ceiling_tokens_per_s: float
    causal_tokens_per_s: float
    ratio: float  # diffusion / causal, each at its own efficiency
    equal_ratio: float  # the same at equal efficiency: the device's, not the software's
    answer_s: float  # dgemma's convention, with the prompt
    causal_answer_s: float  # with the prompt
    lossless: tuple[LosslessPoint, ...]
    weight_bytes: float
    memory_bytes: float  # weights, cache and what else is needed
    fits: bool
    limited_by: str
    comparisons: tuple[Comparison, ...]


def compare(published: Published) -> Comparison:
    device, top = DEVICES[published.device], ceiling(published)
    name, kind = device.device_class, published.kind
    fitted = EFFICIENCY if kind == "diffusion" else CAUSAL_EFFICIENCY
    predicted = top * fitted[name]
    left_out = top * fit_efficiency(kind, without=published)[name]
    forwards_per_token = 1.0
    implied = None
    if kind == "diffusion":
        steps = ASSUMED_STEPS if published.steps is None else published.steps
        forwards_per_token = (steps + 1) / RELEASED.canvas_len
        if published.steps is None:
            implied = (steps + 1) * predicted / published.figure - 1
    forward_s = published.canvases / forwards_per_token
    return Comparison(
        published=published,
        predicted=predicted,
        error=predicted / published.figure - 1,
        error_left_out=left_out / published.figure - 1,
        is_fitted=published in fitted_to(name, kind),
        share_of_ceiling=published.figure / top,
        lost_s=forward_s / published.figure - forward_s / top,
        implied_steps=implied,
    )


def predict(
    config: ModelConfig,
    device: Device,
    weight_format: str | WeightFormat,
    *,
    steps: int = 16,
    tokens: int = 256,
    canvases: int = 1,
    context: int = 1024,
) -> Prediction:
    """`canvases` sequences at once, each with `context` tokens of prompt and `tokens` tokens of answer."""
    _check(steps=steps, tokens=tokens, canvases=canvases, context=context)
    form = _format(weight_format)
    step = step_seconds(config, device, form, canvases=canvases, context=context)
    causal = causal_seconds(config, device, form, sequences=canvases, context=context)
    efficiency, causal_efficiency = EFFICIENCY[device.device_class], CAUSAL_EFFICIENCY[device.device_class]
    # A canvas costs the same however little of it is used.
    forwards = -(-tokens // config.canvas_len) * (steps + 1)
    tokens_per_s = canvases * tokens / (forwards * step.seconds)
    causal_tokens_per_s = canvases / causal.seconds
    ratio = tokens_per_s / causal_tokens_per_s
    memory = _memory_bytes(config, form, canvases, context + tokens)
    return Prediction(
        device=device,
        weight_format=form.name,
        steps=steps,
        tokens=tokens,
        canvases=canvases,
        context=context,
        step=step,
        causal=causal,
        efficiency=efficiency,
        causal_efficiency=causal_efficiency,
        ceiling_tokens_per_s=tokens_per_s / efficiency,
        tokens_per_s=tokens_per_s,
        causal_ceiling_tokens_per_s=causal_tokens_per_s / causal_efficiency,
        causal_tokens_per_s=causal_tokens_per_s,
        ratio=ratio,
        equal_ratio=ratio * causal_efficiency / efficiency,
        answer_s=_answer_seconds(config, device, form, steps, tokens, canvases, context),
        causal_answer_s=_causal_answer_seconds(config, device, form, tokens, canvases, context),
        lossless=tuple(
            _lossless(step, causal, length, canvases)
            for length in LOSSLESS_LENGTHS
            if length <= config.canvas_len
        ),
        weight_bytes=weight_bytes(config, form),
        memory_bytes=memory,
        fits=memory <= device.memory_bytes,
        limited_by=step.limited_by,
        # Published speeds are those of the released model: no other geometry is compared with them.
        comparisons=tuple(compare(one) for one in PUBLISHED if one.device == device.name)
        if config == RELEASED
        else (),
    )


def _lossless(step: StepCost, causal: StepCost, tokens_per_canvas: int, canvases: int) -> LosslessPoint:
    # The pass that verifies reads as many tokens as a step, and the head at each of them: taken as a step.
    tokens_per_s = canvases * tokens_per_canvas / ((DRAFT_STEPS + 1) * step.seconds)
    return LosslessPoint(tokens_per_canvas, tokens_per_s, tokens_per_s * causal.seconds / canvases)


def _memory_bytes(config: ModelConfig, form: WeightFormat, sequences: int, length: int) -> float:
    return weight_bytes(config, form) + sequences * cache_bytes(config, length) + _EXTRA_BYTES


def _answer_seconds(
    config: ModelConfig,
    device: Device,
    form: WeightFormat,
    steps: int,
    tokens: int,
    sequences: int,
    context: int,
) -> float:
    """dgemma's convention: K forwards per canvas, the first of which encodes the text before it."""
    efficiency, length = EFFICIENCY[device.device_class], config.canvas_len
    total, text, before = 0.0, context, 0
    for _ in range(-(-tokens // length)):
        canvas = _Work("denoise", sequences, length, before + text)
        first = [canvas] if text == 0 else [_Work("encode", sequences, text, before), canvas]
        total += _forward(config, device, form, first, efficiency).seconds
        total += (steps - 1) * _forward(config, device, form, [canvas], efficiency).seconds
        text, before = length, before + text
    return total


def _causal_answer_seconds(
    config: ModelConfig, device: Device, form: WeightFormat, tokens: int, sequences: int, context: int
) -> float:
    """The prompt's forward writes the first token; the others are taken at their mean context."""
    prompt = _Work("encode", sequences, max(context - 1, 1), 0)
    last = _Work("causal", sequences, 1, max(context - 1, 0))
    # The prompt is a forward of many tokens, like a canvas.
    first_s = _forward(config, device, form, [prompt, last], EFFICIENCY[device.device_class]).seconds
    other = causal_seconds(config, device, form, sequences=sequences, context=context + tokens // 2)
    return first_s + (tokens - 1) * other.seconds


@dataclass(frozen=True)
class GrowthPoint:
    """One setting of a curve. `ratio` to causal is at equal efficiency, so that only the device decides."""

    value: int
    tokens_per_s: float
    causal_tokens_per_s: float  # at diffusion's efficiency
    ratio: float
    limited_by: str
    fits: bool


def growth(
    config: ModelConfig, device: Device, weight_format: str | WeightFormat, *, steps: int = 16
) -> dict[str, tuple[GrowthPoint, ...]]:
    """Speeds by context, by concurrency and by canvas length, one canvas after 1,024 tokens otherwise.

    The steps stay the same: whether a shorter canvas needs fewer is the model's to say, not the device's.
    """
    _check(steps=steps)
    form = _format(weight_format)
    efficiency = EFFICIENCY[device.device_class]

    def point(value: int, config: ModelConfig, canvases: int = 1, context: int = 1024) -> GrowthPoint:
        step = step_seconds(config, device, form, canvases=canvases, context=context)
        causal = causal_seconds(
            config, device, form, sequences=canvases, context=context, efficiency=efficiency
        )
        tokens_per_s = canvases * config.canvas_len / ((steps + 1) * step.seconds)
        memory = _memory_bytes(config, form, canvases, context + config.canvas_len)
        return GrowthPoint(
            value=value,
            tokens_per_s=tokens_per_s,
            causal_tokens_per_s=canvases / causal.seconds,
            ratio=tokens_per_s * causal.seconds / canvases,
            limited_by=step.limited_by,
            fits=memory <= device.memory_bytes,
        )

    return {
        "context": tuple(point(n, config, context=n) for n in _CONTEXTS if n <= config.max_positions),
        "concurrency": tuple(point(n, config, canvases=n) for n in _CONCURRENCY),
        "canvas": tuple(point(n, replace(config, canvas_len=n)) for n in _CANVASES),
    }


def default_format(config: ModelConfig, device: Device) -> str:
    """The first that fits: of the device's published speed, then the narrowest that its units compute in.

    int4 where nothing else fits, or where the units know bf16 alone.
    """
    names = [one.weight_format for one in PUBLISHED if one.device == device.name]
    names += ["nvfp4"] if "fp4" in device.flops else []
    names += ["fp8"] if "fp8" in device.flops else []
    for name in names:
        if _memory_bytes(config, FORMATS[name], 1, 1024 + config.canvas_len) <= device.memory_bytes:
            return name
    return "int4"
