"""A transformer whose forward is a few sums of small integers, for simulations that are about the engine.

Keys and values of a token are rows of tables; a hidden state is a sum of those its position attends to,
weighted by their positions. Wrong, stale or misplaced cache entries therefore change tokens, as they would in
the real one. Sums of integers are exact in fp32, so no bit depends on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dgemma.model.config import LayerKind, ModelConfig
from dgemma.model.execution import Execution
from dgemma.model.kv_cache import AttentionContext, NewKeysValues
from dgemma.model.transformer import AnyContext, DenoiseInput, EncodeInput, Transformer

_WEIGHTS = torch.tensor([1.0, -2.0, 3.0])  # of a position, by its remainder
_MODULUS = 31


class ToyTransformer(Transformer):
    """Two layers, one of each kind, whose two sums make up the hidden state."""

    def __init__(self, config: ModelConfig, execution: Execution, *, seed: int) -> None:
        super().__init__(config, dtype=torch.float32, device="cpu", execution=execution)
        generator = torch.Generator().manual_seed(seed)
        num_layers, head_dim = len(config.layers), config.layers[0].head_dim
        assert config.hidden_size == num_layers * head_dim
        weight = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
        self.embedding.weight.data = weight  # type: ignore[union-attr]
        self.norm.weight.data = torch.ones(config.hidden_size)
        # [keys and values, layers, vocabulary, dim]
        shape = (2, num_layers, config.vocab_size, 1, head_dim)
        self._table = torch.randint(-3, 4, shape, generator=generator).float()
        # How sure it is of a token, from flat to peaked, by the token before.
        self._gain = torch.rand(config.vocab_size, generator=generator) * 0.4

    def forward(self, parts: Sequence[EncodeInput | DenoiseInput]) -> list[tuple[Tensor, NewKeysValues]]:
        return [self._part(part) for part in parts]

    def _part(self, part: EncodeInput | DenoiseInput) -> tuple[Tensor, NewKeysValues]:
        is_causal = isinstance(part, EncodeInput)
        tokens = part.tokens if isinstance(part, EncodeInput) else part.canvas
        new = self._table[:, :, tokens]  # [2, layers, rows, tokens, 1, dim]
        rows, width = tokens.shape
        hidden = torch.zeros(rows, width, self.config.hidden_size)
        for row, length in enumerate(part.context.host_lengths):
            lead, count = 0, width
            if isinstance(part, EncodeInput):
                lead = part.lead[row] if part.lead else 0
                count = part.counts[row] if part.counts else width
            own = slice(lead, lead + count)
            sums = []
            for layer, shape in enumerate(self.config.layers):
                window = self.config.window if shape.kind is LayerKind.SLIDING else self.config.max_positions
                past, positions = _past(part.context, layer, shape.kind, row)
                at = torch.arange(length, length + count)
                every = torch.cat((positions, at))
                stored = torch.cat((past, new[0, layer, row, own, 0] + 5 * new[1, layer, row, own, 0]))
                # A canvas sees all of itself, and the context that its first position sees.
                query = at[:, None] if is_causal else at[:1, None]
                seen = every > query - window
                seen = seen & (every <= query) if is_causal else seen | (every >= length)
                sums.append((seen * _WEIGHTS[every % 3]) @ stored)
            attended = torch.cat(sums, -1).expand(count, -1)
            mixed = attended * (1 + torch.arange(length, length + count)[:, None] % 4)
            mixed = (mixed + 7 * self._table[0, :, tokens[row, own], 0].movedim(0, 1).flatten(1)) % _MODULUS
            hidden[row, own] = (mixed - _MODULUS // 2) * self._gain[tokens[row, own], None]
        if isinstance(part, DenoiseInput) and part.soft is not None:
            hidden = hidden + 0.25 * part.soft
        if isinstance(part, EncodeInput):
            self._write_canvas_pasts(part, new)
        return hidden, NewKeysValues(tuple(new[0]), tuple(new[1]))

    def _write_canvas_pasts(self, part: EncodeInput, new: Tensor) -> None:
        """Give the canvases that are denoised in the same forward the keys and values they follow."""
        for row, past in getattr(part.context, "canvas_pasts", ()):
            length = part.context.host_lengths[row]
            lead = part.lead[row] if part.lead else 0
            stop = length + (part.counts[row] if part.counts else new.shape[3])
            for layer, shape in enumerate(self.config.layers):
                first = past.firsts[shape.kind]
                begin = max(length, first)
                source, gap = (
                    slice(begin - length + lead, stop - length + lead),
                    slice(begin - first, stop - first),
                )
                past.keys[layer][gap] = new[0, layer, row, source]
                past.values[layer][gap] = new[1, layer, row, source]


def _past(context: AnyContext, layer: int, kind: LayerKind, row: int) -> tuple[Tensor, Tensor]:
    """What is stored for a row's past [past, dim], and its positions."""
    length = context.host_lengths[row]
    if isinstance(context, AttentionContext):
        positions = context.positions(kind)[row]
        keys, values = context.keys[layer][row], context.values[layer][row]
        held = positions >= 0
        return (keys + 5 * values)[held, 0], positions[held]
    first = context.firsts[kind][row]
    keys, values = context.keys[layer][row], context.values[layer][row]
    held = slice(0, length - first)
    return (keys[held] + 5 * values[held])[:, 0], torch.arange(first, length)
