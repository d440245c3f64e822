"""The two passes for a caller with tensors: inputs checked, chunked prefill, and a KV cache that grows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dgemma.errors import InputError
from dgemma.model.config import ModelConfig
from dgemma.model.kv_cache import KVCache
from dgemma.model.transformer import Transformer

# Shapes: batch = rows, tokens = new tokens, canvas = tokens of the canvas.

# Chunked prefill: `encode` runs a long prompt in chunks of at most MAX_CHUNK_TOKENS, and fewer where the
# attention mask [rows, query heads per KV head x tokens, context] would exceed MAX_MASK_ELEMENTS.
MAX_CHUNK_TOKENS = 1024
MAX_MASK_ELEMENTS = 64 << 20


class BlockDiffusionModel:
    """`encode` runs the causal pass and extends a KV cache; `denoise` refines the canvas after it."""

    def __init__(self, transformer: Transformer) -> None:
        self.transformer = transformer

    @property
    def config(self) -> ModelConfig:
        return self.transformer.config

    @property
    def dtype(self) -> torch.dtype:
        return self.transformer.embedding.dtype

    @property
    def device(self) -> torch.device:
        return next(self.transformer.parameters()).device

    def new_cache(self, batch: int = 1, capacity: int | None = None) -> KVCache:
        """An empty KV cache for `batch` rows. It grows as needed; `capacity` tokens are allocated at once."""
        own = self.transformer.part.attention
        return KVCache(own, batch, dtype=self.dtype, device=self.device, capacity=capacity)

    def encode(self, tokens: Tensor, cache: KVCache, lengths: Sequence[int] | Tensor | None = None) -> Tensor:
        """Causal pass over `tokens` [batch, tokens]; appends them to `cache`.

        `lengths`: the number of tokens of each row, for rows of different length (the rest is padding of
        any token, at the end). -> final-normed hidden states [batch, tokens, hidden], zeros in the padding.
        """
        tokens = self._checked(tokens, cache, "tokens")
        remaining = self._lengths(lengths, tokens)
        cache.check_capacity(remaining)
        execution = self.transformer.execution
        block = execution.encode_block if execution.exact else 1
        done = [0] * cache.batch
        joined: Tensor | None = None
        while any(remaining):
            lead = [length % block for length in cache.lengths]
            at_most = chunk_len(self.config, cache.batch, max(cache.lengths), block)
            counts = [min(left, at_most - skip) for left, skip in zip(remaining, lead, strict=True)]
            width = -(-max(map(sum, zip(lead, counts, strict=True))) // block) * block
            chunk = slice_chunk(tokens, done, lead, counts, width)
            hidden, new_kv = self.transformer.encode(
                chunk, cache.context(), lead=tuple(lead), counts=tuple(counts)
            )
            cache.append(new_kv, counts, lead)
            if chunk is tokens:  # one chunk without padding: the usual prompt
                return hidden
            joined = self._zeros(tokens) if joined is None else joined
            for row, (start, skip, count) in enumerate(zip(done, lead, counts, strict=True)):
                joined[row, start : start + count] = hidden[row, skip : skip + count]
            done = [d + c for d, c in zip(done, counts, strict=True)]
            remaining = [r - c for r, c in zip(remaining, counts, strict=True)]
        return self._zeros(tokens) if joined is None else joined

    def denoise(self, canvas: Tensor, cache: KVCache, soft: Tensor | None = None) -> Tensor:
        """One refinement forward of `canvas` [batch, canvas]; the cache is only read.

        `soft` [batch, canvas, hidden]: the soft embedding of the previous step's logits, None at
        the first step of a canvas. -> final-normed hidden states [batch, canvas, hidden].
        """
        canvas = self._checked(canvas, cache, "canvas")
        shape = (*canvas.shape, self.config.hidden_size)
        if soft is not None and tuple(soft.shape) != shape:
            raise InputError.about("soft", f"has shape {list(soft.shape)}; it must be {list(shape)}.")
        cache.check_capacity([canvas.shape[1]] * cache.batch)
        return self.transformer.denoise(canvas, cache.context(), soft)

    def logits(self, hidden: Tensor) -> Tensor:
        """Soft-capped logits in fp32 [..., vocabulary]. Large: 268 MB for one released canvas."""
        return self.transformer.logits(hidden)

    def soft_embedding(self, logits: Tensor) -> Tensor:
        """The mean embedding under softmax(`logits`) [..., hidden], the `soft` of the next step."""
        return self.transformer.soft_embedding(logits)

    def _zeros(self, tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, self.config.hidden_size, dtype=self.dtype, device=self.device)

    def _checked(self, tokens: Tensor, cache: KVCache, name: str) -> Tensor:
        if tokens.ndim != 2 or tokens.dtype not in (torch.int32, torch.int64):
            raise InputError.about(
                name,
                f"is {tokens.dtype} of shape {list(tokens.shape)}; it must be whole numbers [batch, tokens].",
            )
        if tokens.shape[0] != cache.batch or tokens.shape[1] < 1:
            raise InputError.about(
                name,
                f"has shape {list(tokens.shape)}; this cache takes {cache.batch} rows of at least one token.",
            )
        if tokens.device.type == "cpu":  # on other devices the check would synchronize
            low, high = (int(bound) for bound in tokens.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                raise InputError.about(
                    name,
                    f"holds token {low if low < 0 else high}; this vocabulary ends at "
                    f"{self.config.vocab_size - 1}.",
                )
        return tokens.to(self.device)

    def _lengths(self, lengths: Sequence[int] | Tensor | None, tokens: Tensor) -> list[int]:
        rows, width = tokens.shape
        if lengths is None:
            return [width] * rows
        values = [int(n) for n in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
        if len(values) != rows or not all(0 <= n <= width for n in values):
            raise InputError.about(
                "lengths",
                f"is {values}; it must hold one number from 0 to {width} for each of {rows} rows.",
            )
        return values


def chunk_len(config: ModelConfig, rows: int, context: int, block: int) -> int:
    """Tokens of the next prefill chunk after at most `context` tokens, in whole blocks."""
    sharing = config.num_heads // min(shape.num_kv_heads for shape in config.layers)
    mask_per_token = rows * sharing * (context + MAX_CHUNK_TOKENS)
    affordable = MAX_MASK_ELEMENTS // mask_per_token
    return max(64, block, min(MAX_CHUNK_TOKENS, affordable) // block * block)


def slice_chunk(tokens: Tensor, done: list[int], lead: list[int], counts: list[int], width: int) -> Tensor:
    """The next chunk of every row, after its leading padding (token 0)."""
    if width == tokens.shape[1] and not any(lead) and all(count == width for count in counts):
        return tokens
    chunk = tokens.new_zeros(tokens.shape[0], width)
    for row, (start, skipped, count) in enumerate(zip(done, lead, counts, strict=True)):
        chunk[row, skipped : skipped + count] = tokens[row, start : start + count]
    return chunk
