"""The whole network: one set of weights, two doors.

`encode` is causal and returns the keys and values it computed, for the caller to keep.
`denoise` sees its whole canvas and the context, and writes nothing.
Both end in final-normed hidden states; the vocabulary is a separate step (`logits`), so that nobody
is forced to hold [tokens, vocabulary].
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
from dgemma.model.self_conditioning import SelfConditioning
from dgemma.model.weight import Matrix, PlainMatrix

# Shapes: rows = sequences, tokens = computed now, canvas = tokens of a canvas.


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

    def encode(
        self,
        tokens: Tensor,
        context: Context,
        *,
        lead: tuple[int, ...] | None = None,
        counts: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, Fresh]:
        """Causal forward of `tokens` [rows, tokens], which continue each row's context.

        `lead` and `counts` are for the exact way, whose blocks are aligned to absolute positions:
        row i starts with `lead[i]` tokens of padding, of the rest `counts[i]` count.
        Tokens past a row's count give meaningless hidden states and never reach another token.
        """
        rows, num_tokens = tokens.shape
        lead = lead or (0,) * rows
        counts = counts or (num_tokens,) * rows
        starts = context.lengths - torch.tensor(lead, device=context.lengths.device)
        positions = starts[:, None] + torch.arange(num_tokens, device=tokens.device)
        block = self.execution.encode_block
        attend: dict[LayerKind, Attend]
        if self.execution.exact:
            spans = tuple(
                RowSpan(length, first=length - skipped, stop=length + count)
                for length, skipped, count in zip(context.host_lengths, lead, counts, strict=True)
            )
            attend = {k: attend_encode_by_row(spans, block, self._window(k)) for k in self.config.kinds}
        else:
            masks = {k: encode_mask(positions, context, k, self.config.window) for k in self.config.kinds}
            attend = {kind: self._attend(mask) for kind, mask in masks.items()}
        plan = self._plan(Door.ENCODE, positions, attend, block)
        return self._run(by_block(plan.block, self._embed, tokens), context, plan)

    def denoise(self, canvas: Tensor, context: Context, soft: Tensor | None = None) -> Tensor:
        """Bidirectional forward of `canvas` [rows, canvas] after each row's context.

        `soft` [rows, canvas, hidden] is the previous step's soft embedding; None at the first step.
        -> hidden states [rows, canvas, hidden].
        """
        length = canvas.shape[1]
        positions = context.lengths[:, None] + torch.arange(length, device=canvas.device)
        attend: dict[LayerKind, Attend]
        if self.execution.exact:
            lengths = context.host_lengths
            attend = {k: attend_denoise_by_row(lengths, self._window(k)) for k in self.config.kinds}
        else:
            masks = {k: denoise_mask(context, k, self.config.window, length) for k in self.config.kinds}
            attend = {kind: self._attend(mask) for kind, mask in masks.items()}
        plan = self._plan(Door.DENOISE, positions, attend, length)
        inputs = (canvas,) if soft is None else (canvas, soft)
        return self._run(by_block(plan.block, self._embed_canvas, *inputs), context, plan)[0]

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

    def _embed(self, ids: Tensor) -> Tensor:
        return self.embedding.gather_rows(ids) * self._embedding_scale

    def _embed_canvas(self, ids: Tensor, soft: Tensor | None = None) -> Tensor:
        embedded: Tensor = self.self_conditioning(self._embed(ids), soft)
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

    def _run(self, x: Tensor, context: Context, plan: ForwardPlan) -> tuple[Tensor, Fresh]:
        keys, values = [], []
        recompute = self.execution.recompute_layers and torch.is_grad_enabled()
        for layer, past_k, past_v in zip(self.layers, context.keys, context.values, strict=True):
            if recompute:
                x, key, value = checkpoint(
                    layer, x, past_k, past_v, plan, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x, key, value = layer(x, past_k, past_v, plan)
            keys.append(key)
            values.append(value)
        return by_block(plan.block, self.norm, x), Fresh(tuple(keys), tuple(values))
