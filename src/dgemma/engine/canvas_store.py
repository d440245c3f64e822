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
    """Every slot has room for the model's own canvas; a shorter one is the beginning of its slot."""

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

    def read(self, slots: Sequence[int], canvas_len: int) -> tuple[CanvasState, Tensor]:
        """States and soft embeddings of some rows, all with canvases of `canvas_len`."""
        index = self._index(slots)
        parts = {
            part.name: _positions(getattr(self._state, part.name), canvas_len).index_select(0, index)
            for part in fields(CanvasState)
        }
        return CanvasState(**parts), _positions(self._soft, canvas_len).index_select(0, index)

    def write(self, slots: Sequence[int], state: CanvasState, soft: Tensor | None) -> None:
        """`soft` None: no guess was made yet, which zeros say."""
        index, canvas_len = self._index(slots), state.canvas.shape[1]
        for part in fields(CanvasState):
            own = _positions(getattr(self._state, part.name), canvas_len)
            own.index_copy_(0, index, getattr(state, part.name))
        if soft is None:
            self._soft.index_fill_(0, index, 0)
        else:
            _positions(self._soft, canvas_len).index_copy_(0, index, soft)

    def _index(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(list(slots), device=self._soft.device)


def _positions(tensor: Tensor, canvas_len: int) -> Tensor:
    """The first positions of each slot; a tensor of one number per slot as it is."""
    return tensor if tensor.ndim == 1 else tensor[:, :canvas_len]
