"""The whole network: one set of weights, two doors.

`encode` is causal and returns the keys and values it computed, for the caller to keep.
`denoise` sees its whole canvas and the context, and writes nothing.
Both end in final-normed hidden states; the vocabulary is a separate step (`logits`), so that nobody
is forced to hold [tokens, vocabulary].
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dgemma.errors import InputError
from dgemma.model.attention import (
    Attend,
    RowSpan,
    attend_all_rows,
    attend_denoise_by_row,
    attend_encode_by_row,
    denoise_mask,
    encode_mask,
)
from dgemma.model.config import LayerKind, ModelConfig
from dgemma.model.context import Context, Fresh
from dgemma.model.execution import Execution, by_block, default_execution
from dgemma.model.head import Head
from dgemma.model.layer import Door, ForwardPlan, Layer
from dgemma.model.norm import RmsNorm
from dgemma.model.rope import Rope
from dgemma.model.row_contexts import RowContexts, attend_canvases, attend_pieces
from dgemma.model.self_conditioning import SelfConditioning
from dgemma.model.weight import Matrix, PlainMatrix

# Shapes: rows = sequences, tokens = computed now, canvas = tokens of a canvas.


AnyContext = Context | RowContexts


@dataclass(frozen=True)
class EncodePart:
    """Text to be read: what `Stack.encode` takes."""

    tokens: Tensor
    context: AnyContext
    lead: tuple[int, ...] | None = None
    counts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class DenoisePart:
    """Canvases to be refined: what `Stack.denoise` takes."""

    canvas: Tensor
    context: AnyContext
    soft: Tensor | None = None


class Stack(nn.Module):
    embedding: Matrix

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        execution: Execution | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.config = config
        self.execution = execution or default_execution(device, dtype)
        # Rounded to the weight's dtype, as the model was trained.
        self._embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=dtype).item()
        self.embedding = PlainMatrix(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.self_conditioning = SelfConditioning(config, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            Layer(config, shape, dtype=dtype, device=device) for shape in config.layers
        )
        self.norm = RmsNorm(config.hidden_size, config.norm_eps, dtype=dtype, device=device)
        self.rope = Rope(config, device)

    def with_execution(self, execution: Execution) -> Stack:
        """The same weights run another way."""
        twin = copy.copy(self)
        twin.execution = execution
        return twin

    def with_lengths(self, *, canvas_len: int | None = None, max_positions: int | None = None) -> Stack:
        """The same weights with another canvas, or less context; None: as they are."""
        config = self.config
        if max_positions is not None and max_positions > config.max_positions:
            raise InputError(
                f"the context is {max_positions} tokens; this model's ends at {config.max_positions}."
            )
        twin = copy.copy(self)
        twin.config = replace(
            config,
            canvas_len=canvas_len or config.canvas_len,
            max_positions=max_positions or config.max_positions,
        )
        return twin

    def encode(
        self,
        tokens: Tensor,
        context: AnyContext,
        *,
        lead: tuple[int, ...] | None = None,
        counts: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, Fresh]:
        """Causal forward of `tokens` [rows, tokens], which continue each row's context.

        `lead` and `counts` are for the exact way, whose blocks are aligned to absolute positions:
        row i starts with `lead[i]` tokens of padding, of the rest `counts[i]` count.
        Tokens past a row's count give meaningless hidden states and never reach another token.
        """
        return self.forward([EncodePart(tokens, context, lead, counts)])[0]

    def denoise(self, canvas: Tensor, context: AnyContext, soft: Tensor | None = None) -> Tensor:
        """Bidirectional forward of `canvas` [rows, canvas] after each row's context.

        `soft` [rows, canvas, hidden] is the previous step's soft embedding; None at the first step.
        -> hidden states [rows, canvas, hidden].
        """
        return self.forward([DenoisePart(canvas, context, soft)])[0][0]

    def forward(self, parts: Sequence[EncodePart | DenoisePart]) -> list[tuple[Tensor, Fresh]]:
        """Parts that share one pass over the weights -> hidden states, and keys and values, of each."""
        opened = [self._open_encode(p) if isinstance(p, EncodePart) else self._open_denoise(p) for p in parts]
        return self._run([(x, part.context, plan) for part, (x, plan) in zip(parts, opened, strict=True)])

    def _open_encode(self, part: EncodePart) -> tuple[Tensor, ForwardPlan]:
        tokens, context = part.tokens, part.context
        rows, num_tokens = tokens.shape
        lead = part.lead or (0,) * rows
        counts = part.counts or (num_tokens,) * rows
        starts = context.lengths - torch.tensor(lead, device=context.lengths.device)
        positions = starts[:, None] + torch.arange(num_tokens, device=tokens.device)
        block = self.execution.encode_block
        plan = self._plan(
            Door.ENCODE, positions, self._encode_attends(context, positions, lead, counts), block
        )
        return by_block(plan.block, self.embed, tokens), plan

    def _encode_attends(
        self, context: AnyContext, positions: Tensor, lead: tuple[int, ...], counts: tuple[int, ...]
    ) -> dict[LayerKind, Attend]:
        kinds, block = self.config.kinds, self.execution.encode_block
        if isinstance(context, Context) and not self.execution.exact:
            masks = {kind: encode_mask(positions, context, kind, self.config.window) for kind in kinds}
            return {kind: self._attend(mask) for kind, mask in masks.items()}
        spans = tuple(
            RowSpan(length, first=length - skipped, stop=length + count)
            for length, skipped, count in zip(context.host_lengths, lead, counts, strict=True)
        )
        if isinstance(context, Context):
            return {k: attend_encode_by_row(spans, block, self._window(k)) for k in kinds}
        return {k: attend_pieces(context, k, spans, block, self._window(k)) for k in kinds}

    def _open_denoise(self, part: DenoisePart) -> tuple[Tensor, ForwardPlan]:
        canvas, context = part.canvas, part.context
        length = canvas.shape[1]
        positions = context.lengths[:, None] + torch.arange(length, device=canvas.device)
        plan = self._plan(Door.DENOISE, positions, self._denoise_attends(context, length), length)
        inputs = (canvas,) if part.soft is None else (canvas, part.soft)
        return by_block(plan.block, self._embed_canvas, *inputs), plan

    def _denoise_attends(self, context: AnyContext, canvas_len: int) -> dict[LayerKind, Attend]:
        kinds = self.config.kinds
        if isinstance(context, RowContexts):
            return {kind: attend_canvases(context, kind) for kind in kinds}
        if self.execution.exact:
            return {k: attend_denoise_by_row(context.host_lengths, self._window(k)) for k in kinds}
        masks = {kind: denoise_mask(context, kind, self.config.window, canvas_len) for kind in kinds}
        return {kind: self._attend(mask) for kind, mask in masks.items()}

    @property
    def head(self) -> Head:
        return Head(self.embedding, self.config.logit_cap, self._embedding_scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """Soft-capped fp32 logits [..., vocabulary]."""
        return self._by_row(self.head.logits, hidden)

    def soft_embedding(self, logits: Tensor) -> Tensor:
        """The mean embedding under softmax(`logits`), as self-conditioning wants it."""
        dtype = self.embedding.dtype

        def mean(row: Tensor) -> Tensor:
            return self.head.mix(row.to(dtype).softmax(-1, torch.float32)) * self._embedding_scale

        return self._by_row(mean, logits)

    def _by_row(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.execution.exact and x.ndim == 3:
            return torch.cat([function(row) for row in x.split(1)])
        return function(x)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of tokens as the first layer reads them [..., hidden]."""
        return self.embedding.gather_rows(ids) * self._embedding_scale

    def _embed_canvas(self, ids: Tensor, soft: Tensor | None = None) -> Tensor:
        embedded: Tensor = self.self_conditioning(self.embed(ids), soft)
        return embedded

    def _attend(self, mask: Tensor) -> Attend:
        return attend_all_rows(mask, explicit=self.execution.explicit_attention)

    def _window(self, kind: LayerKind) -> int | None:
        return self.config.window if kind is LayerKind.SLIDING else None

    def _plan(
        self, door: Door, positions: Tensor, attend: dict[LayerKind, Attend], block: int
    ) -> ForwardPlan:
        dtype = self.embedding.dtype
        every = block if self.execution.exact else None
        return ForwardPlan(
            door=door,
            execution=self.execution,
            rope={
                kind: by_block(every, partial(self.rope, kind=kind, dtype=dtype), positions)
                for kind in self.config.kinds
            },
            attend=attend,
            block=every,
        )

    def _run(self, parts: Sequence[tuple[Tensor, AnyContext, ForwardPlan]]) -> list[tuple[Tensor, Fresh]]:
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
                    checkpoint(layer, *one, use_reentrant=False, preserve_rng_state=False) for one in inputs
                ]
            elif len(inputs) == 1:
                results = [layer(*inputs[0])]  # a call, which may be compiled
            else:
                assert isinstance(layer, Layer)
                results = layer.forward_all(inputs)
            xs = [x for x, _, _ in results]
            for part, (_, key, value) in enumerate(results):
                keys[part].append(key)
                values[part].append(value)
        return [
            (by_block(plan.block, self.norm, x), Fresh(tuple(k), tuple(v)))
            for x, (_, _, plan), k, v in zip(xs, parts, keys, values, strict=True)
        ]
