"""A weight that holds no floating-point matrix at all, as a quantized format would."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dgemma.model.linear import ALL, Linear, PlainLinear


class Int8Matrix(Linear):
    def __init__(self, plain: PlainLinear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.scale = nn.Buffer(plain.weight.abs().amax(1, keepdim=True) / 127)
        self.codes = nn.Buffer((plain.weight / self.scale).round().to(torch.int8))

    def wide(self) -> Tensor:
        return self.codes * self.scale

    def multiply(self, x: Tensor, rows: slice = ALL) -> Tensor:
        return x @ self.wide()[rows].T

    def gather_rows(self, ids: Tensor) -> Tensor:
        return self.wide()[ids]

    def mix_rows(self, shares: Tensor, rows: slice = ALL) -> Tensor:
        return shares @ self.wide()[rows]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype
