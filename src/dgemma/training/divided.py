"""Tensors of which a rank may hold only rows (DTensor, whose import takes half a second: it is not named)."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_divided(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def own(tensor: Tensor) -> Tensor:
    """The rows of this rank, over the same memory."""
    divided: Any = tensor
    found: Tensor = divided.to_local() if is_divided(tensor) else tensor
    return found


def whole(tensor: Tensor) -> Tensor:
    """All rows, on every rank: all of them must ask."""
    divided: Any = tensor
    found: Tensor = divided.full_tensor() if is_divided(tensor) else tensor
    return found


def own_rows(tensor: Tensor) -> slice:
    """Which rows this rank holds: equal numbers, the last ranks fewer or none."""
    length = tensor.shape[0]
    if not is_divided(tensor):
        return slice(0, length)
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    each = -(-length // mesh.size())
    begin = min(mesh.get_local_rank() * each, length)
    return slice(begin, min(begin + each, length))
