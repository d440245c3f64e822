"""Checkpoints that mlx-vlm and mlx-lm wrote: `quantization` of their config.json, and their stacked experts.

Imports no torch. As everywhere, the shapes in the file decide how a linear is quantized: of the settings of
single modules only the pairs of bits and group size count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from dgemma.checkpoint.names import TensorSpec
from dgemma.checkpoint.quantized.schemes import MlxAffine
from dgemma.checkpoint.quantized.tensor_index import expert_halves
from dgemma.checkpoint.safetensors_file import TensorEntry
from dgemma.errors import ConfigError

BITS = (4, 8)
GROUP_LENS = (32, 64, 128)  # that MLX has
_MAX_MODULES = 100_000


def mlx_schemes(raw: Mapping[str, Any]) -> tuple[MlxAffine, ...] | None:
    """The schemes that `quantization` names, for all modules and for single ones; None without that field."""
    found = raw.get("quantization")
    if found is None:
        return None
    if not isinstance(found, dict) or len(found) > _MAX_MODULES:
        raise ConfigError("quantization is not an object that names bits and group_size; it is corrupt.")
    schemes = {_scheme("quantization", found): None}  # in order, each once
    for module, settings in found.items():
        if isinstance(settings, dict):
            schemes[_scheme(f"quantization of {module!r}", {**found, **settings})] = None
    return tuple(schemes)


def _scheme(where: str, settings: Mapping[str, Any]) -> MlxAffine:
    bits, group_len, mode = (settings.get(name) for name in ("bits", "group_size", "mode"))
    if mode not in (None, "affine"):
        raise ConfigError(f"{where}: mode is {mode!r}; of MLX dgemma reads 'affine'.")
    if type(bits) is not int or bits not in BITS:
        raise ConfigError(f"{where}: bits is {bits!r}; of MLX dgemma reads 4 and 8.")
    if type(group_len) is not int or group_len not in GROUP_LENS:
        raise ConfigError(f"{where}: group_size is {group_len!r}; MLX has 32, 64 and 128.")
    return MlxAffine(bits, group_len)


def unstack_experts(specs: Iterable[TensorSpec], found: dict[str, TensorEntry]) -> None:
    """Give the experts that MLX stacks in one tensor the names they have one by one; in `found`.

    A plain stack (`experts.down_proj.weight`) gets its released name.
    """
    for spec in specs:
        if len(spec.shape) != 3 or f"{spec.name}.weight" not in found:
            continue
        if f"{spec.name}.scales" not in found:
            found.setdefault(spec.name, found.pop(f"{spec.name}.weight"))
            continue
        experts, rows, _ = spec.shape
        parent, _, leaf = spec.name.rpartition(".")
        names = [f"{parent}.{e}.{half}" for e in range(experts) for half in expert_halves(leaf)]
        for part in ("weight", "scales", "biases"):
            entry = found.get(f"{spec.name}.{part}")
            if entry is None or len(entry.shape) != 3 or entry.shape[:2] != (experts, rows):
                break  # what is left is refused by name
            del found[f"{spec.name}.{part}"]
            nbytes = entry.nbytes // len(names)
            shape = (experts * rows // len(names), entry.shape[2])
            for number, name in enumerate(names):
                start = entry.start + number * nbytes
                found[f"{name}.{part}"] = replace(entry, shape=shape, start=start, nbytes=nbytes)
