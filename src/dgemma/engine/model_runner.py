"""Runs what the scheduler decided: one forward for the whole batch, then the sampling step of its rows.

`forward` is one pass over the weights for prompt chunks and canvases; `sample_canvases` turns hidden states
into tokens by a vocabulary scan over rows with the same options (causal_sampling.py: left to right). There is
no logits processor: logits are never held as a whole, so bias, truncation and constraints are part of the
scan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from dgemma.engine.sequence import Encoded, SampleOutput, SequenceState
from dgemma.events import LogProbs
from dgemma.images.preprocess import PlacedImage
from dgemma.model.config import ModelConfig
from dgemma.model.kv_cache import PastKeysValues, join_rows
from dgemma.model.transformer import DenoiseInput, EncodeInput, SoftImage, Transformer
from dgemma.params import GenerationParams
from dgemma.sampling.constrained import CanvasConstraint, scan_constrained
from dgemma.sampling.pinned import (
    CanvasPins,
    apply_allowed_tokens,
    apply_pins,
    watched_log_probs,
)
from dgemma.sampling.rng import NoiseKey, NoiseStream, noise_key, random_tokens
from dgemma.sampling.sampler import CanvasState, LeftOut, Sampler, step
from dgemma.sampling.top_k import NUCLEUS, TopK, truncation_floor
from dgemma.sampling.vocab_scan import (
    ScanOptions,
    VocabScan,
    VocabSplit,
    scale,
    scaled_logits,
    scan_dense,
    scan_vocab,
)

# Shapes: rows = sequences of a batch, canvas = positions of a canvas.


@dataclass(frozen=True)
class PromptChunk:
    """Tokens that join a row's context."""

    tokens: Sequence[int]
    past: PastKeysValues
    # The past of the canvas that follows and is denoised in the same forward; it has a gap for `tokens`.
    canvas: PastKeysValues | None = None
    images: tuple[PlacedImage, ...] = ()  # each among `tokens` as a whole


@dataclass(frozen=True)
class Canvases:
    """The canvases of one length in a denoising forward."""

    tokens: Tensor  # [rows, canvas]
    soft: Tensor  # [rows, canvas, hidden]
    pasts: Sequence[PastKeysValues]


@torch.inference_mode()
def forward(
    model: Transformer, chunks: Sequence[PromptChunk], canvases: Sequence[Canvases]
) -> tuple[list[Encoded], list[Tensor]]:
    """-> the result of each chunk, and the hidden states [rows, canvas, hidden] of each of `canvases`."""
    device = model.norm.weight.device
    encode_block = model.execution.encode_block if model.execution.exact else 1
    skips = [chunk.past.length % encode_block for chunk in chunks]
    widths = [
        -(-(s + len(p.tokens)) // encode_block) * encode_block for s, p in zip(skips, chunks, strict=True)
    ]
    # Chunks of one width share a batch without padding.
    groups = [[i for i, w in enumerate(widths) if w == width] for width in dict.fromkeys(widths)]
    parts: list[EncodeInput | DenoiseInput] = []
    for group in groups:
        rows = [chunks[i] for i in group]
        lead, counts = tuple(skips[i] for i in group), tuple(len(row.tokens) for row in rows)
        tokens = torch.zeros(len(group), widths[group[0]], dtype=torch.int64)
        for number, (row, skip, count) in enumerate(zip(rows, lead, counts, strict=True)):
            tokens[number, skip : skip + count] = torch.tensor(row.tokens)
        context = join_rows([row.past for row in rows], device, [row.canvas for row in rows])
        images = tuple(tuple(soft_image(model, image) for image in row.images) for row in rows)
        parts.append(EncodeInput(tokens.to(device), context, lead, counts, images=images))
    parts += [DenoiseInput(c.tokens, join_rows(c.pasts, device), c.soft) for c in canvases]
    results = model.forward(parts) if parts else []
    encoded: dict[int, Encoded] = {}
    for group, (hidden, fresh) in zip(groups, results, strict=False):
        for number, i in enumerate(group):
            end = skips[i] + len(chunks[i].tokens)
            encoded[i] = Encoded(hidden[number, skips[i] : end], fresh, number, skips[i])
    in_order = [encoded[i] for i in range(len(chunks))]
    return in_order, [hidden for hidden, _ in results[len(groups) :]]


def soft_image(model: Transformer, image: PlacedImage) -> SoftImage:
    """The soft tokens of an image, computed alone: they do not depend on what else is in the batch."""
    assert model.vision is not None
    patches = image.patches
    values = torch.from_numpy(patches.values()).to(model.norm.weight.device)
    return SoftImage(image.start, model.vision(values, patches.rows, patches.columns))


def scan_rows(
    model: Transformer,
    hidden: Tensor,
    temperature: Tensor,
    key: NoiseKey | None,
    params: GenerationParams,
    bias: Tensor | None = None,
    pins: Sequence[CanvasPins | None] | None = None,
) -> VocabScan:
    """Scan the vocabulary for `hidden` [rows, canvas, hidden] at a temperature per row.

    `bias` [rows, vocabulary] is added to the logits. Positions that all `pins` know are left out: their
    result is zero. In exact mode each row is scanned alone, so that its bits do not depend on the batch.
    """
    return stack_rows(
        [
            _read(*arguments, None if pins is None else pins[part])
            for part, arguments in _parts(model, hidden, temperature, key, params, bias)
        ]
    )


def scan_tokens(
    model: Transformer,
    hidden: Tensor,
    temperature: Tensor,
    key: NoiseKey | None,
    params: GenerationParams,
    bias: Tensor | None = None,
) -> VocabScan:
    """The next token of each row, from `hidden` [rows, 1, hidden]: `scan_rows` without soft embeddings."""
    parts = _parts(model, hidden, temperature, key, params, bias)
    return stack_rows([_read_token(*arguments) for _, arguments in parts])


def _parts(
    model: Transformer,
    hidden: Tensor,
    temperature: Tensor,
    key: NoiseKey | None,
    params: GenerationParams,
    bias: Tensor | None,
) -> Iterator[
    tuple[slice, tuple[Transformer, Tensor, Tensor, NoiseKey | None, GenerationParams, Tensor | None]]
]:
    """The rows that are scanned together, and what of the arguments is theirs."""
    if bias is not None:
        bias = scale(bias[:, None], temperature)[:, 0]
    count = hidden.shape[0]
    parts = [slice(row, row + 1) for row in range(count)] if model.execution.exact else [slice(0, count)]
    for part in parts:
        own_key = key if key is None or part == slice(0, count) else key.row(part.start)
        own_bias = None if bias is None else bias[part]
        yield part, (model, hidden[part], temperature[part], own_key, params, own_bias)


def sample_step(
    model: Transformer,
    state: CanvasState,
    hidden: Tensor,
    key: NoiseKey,
    sampler: Sampler,
    params: GenerationParams,
    bias: Tensor | None = None,
    pins: Sequence[CanvasPins | None] | None = None,
    constraints: Sequence[CanvasConstraint] | None = None,
    left_out: LeftOut | None = None,
) -> tuple[CanvasState, VocabScan]:
    """From a forward's hidden states to the next canvases: scan the vocabulary, accept and renoise.

    `pins`: the pinned positions of each canvas. `constraints`: the constraint of each canvas, if the rows
    are constrained. Without constraints, reads nothing back from the device. `left_out`: what the canvases
    are shorter by.
    """
    # int32, as the reference counts: the temperature's last bit depends on it.
    left = (sampler.num_steps - state.steps).to(torch.int32)
    temperature = sampler.schedule(left, sampler.num_steps)
    if sampler.unmask is not None:
        bias = _without_mask(bias, state.canvas, model.config)
    draws = key if params.temperature > 0 else None
    if constraints is None:
        scan = scan_rows(model, hidden, temperature, draws, params, bias, pins)
    else:
        scan = scan_constrained_rows(model, hidden, temperature, draws, params, bias, pins, constraints)
    free = None
    if pins is not None and any(pins):
        free = torch.stack(
            [torch.ones_like(state.canvas[0], dtype=torch.bool) if p is None else p.free for p in pins]
        )
        scan = apply_pins(scan, state.canvas, free, model.embed(state.canvas))
        for row, row_pins in enumerate(pins):
            if row_pins is not None and row_pins.allowed is not None and constraints is None:
                only = slice(row, row + 1)
                own = None if bias is None else scale(bias[only, None], temperature[only])[:, 0]
                scan = apply_allowed_tokens(
                    scan, row, hidden[row], model.head, temperature[only], draws, row_pins.allowed, own
                )
    noise = canvas_noise(sampler, key, NoiseStream.RENOISE, state.canvas.shape[1], model.config)
    return step(state, scan, noise, sampler, free, left_out), scan


def canvas_noise(
    sampler: Sampler, key: NoiseKey, stream: NoiseStream, canvas_len: int, config: ModelConfig
) -> Tensor:
    """What a position without a token holds [rows, canvas]: a random token, or the mask."""
    if sampler.unmask is None:
        return random_tokens(key, stream, canvas_len, config.vocab_size)
    assert config.mask_token is not None, "requests are checked before"
    return torch.full((len(key.seed), canvas_len), config.mask_token, device=key.seed.device)


def _without_mask(bias: Tensor | None, canvas: Tensor, config: ModelConfig) -> Tensor:
    """The bias [rows, vocabulary] that also forbids the mask: a position that got it would stay masked."""
    if bias is None:
        bias = torch.zeros(canvas.shape[0], config.vocab_size, device=canvas.device)
    return bias.index_fill(1, torch.tensor([config.mask_token], device=canvas.device), float("-inf"))


def log_probs(scan: VocabScan) -> TopK | None:
    """The top-k tokens with their log-probabilities, if the scan kept them."""
    if scan.top_k is None:
        return None
    return TopK(scan.top_k.tokens, scan.top_k.logits - scan.log_mass[..., None])


@torch.inference_mode()
def compile_ahead(model: Transformer) -> None:
    """Compile the fused vocabulary scan of one canvas now, not in the first step of a request."""
    config, device = model.config, model.norm.weight.device
    shape = (1, config.canvas_len, config.hidden_size)
    hidden = torch.zeros(shape, dtype=model.embedding.dtype, device=device)
    key = noise_key([0], [0], [0], device)
    scan_rows(model, hidden, torch.ones(1, device=device), key, GenerationParams())


def scan_constrained_rows(
    model: Transformer,
    hidden: Tensor,
    temperature: Tensor,
    key: NoiseKey | None,
    params: GenerationParams,
    bias: Tensor | None,
    pins: Sequence[CanvasPins | None] | None,
    constraints: Sequence[CanvasConstraint],
) -> VocabScan:
    """`scan_rows` for constrained canvases, each row alone."""
    if bias is not None:
        bias = scale(bias[:, None], temperature)[:, 0]
    scans = []
    for row, own in enumerate(constraints):
        only = slice(row, row + 1)
        own_bias = None if bias is None else bias[only]
        floor = _floor(model, hidden[only], temperature[only], params, own_bias)
        scans.append(
            scan_constrained(
                hidden[only],
                model.head,
                temperature[only],
                None if key is None else key.row(row),
                own,
                pins=None if pins is None else pins[row],
                bias=own_bias,
                floor=floor,
                num_top_k=params.logprobs or 0,
            )
        )
    return stack_rows(scans)


def _read(
    model: Transformer,
    hidden: Tensor,
    temperature: Tensor,
    key: NoiseKey | None,
    params: GenerationParams,
    bias: Tensor | None,
    pins: Sequence[CanvasPins | None] | None,
) -> VocabScan:
    head, canvas_len = model.head, hidden.shape[1]
    compiled = model.execution.fused_vocabulary
    positions = None
    if pins is not None and not compiled:  # a compiled scan has one shape
        positions = _unknown_positions(pins, canvas_len, hidden.device)
    if positions is not None:
        hidden = hidden.index_select(1, positions)
    options = ScanOptions(bias=bias, num_top_k=params.logprobs or 0, compiled=compiled)
    floor = _floor(model, hidden, temperature, params, bias)
    options, split = replace(options, floor=floor), vocab_split(model)
    scan = scan_vocab(hidden, head, temperature, key, options, positions=positions, split=split)
    return scan if positions is None else _on_canvas(scan, positions, canvas_len)


def _unknown_positions(
    pins: Sequence[CanvasPins | None], canvas_len: int, device: torch.device
) -> Tensor | None:
    """Positions that at least one canvas does not know; None: all of them. Never none: a scan has a row."""
    if any(canvas is None for canvas in pins):
        return None
    known = frozenset(range(canvas_len)).intersection(
        *(canvas.known for canvas in pins if canvas is not None)
    )
    if not known:
        return None
    return torch.tensor([p for p in range(canvas_len) if p not in known] or [0], device=device)


def _on_canvas(scan: VocabScan, positions: Tensor, canvas_len: int) -> VocabScan:
    """A scan of some positions as one of the whole canvas, zero elsewhere."""

    def spread(values: Tensor) -> Tensor:
        whole = values.new_zeros(values.shape[0], canvas_len, *values.shape[2:])
        return whole.index_copy_(1, positions, values)

    found: dict[str, Any] = {}
    for field in fields(VocabScan):
        value = getattr(scan, field.name)
        if isinstance(value, TopK):
            value = TopK(spread(value.tokens), spread(value.logits))
        elif value is not None:
            value = spread(value)
        found[field.name] = value
    return VocabScan(**found)


def vocab_split(model: Transformer) -> VocabSplit | None:
    """How the vocabulary is divided over the ranks of the model; None: it is not."""
    head = model.head
    if head.part is None:
        return None
    ranks = head.part.ranks
    return VocabSplit(head=head.own, rank=ranks.rank, tokens=head.part.vocabs, gather=ranks.gather)


def _floor(
    model: Transformer, hidden: Tensor, temperature: Tensor, params: GenerationParams, bias: Tensor | None
) -> Tensor | None:
    """The logit below which top-k and top-p drop tokens [rows, canvas]: one more scan of the vocabulary."""
    if params.top_k is None and params.top_p is None:
        return None
    count = NUCLEUS if params.top_p is not None else params.top_k
    first_options = ScanOptions(bias=bias, num_top_k=count or 0, with_soft=False)
    first = scan_vocab(hidden, model.head, temperature, None, first_options, split=vocab_split(model))
    assert first.top_k is not None
    return truncation_floor(first.top_k, first.log_mass, params.top_k, params.top_p)


def _read_token(
    model: Transformer,
    hidden: Tensor,
    temperature: Tensor,
    key: NoiseKey | None,
    params: GenerationParams,
    bias: Tensor | None,
) -> VocabScan:
    """One position per row [rows, 1, hidden], in causal mode: dense logits are small enough."""
    head = model.head
    scaled = scaled_logits(head.products(hidden), head.logit_cap, temperature)
    if bias is not None:
        scaled = scaled + bias[:, None]
    if params.top_k is not None or params.top_p is not None:
        top = scaled.topk(min(NUCLEUS, scaled.shape[-1]))
        top_k = TopK(top.indices, top.values)
        floor = truncation_floor(top_k, scaled.logsumexp(-1), params.top_k, params.top_p)
        scaled = torch.where(scaled < floor[..., None], float("-inf"), scaled)
    scan = scan_dense(scaled, key)
    if params.logprobs:
        top = scaled.topk(params.logprobs)
        scan = replace(scan, top_k=TopK(top.indices, top.values))
    return scan


def stack_rows(scans: Sequence[VocabScan]) -> VocabScan:
    if len(scans) == 1:
        return scans[0]
    joined: dict[str, Any] = {}
    for field in fields(VocabScan):
        values = [getattr(scan, field.name) for scan in scans]
        if isinstance(values[0], TopK):
            joined[field.name] = TopK(*(torch.cat(part) for part in zip(*values, strict=True)))
        else:
            joined[field.name] = None if values[0] is None else torch.cat(values)
    return VocabScan(**joined)


@dataclass(frozen=True)
class Stepped:
    """A canvas after a step, to be written to its slot."""

    state: CanvasState  # of one row
    soft: Tensor | None  # [1, canvas, hidden]


def sample_canvases(
    model: Transformer, state: CanvasState, sequences: Sequence[SequenceState], hidden: Tensor
) -> list[tuple[SampleOutput, Stepped]]:
    """One sampling step of the canvases in `state`, from `hidden` [rows, canvas, hidden].

    Changes no state. The caller writes the stepped canvases once nothing of the step can fail any more: a
    batch that fails is repeated row by row from the state before it.
    """
    key = _noise_key(sequences, [sequence.steps for sequence in sequences], hidden.device)
    first = sequences[0]
    state, scan = sample_step(
        model,
        state,
        hidden,
        key,
        first.sampler,
        first.request.params,
        logit_bias(model, sequences, hidden.device),
        [sequence.pins for sequence in sequences],
        None
        if first.constraint_state is None
        else [sequence.canvas_constraint for sequence in sequences if sequence.canvas_constraint is not None],
        LeftOut([sequence.num_certain for sequence in sequences], model.config.canvas_len)
        if first.sizes_canvas
        else None,
    )
    # The only host sync of a step.
    settled = state.settled.tolist()
    top_k = split_rows(log_probs(scan), len(sequences))
    watched = [
        _watched(model, sequence.pins, hidden[row]) if settled[row] else ()
        for row, sequence in enumerate(sequences)
    ]
    samples = map(SampleOutput, state.argmax, scan.entropy, top_k, settled, watched)
    rows = [slice(row, row + 1) for row in range(len(sequences))]
    soft = scan.soft
    stepped = [Stepped(_part(state, row), None if soft is None else soft[row]) for row in rows]
    return list(zip(samples, stepped, strict=True))


def _watched(model: Transformer, pins: CanvasPins | None, hidden: Tensor) -> tuple[tuple[int, LogProbs], ...]:
    if pins is None or pins.watched is None:
        return ()
    found = watched_log_probs(hidden, model.head, pins.watched, pins.allowed)
    positions, tokens = pins.watched.positions.tolist(), pins.watched.tokens
    return tuple(
        (position, tuple(zip(own.tolist(), values.tolist(), strict=True)))
        for position, own, values in zip(positions, tokens, found, strict=True)
    )


def _noise_key(sequences: Sequence[SequenceState], steps: Sequence[int], device: torch.device) -> NoiseKey:
    outputs = [sequence.output for sequence in sequences]
    return noise_key(
        [output.seed for output in outputs], [output.canvas for output in outputs], steps, device
    )


def _part(state: CanvasState, rows: slice) -> CanvasState:
    return CanvasState(**{part.name: getattr(state, part.name)[rows] for part in fields(CanvasState)})


def split_rows(top_k: TopK | None, count: int) -> list[TopK | None]:
    if top_k is None:
        return [None] * count
    return [TopK(top_k.tokens[row], top_k.logits[row]) for row in range(count)]


def logit_bias(model: Transformer, sequences: Sequence[SequenceState], device: torch.device) -> Tensor | None:
    """The logit bias of each row [rows, vocabulary]; rows with and without one are not batched together."""
    if not sequences[0].request.logit_bias:
        return None
    bias = torch.zeros(len(sequences), model.config.vocab_size, device=device)
    for row, sequence in enumerate(sequences):
        tokens, values = zip(*sequence.request.logit_bias, strict=True)
        bias[row, list(tokens)] = torch.tensor(values, device=device)
    return bias
