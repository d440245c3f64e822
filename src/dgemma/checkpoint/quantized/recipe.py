"""What `config.json` says of how a checkpoint was quantized -> the formats its linears may have.

Which linears are quantized is read from the file itself: a module either has a plain weight or the parts of
one of these formats. So lists of ignored modules, whose patterns no two tools read alike, are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgemma.checkpoint.quantized.formats import (
    Awq,
    CompressedNvfp4,
    CompressedPacked,
    CompressedScaled,
    Format,
    ModelOptNvfp4,
)
from dgemma.errors import ConfigError, suggestion

_NVFP4 = "nvfp4-pack-quantized"
_PACKED = "pack-quantized"
_COMPRESSED = (_NVFP4, _PACKED, "int-quantized", "float-quantized", "naive-quantized")
_METHODS = ("compressed-tensors", "modelopt", "awq")
_MAX_GROUPS = 64


def formats_of(raw: Mapping[str, Any]) -> tuple[Format, ...]:
    """The formats that `quantization_config` of a `config.json` names; none where there is no such field."""
    found = raw.get("quantization_config")
    if found is None:
        return ()
    if not isinstance(found, dict):
        raise ConfigError(f"quantization_config is a {type(found).__name__}; it must be an object.")
    method = found.get("quant_method")
    try:
        if method == "compressed-tensors":
            return _compressed(found)
        if method == "modelopt":
            return (_modelopt(found),)
        if method == "awq":
            return (_awq(found),)
        problem = f"quant_method is {method!r}{suggestion(str(method), _METHODS)}"
    except RecursionError:  # from showing a value
        raise ConfigError("quantization_config is nested too deeply; it is corrupt.") from None
    raise ConfigError(f"quantization_config: {problem} dgemma reads {', '.join(_METHODS)}.")


def _modelopt(found: dict[str, Any]) -> Format:
    nested = found.get("quantization")  # where hf_quant_config.json has it
    fields = {**nested, **found} if isinstance(nested, dict) else found
    algorithm = fields.get("quant_algo")
    if algorithm != "NVFP4":
        raise ConfigError(f"modelopt: quant_algo is {algorithm!r}; dgemma reads 'NVFP4'.")
    group = fields.get("group_size", 16)
    if group not in (16, None):
        raise ConfigError(f"modelopt: group_size is {group!r}; NVFP4 has 16.")
    return ModelOptNvfp4()


def _awq(found: dict[str, Any]) -> Format:
    _expect(found, "awq", "bits", (4,))
    _expect(found, "awq", "version", ("gemm", "GEMM"))
    _expect(found, "awq", "zero_point", (True,))
    return Awq(group_len=_group_len(found.get("group_size"), "awq"))


def _compressed(found: dict[str, Any]) -> tuple[Format, ...]:
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not 1 <= len(groups) <= _MAX_GROUPS:
        raise ConfigError("compressed-tensors: config_groups must name 1 to 64 groups of modules.")
    if found.get("sparsity_config"):
        raise ConfigError("compressed-tensors: sparsity_config is not supported; dgemma reads dense weights.")
    if found.get("transform_config"):
        raise ConfigError("compressed-tensors: transform_config is not supported; dgemma rotates no weights.")
    formats: dict[Format, None] = {}  # in order, each once
    for name, group in groups.items():
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise ConfigError(f"compressed-tensors: {name} says nothing about weights.")
        layout = group.get("format") or found.get("format")
        formats[_compressed_format(layout, group["weights"], f"compressed-tensors {name}")] = None
    return tuple(formats)


def _compressed_format(layout: object, weights: dict[str, Any], where: str) -> Format:
    if layout not in _COMPRESSED:
        raise ConfigError(
            f"{where}: format is {layout!r}{suggestion(str(layout), _COMPRESSED)} "
            f"dgemma reads {', '.join(_COMPRESSED)}."
        )
    strategy = weights.get("strategy")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise ConfigError(f"{where}: actorder is {weights['actorder']!r}; dgemma reads groups of neighbours.")
    if layout == _NVFP4:
        _expect(weights, where, "num_bits", (4,))
        _expect(weights, where, "type", ("float",))
        _expect(weights, where, "group_size", (16,))
        return CompressedNvfp4()
    if layout == _PACKED:
        _expect(weights, where, "num_bits", (4, 8))
        _expect(weights, where, "type", ("int",))
        _expect(weights, where, "strategy", ("group", "channel"))
        symmetric = weights.get("symmetric", True)
        _expect({"symmetric": symmetric}, where, "symmetric", (True, False))
        if not symmetric:
            _expect(weights, where, "num_bits", (4,))
        group = _group_len(weights.get("group_size"), where) if strategy == "group" else None
        return CompressedPacked(bits=weights["num_bits"], group_len=group, symmetric=symmetric)
    _expect(weights, where, "num_bits", (8,))
    _expect(weights, where, "type", ("int",) if layout == "int-quantized" else ("float", "int"))
    _expect(weights, where, "symmetric", (True,))
    _expect(weights, where, "strategy", ("tensor", "channel", "block"))
    block = _block(weights.get("block_structure"), where) if strategy == "block" else None
    return CompressedScaled(f"compressed-tensors {layout}", weights["type"] == "int", block)


def _expect(fields: Mapping[str, Any], where: str, name: str, known: tuple[object, ...]) -> None:
    value = fields.get(name)
    if not any(value == one and type(value) is type(one) for one in known):
        raise ConfigError(f"{where}: {name} is {value!r}; dgemma reads {' or '.join(map(repr, known))}.")


def _group_len(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 2 <= value <= 1 << 20 or value % 2:
        raise ConfigError(f"{where}: group_size is {value!r}; it must be an even number of neighbours.")
    return value


def _block(value: object, where: str) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    raise ConfigError(f"{where}: block_structure is {value!r}; it must be two sizes.")
