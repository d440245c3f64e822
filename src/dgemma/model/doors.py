"""A stack's two doors for a caller with tensors: checked, in pieces, with a cache that keeps itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dgemma.errors import InputError
from dgemma.model.cache import KVCache
from dgemma.model.config import ModelConfig
from dgemma.model.pieces import cut_piece, piece_len
from dgemma.model.stack import Stack

# Shapes: batch = rows, tokens = tokens given now, canvas = tokens of the canvas.


class Doors:
    """`encode` reads text and extends a cache; `denoise` refines a canvas behind it."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack

    @property
    def config(self) -> ModelConfig:
        return self.stack.config

    @property
    def dtype(self) -> torch.dtype:
        return self.stack.embedding.dtype

    @property
    def device(self) -> torch.device:
        return next(self.stack.parameters()).device

    def new_cache(self, batch: int = 1, capacity: int | None = None) -> KVCache:
        """An empty cache for `batch` rows; it grows by itself, `capacity` only saves the growing."""
        return KVCache(self.config, batch, dtype=self.dtype, device=self.device, capacity=capacity)

    def encode(self, tokens: Tensor, cache: KVCache, lengths: Sequence[int] | Tensor | None = None) -> Tensor:
        """Read `tokens` [batch, tokens] causally and append them to `cache`.

        `lengths`: how many tokens of each row count, for rows of different length (the rest is
        padding of any token, at the end). -> final-normed hidden states [batch, tokens, hidden],
        zeros in the padding.
        """
        tokens = self._checked(tokens, cache, "tokens")
        remaining = self._lengths(lengths, tokens)
        cache.check_room(remaining)
        execution = self.stack.execution
        block = execution.encode_block if execution.exact else 1
        done = [0] * cache.batch
        joined: Tensor | None = None
        while any(remaining):
            lead = [length % block for length in cache.lengths]
            at_most = piece_len(self.config, cache.batch, max(cache.lengths), block)
            counts = [min(left, at_most - skip) for left, skip in zip(remaining, lead, strict=True)]
            width = -(-max(map(sum, zip(lead, counts, strict=True))) // block) * block
            piece = cut_piece(tokens, done, lead, counts, width)
            hidden, fresh = self.stack.encode(piece, cache.context(), lead=tuple(lead), counts=tuple(counts))
            cache.append(fresh, counts, lead)
            if piece is tokens:  # one piece without padding: the usual prompt
                return hidden
            joined = self._zeros(tokens) if joined is None else joined
            for row, (start, skip, count) in enumerate(zip(done, lead, counts, strict=True)):
                joined[row, start : start + count] = hidden[row, skip : skip + count]
            done = [d + c for d, c in zip(done, counts, strict=True)]
            remaining = [r - c for r, c in zip(remaining, counts, strict=True)]
        return self._zeros(tokens) if joined is None else joined

    def denoise(self, canvas: Tensor, cache: KVCache, soft: Tensor | None = None) -> Tensor:
        """One refinement forward of `canvas` [batch, canvas]; the cache is only read.

        `soft` [batch, canvas, hidden]: the soft embedding of the previous step's logits, None at a
        canvas's first step. -> final-normed hidden states [batch, canvas, hidden].
        """
        canvas = self._checked(canvas, cache, "canvas")
        shape = (*canvas.shape, self.config.hidden_size)
        if soft is not None and tuple(soft.shape) != shape:
            raise InputError(f"soft has shape {list(soft.shape)}; it must be {list(shape)}.")
        cache.check_room([canvas.shape[1]] * cache.batch)
        return self.stack.denoise(canvas, cache.context(), soft)

    def logits(self, hidden: Tensor) -> Tensor:
        """Soft-capped logits in fp32 [..., vocabulary]. Large: 268 MB for one released canvas."""
        return self.stack.logits(hidden)

    def soft_embedding(self, logits: Tensor) -> Tensor:
        """The mean embedding under softmax(`logits`) [..., hidden], the `soft` of the next step."""
        return self.stack.soft_embedding(logits)

    def _zeros(self, tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, self.config.hidden_size, dtype=self.dtype, device=self.device)

    def _checked(self, tokens: Tensor, cache: KVCache, name: str) -> Tensor:
        if tokens.ndim != 2 or tokens.dtype not in (torch.int32, torch.int64):
            raise InputError(
                f"{name} is {tokens.dtype} of shape {list(tokens.shape)}; it must be whole numbers "
                "[batch, tokens]."
            )
        if tokens.shape[0] != cache.batch or tokens.shape[1] < 1:
            raise InputError(
                f"{name} has shape {list(tokens.shape)}; this cache takes {cache.batch} rows of at "
                "least one token."
            )
        if tokens.device.type == "cpu":  # elsewhere the check would stall the device
            low, high = (int(bound) for bound in tokens.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                raise InputError(
                    f"{name} holds token {low if low < 0 else high}; this vocabulary ends at "
                    f"{self.config.vocab_size - 1}."
                )
        return tokens.to(self.device)

    def _lengths(self, lengths: Sequence[int] | Tensor | None, tokens: Tensor) -> list[int]:
        rows, width = tokens.shape
        if lengths is None:
            return [width] * rows
        values = [int(n) for n in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
        if len(values) != rows or not all(0 <= n <= width for n in values):
            raise InputError(
                f"lengths is {values}; it must hold one number from 0 to {width} for each of {rows} rows."
            )
        return values
