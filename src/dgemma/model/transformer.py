"""The network: one set of weights, two passes over it.

`encode` is the causal pass: it returns the keys and values it computed, and the caller stores them in a KV
cache. `denoise` is the denoising pass: each canvas token attends to the whole canvas and to the context, and
nothing is written. Both end in final-normed hidden states. The vocabulary projection is a separate step
(`logits`), so that a caller never has to allocate [tokens, vocabulary].

From top to bottom: the layer (attention, shared MLP, MoE), self-conditioning, the head, the transformer.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dgemma.errors import InputError
from dgemma.model.attention import (
    Attend,
    Attention,
    Past,
    Rope,
    RowSpan,
    Segments,
    attend_all_rows,
    attend_causal_by_row,
    attend_denoising_by_row,
    attend_ragged_causal,
    attend_ragged_denoising,
    causal_mask,
    denoising_mask,
    packed_causal_mask,
)
from dgemma.model.config import LayerKind, ModelConfig
from dgemma.model.execution import Execution, by_block, default_execution
from dgemma.model.kv_cache import AttentionContext, NewKeysValues, RaggedContext
from dgemma.model.layers import GatedMlp, RmsNorm, rms_norm
from dgemma.model.linear import ALL, Linear, PlainLinear
from dgemma.model.model_part import ModelPart
from dgemma.model.moe import Experts, Router
from dgemma.model.ranks import ALONE, Ranks, VocabPart
from dgemma.model.vision import VisionTower

# Shapes: rows = sequences, tokens = computed now, canvas = tokens of a canvas, k = experts per token,
# vocab = the vocabulary, or a tile of it.


class PassMode(enum.Enum):
    """Which of the two passes runs."""

    CAUSAL = "causal"  # `encode`
    DENOISING = "denoising"  # `denoise`


@dataclass(frozen=True, kw_only=True)
class ForwardPlan:
    """What all layers of one forward share."""

    mode: PassMode
    execution: Execution
    rope: dict[LayerKind, tuple[Tensor, Tensor]]  # [rows, tokens, 1, dim]
    attend: dict[LayerKind, Attend]
    block: int | None  # tokens per block, if blocks run one by one


LayerInput = tuple[Tensor, Past, Past, ForwardPlan]
"""The residual [rows, tokens, hidden], past keys and values, and the plan of the forward."""


class _BeforeExperts(NamedTuple):
    """The state of one part after attention and before the experts."""

    x: Tensor
    shared: Tensor
    routed: tuple[Tensor, ...]  # the experts' arguments: inputs, chosen experts, routing weights
    key: Tensor
    value: Tensor


class Layer(nn.Module):
    """One transformer layer: attention, then the shared MLP and the experts (MoE) in parallel."""

    def __init__(
        self, part: ModelPart, number: int, *, dtype: torch.dtype, device: torch.device, ranks: Ranks
    ) -> None:
        super().__init__()
        config, shape = part.config, part.attention.layers[number]
        self.kind = shape.kind

        def norm() -> RmsNorm:
            return RmsNorm(config.hidden_size, config.norm_eps, dtype=dtype, device=device)

        self.attention = Attention(part.attention, shape, dtype=dtype, device=device, ranks=ranks)
        self.mlp = _mlp(part, dtype=dtype, device=device, ranks=ranks)
        self.router = Router(config, dtype=dtype, device=device)
        self.experts = Experts(config, dtype=dtype, device=device, part=part, ranks=ranks)
        self.before_attention = norm()
        self.after_attention = norm()
        self.before_mlp = norm()
        self.after_mlp = norm()
        self.before_experts = norm()
        self.after_experts = norm()
        self.after_both = norm()
        # The only weights that the two passes do not share.
        for mode in PassMode:
            self.register_buffer(f"{mode.value}_scalar", torch.empty(1, dtype=dtype, device=device))

    def forward(
        self, x: Tensor, past_k: Past, past_v: Past, plan: ForwardPlan
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> the new residual [rows, tokens, hidden], new keys and new values."""
        return self.forward_all([(x, past_k, past_v, plan)])[0]

    def forward_all(self, parts: Sequence[LayerInput]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The layer on several parts of one forward, each in its own pass mode.

        The experts, which are most of the weights, run once on the tokens of all parts.
        """
        states = [self._until_experts(*part) for part in parts]
        inputs = [
            torch.cat([t.flatten(0, 1) for t in tensors])
            for tensors in zip(*(s.routed for s in states), strict=True)
        ]
        expert_outputs = self.experts(*inputs, parts[0][3].execution).split(
            [s.x.shape[0] * s.x.shape[1] for s in states]
        )
        results = []
        for part, state, expert_output in zip(parts, states, expert_outputs, strict=True):
            plan = part[3]
            x = by_block(plan.block, self._after, state.x, state.shared, expert_output.view_as(state.x))
            results.append((x * self.get_buffer(f"{plan.mode.value}_scalar"), state.key, state.value))
        return results

    def _until_experts(self, x: Tensor, past_k: Past, past_v: Past, plan: ForwardPlan) -> _BeforeExperts:
        cos, sin = plan.rope[self.kind]
        query, key, value = by_block(plan.block, self._before, x, cos, sin)
        attended = plan.attend[self.kind](query, past_k, past_v, key, value).flatten(2)
        x, shared, *routed = by_block(plan.block, self._between, x, attended)
        return _BeforeExperts(x, shared, tuple(routed), key, value)

    def _before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return self.attention.project(self.before_attention(x), cos, sin)

    def _between(self, x: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
        x = x + self.after_attention(self.attention.merge(attended))
        shared = self.after_mlp(self.mlp(self.before_mlp(x)))
        weights, chosen = self.router(x)
        return x, shared, self.before_experts(x), chosen, weights

    def _after(self, x: Tensor, shared: Tensor, expert_output: Tensor) -> Tensor:
        change: Tensor = self.after_both(shared + self.after_experts(expert_output))
        return x + change


def _mlp(part: ModelPart, *, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> GatedMlp:
    width = part.mlp.stop - part.mlp.start
    return GatedMlp(part.config.hidden_size, width, dtype=dtype, device=device, ranks=ranks)


class SelfConditioning(nn.Module):
    """Adds the previous step's soft embedding, through an MLP, to the canvas embedding, and norms the sum."""

    def __init__(self, part: ModelPart, *, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> None:
        super().__init__()
        config = part.config
        self.eps = config.norm_eps
        self.norm = RmsNorm(config.hidden_size, config.norm_eps, dtype=dtype, device=device)
        self.mlp = _mlp(part, dtype=dtype, device=device, ranks=ranks)

    def forward(self, embedded: Tensor, soft: Tensor | None) -> Tensor:
        """`soft` [rows, canvas, hidden]; None means zeros, whose term is exactly zero."""
        if soft is not None:
            embedded = embedded + self.mlp(self.norm(soft))
        return rms_norm(embedded, None, self.eps)


@dataclass(frozen=True)
class Head:
    """The vocabulary projection (tied embedding), whole or one vocabulary tile at a time.

    part: the tokens that this rank holds, if they are divided. Every rank gets whole results.
    """

    embedding: Linear
    logit_cap: float
    embedding_scale: float
    part: VocabPart | None = None

    @property
    def vocab_size(self) -> int:
        return self.embedding.out_features if self.part is None else self.part.vocab_size

    def products(self, hidden: Tensor, vocab: slice = ALL) -> Tensor:
        """Raw logits without soft-cap [rows, tokens, vocab], in the model's dtype."""
        if self.part is None:
            return self.embedding.multiply(hidden, vocab)
        return self.part.gather_products(self.embedding, hidden, vocab)

    def logits(self, hidden: Tensor, vocab: slice = ALL) -> Tensor:
        """Soft-capped fp32 logits [rows, tokens, vocab]."""
        return torch.tanh(self.products(hidden, vocab).float() / self.logit_cap) * self.logit_cap

    def mix(self, shares: Tensor, vocab: slice = ALL) -> Tensor:
        """The sum of embeddings weighted by `shares` [rows, tokens, vocab], not scaled yet."""
        shares = shares.to(self.embedding.dtype)
        if self.part is None:
            return self.embedding.mix_rows(shares, vocab)
        return self.part.sum_of_shares(self.embedding, shares, vocab)

    @property
    def own(self) -> OwnHead:
        """The tokens that this rank holds, without a word to the others."""
        assert self.part is not None
        return OwnHead(self, self.part.own.start)


@dataclass(frozen=True)
class OwnHead:
    """A head that knows only the tokens of one rank; tokens keep their numbers."""

    head: Head
    start: int

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    @property
    def logit_cap(self) -> float:
        return self.head.logit_cap

    @property
    def embedding_scale(self) -> float:
        return self.head.embedding_scale

    def products(self, hidden: Tensor, vocab: slice) -> Tensor:
        return self.head.embedding.multiply(hidden, self._rows(vocab))

    def mix(self, shares: Tensor, vocab: slice) -> Tensor:
        embedding = self.head.embedding
        return embedding.mix_rows(shares.to(embedding.dtype), self._rows(vocab))

    def _rows(self, vocab: slice) -> slice:
        return slice(vocab.start - self.start, vocab.stop - self.start)


AnyContext = AttentionContext | RaggedContext


@dataclass(frozen=True)
class SoftImage:
    """An image for a causal pass: its soft tokens take the places of the tokens from position `start` on."""

    start: int
    soft: Tensor  # [soft tokens, hidden]

    @property
    def stop(self) -> int:
        return self.start + len(self.soft)


@dataclass(frozen=True)
class EncodeInput:
    """Arguments of `Transformer.encode`: tokens for a causal pass.

    images: only with a `RaggedContext`; each is among `tokens` as a whole.
    """

    tokens: Tensor
    context: AnyContext
    lead: tuple[int, ...] | None = None
    counts: tuple[int, ...] | None = None
    segments: Segments | None = None
    images: tuple[tuple[SoftImage, ...], ...] | None = None  # of each row


@dataclass(frozen=True)
class DenoiseInput:
    """Arguments of `Transformer.denoise`: canvases for a denoising pass."""

    canvas: Tensor
    context: AnyContext
    soft: Tensor | None = None


class Transformer(nn.Module):
    """Embedding, layers and head with the two passes `encode` (causal) and `denoise` (denoising)."""

    embedding: Linear

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        execution: Execution | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """ranks: that compute it together; this one gets its part of the weights."""
        super().__init__()
        device = torch.device(device)
        self.config = config
        self.ranks = ranks
        part = self.part
        self._vocab_part = VocabPart(part.vocabs, ranks) if part.divides_vocab else None
        self.execution = execution or default_execution(device, dtype)
        # Rounded to the weight's dtype, as in training.
        self._embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=dtype).item()
        num_tokens = part.vocab.stop - part.vocab.start
        self.embedding = PlainLinear(num_tokens, config.hidden_size, dtype=dtype, device=device)
        self.self_conditioning = SelfConditioning(part, dtype=dtype, device=device, ranks=ranks)
        self.layers = nn.ModuleList(
            Layer(part, number, dtype=dtype, device=device, ranks=ranks)
            for number in range(len(config.layers))
        )
        self.norm = RmsNorm(config.hidden_size, config.norm_eps, dtype=dtype, device=device)
        self.rope = Rope(config, device)
        # Whole on every rank. Only the causal pass of a prompt with images uses it.
        self.vision = (
            None
            if config.vision is None
            else VisionTower(config.vision, config.hidden_size, dtype=dtype, device=device)
        )

    @property
    def part(self) -> ModelPart:
        """What this rank holds."""
        return ModelPart(self.config, self.ranks.rank, self.ranks.size)

    def with_execution(self, execution: Execution) -> Transformer:
        """The same weights with another execution."""
        changed = copy.copy(self)
        changed.execution = execution
        return changed

    def with_lengths(self, *, canvas_len: int | None = None, max_positions: int | None = None) -> Transformer:
        """The same weights with another canvas length or a shorter context; None: unchanged."""
        config = self.config
        if max_positions is not None and max_positions > config.max_positions:
            raise InputError(
                f"the context is {max_positions} tokens; this model's ends at {config.max_positions}.",
                field="max_positions",
            )
        changed = copy.copy(self)
        changed.config = replace(
            config,
            canvas_len=canvas_len or config.canvas_len,
            max_positions=max_positions or config.max_positions,
        )
        return changed

    def encode(
        self,
        tokens: Tensor,
        context: AnyContext,
        *,
        lead: tuple[int, ...] | None = None,
        counts: tuple[int, ...] | None = None,
        segments: Segments | None = None,
    ) -> tuple[Tensor, NewKeysValues]:
        """Causal pass over `tokens` [rows, tokens], which continue each row's context.

        `lead` and `counts` are for exact execution, whose blocks are aligned to absolute positions: row i
        starts with `lead[i]` tokens of padding, followed by `counts[i]` tokens. Tokens past a row's count
        have meaningless hidden states, and no other token attends to them.

        `segments`: several sequences packed into each row, for training; the context is empty.
        """
        return self.forward([EncodeInput(tokens, context, lead, counts, segments)])[0]

    def denoise(self, canvas: Tensor, context: AnyContext, soft: Tensor | None = None) -> Tensor:
        """Denoising pass: bidirectional forward of `canvas` [rows, canvas] after each row's context.

        `soft` [rows, canvas, hidden] is the previous step's soft embedding; None at the first step.
        -> hidden states [rows, canvas, hidden].
        """
        return self.forward([DenoiseInput(canvas, context, soft)])[0][0]

    def forward(self, parts: Sequence[EncodeInput | DenoiseInput]) -> list[tuple[Tensor, NewKeysValues]]:
        """Run parts of both modes in one pass over the weights -> each part's hidden states and new KV."""
        prepared = [
            self._prepare_encode(p) if isinstance(p, EncodeInput) else self._prepare_denoise(p) for p in parts
        ]
        return self._run([(x, part.context, plan) for part, (x, plan) in zip(parts, prepared, strict=True)])

    def _prepare_encode(self, part: EncodeInput) -> tuple[Tensor, ForwardPlan]:
        tokens, context = part.tokens, part.context
        if part.segments is not None:
            positions = part.segments.positions
            masks = {k: packed_causal_mask(part.segments, k, self.config.window) for k in self.config.kinds}
            attend = {kind: self._attend(mask) for kind, mask in masks.items()}
            return self.embed(tokens), self._plan(PassMode.CAUSAL, positions, attend, tokens.shape[1])
        rows, num_tokens = tokens.shape
        lead = part.lead or (0,) * rows
        counts = part.counts or (num_tokens,) * rows
        starts = context.lengths - torch.tensor(lead, device=context.lengths.device)
        positions = starts[:, None] + torch.arange(num_tokens, device=tokens.device)
        block = self.execution.encode_block
        images = part.images or ((),) * rows
        attend = self._causal_attention(context, positions, lead, counts, images)
        plan = self._plan(PassMode.CAUSAL, positions, attend, block)
        embedded = by_block(plan.block, self.embed, tokens)
        for row, own in enumerate(images):
            first = context.host_lengths[row] - lead[row] if own else 0
            for image in own:
                embedded[row, image.start - first : image.stop - first] = image.soft
        return embedded, plan

    def _causal_attention(
        self,
        context: AnyContext,
        positions: Tensor,
        lead: tuple[int, ...],
        counts: tuple[int, ...],
        images: tuple[tuple[SoftImage, ...], ...],
    ) -> dict[LayerKind, Attend]:
        kinds, block = self.config.kinds, self.execution.encode_block
        assert isinstance(context, RaggedContext) or not any(images)
        if isinstance(context, AttentionContext) and not self.execution.exact:
            masks = {kind: causal_mask(positions, context, kind, self.config.window) for kind in kinds}
            return {kind: self._attend(mask) for kind, mask in masks.items()}
        spans = tuple(
            RowSpan(
                length,
                first=length - skipped,
                stop=length + count,
                images=tuple((x.start, x.stop) for x in own) if self.config.sees_whole_images else (),
            )
            for length, skipped, count, own in zip(context.host_lengths, lead, counts, images, strict=True)
        )
        if isinstance(context, AttentionContext):
            return {k: attend_causal_by_row(spans, block, self._window(k)) for k in kinds}
        return {k: attend_ragged_causal(context, k, spans, block, self._window(k)) for k in kinds}

    def _prepare_denoise(self, part: DenoiseInput) -> tuple[Tensor, ForwardPlan]:
        canvas, context = part.canvas, part.context
        length = canvas.shape[1]
        positions = context.lengths[:, None] + torch.arange(length, device=canvas.device)
        plan = self._plan(PassMode.DENOISING, positions, self._denoising_attention(context, length), length)
        inputs = (canvas,) if part.soft is None else (canvas, part.soft)
        return by_block(plan.block, self._embed_canvas, *inputs), plan

    def _denoising_attention(self, context: AnyContext, canvas_len: int) -> dict[LayerKind, Attend]:
        kinds = self.config.kinds
        if isinstance(context, RaggedContext):
            return {kind: attend_ragged_denoising(context, kind) for kind in kinds}
        if self.execution.exact:
            return {k: attend_denoising_by_row(context.host_lengths, self._window(k)) for k in kinds}
        masks = {kind: denoising_mask(context, kind, self.config.window, canvas_len) for kind in kinds}
        return {kind: self._attend(mask) for kind, mask in masks.items()}

    @property
    def head(self) -> Head:
        return Head(self.embedding, self.config.logit_cap, self._embedding_scale, self._vocab_part)

    def logits(self, hidden: Tensor) -> Tensor:
        """Soft-capped fp32 logits [..., vocabulary]."""
        return self._by_row(self.head.logits, hidden)

    def soft_embedding(self, logits: Tensor) -> Tensor:
        """The mean embedding under softmax(`logits`): the input of self-conditioning."""
        dtype = self.embedding.dtype

        def mean(row: Tensor) -> Tensor:
            return self.head.mix(row.to(dtype).softmax(-1, torch.float32)) * self._embedding_scale

        return self._by_row(mean, logits)

    def _by_row(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.execution.exact and x.ndim == 3:
            return torch.cat([function(row) for row in x.split(1)])
        return function(x)

    def embed(self, ids: Tensor) -> Tensor:
        """Scaled token embeddings [..., hidden], the first layer's input."""
        part = self._vocab_part
        rows = self.embedding.gather_rows(ids) if part is None else part.gather_rows(self.embedding, ids)
        return rows * self._embedding_scale

    def _embed_canvas(self, ids: Tensor, soft: Tensor | None = None) -> Tensor:
        embedded: Tensor = self.self_conditioning(self.embed(ids), soft)
        return embedded

    def _attend(self, mask: Tensor) -> Attend:
        return attend_all_rows(mask, explicit=self.execution.explicit_attention)

    def _window(self, kind: LayerKind) -> int | None:
        return self.config.window if kind is LayerKind.SLIDING else None

    def _plan(
        self, mode: PassMode, positions: Tensor, attend: dict[LayerKind, Attend], block: int
    ) -> ForwardPlan:
        dtype = self.embedding.dtype
        exact_block = block if self.execution.exact else None
        return ForwardPlan(
            mode=mode,
            execution=self.execution,
            rope={
                kind: by_block(exact_block, partial(self.rope, kind=kind, dtype=dtype), positions)
                for kind in self.config.kinds
            },
            attend=attend,
            block=exact_block,
        )

    def _run(
        self, parts: Sequence[tuple[Tensor, AnyContext, ForwardPlan]]
    ) -> list[tuple[Tensor, NewKeysValues]]:
        xs = [x for x, _, _ in parts]
        keys: list[list[Tensor]] = [[] for _ in parts]
        values: list[list[Tensor]] = [[] for _ in parts]
        recompute = self.execution.recompute_layers and torch.is_grad_enabled()
        for number, layer in enumerate(self.layers):
            inputs = [
                (x, c.keys[number], c.values[number], plan) for x, (_, c, plan) in zip(xs, parts, strict=True)
            ]
            if recompute:
                results = [
                    checkpoint(layer, *layer_input, use_reentrant=False, preserve_rng_state=False)
                    for layer_input in inputs
                ]
            elif len(inputs) == 1:
                results = [layer(*inputs[0])]  # through __call__, which may be compiled
            else:
                assert isinstance(layer, Layer)
                results = layer.forward_all(inputs)
            xs = [x for x, _, _ in results]
            for part, (_, key, value) in enumerate(results):
                keys[part].append(key)
                values[part].append(value)
        return [
            (by_block(plan.block, self.norm, x), NewKeysValues(tuple(k), tuple(v)))
            for x, (_, _, plan), k, v in zip(xs, parts, keys, values, strict=True)
        ]
