"""The canvases of all slots: tensors made once, whose rows come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from dgemma.model.config import ModelConfig
from dgemma.sampling.sampler import CanvasState

# Shapes: slots = canvases there is room for, rows = of these, the ones asked for.


class CanvasStore:
    def __init__(self, config: ModelConfig, count: int, *, dtype: torch.dtype, device: torch.device) -> None:
        shape = (count, config.canvas_len)
        self._state = CanvasState(
            canvas=torch.zeros(shape, dtype=torch.int64, device=device),
            accepted=torch.zeros(shape, dtype=torch.bool, device=device),
            argmax=torch.zeros(shape, dtype=torch.int64, device=device),
            unchanged=torch.zeros(count, dtype=torch.int64, device=device),
            steps=torch.zeros(count, dtype=torch.int64, device=device),
            settled=torch.zeros(count, dtype=torch.bool, device=device),
        )
        self._soft = torch.zeros(*shape, config.hidden_size, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        tensors = [self._soft, *(getattr(self._state, field.name) for field in fields(CanvasState))]
        return sum(tensor.nbytes for tensor in tensors)

    def read(self, slots: Sequence[int]) -> tuple[CanvasState, Tensor]:
        """States and soft embeddings of some rows."""
        index = self._index(slots)
        parts = {f.name: getattr(self._state, f.name).index_select(0, index) for f in fields(CanvasState)}
        return CanvasState(**parts), self._soft.index_select(0, index)

    def write(self, slots: Sequence[int], state: CanvasState, soft: Tensor | None) -> None:
        """`soft` None: no guess was made yet, which zeros say."""
        index = self._index(slots)
        for field in fields(CanvasState):
            getattr(self._state, field.name).index_copy_(0, index, getattr(state, field.name))
        if soft is None:
            self._soft.index_fill_(0, index, 0)
        else:
            self._soft.index_copy_(0, index, soft)

    def _index(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(list(slots), device=self._soft.device)
