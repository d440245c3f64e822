"""`quantization_config` of `config.json`: read the schemes that it names, and write one. Imports no torch.

Reading: the tensors of the file determine which linears are quantized: a module has either a plain weight or
the tensors of one of these schemes. So the lists of ignored modules, whose patterns each tool interprets
differently, are not read.

Writing (`dgemma quantize`): experts are nine tenths of the released model and get the requested bits. The
other linears and the embedding get int8 with a scale per row. Routers, norms and scalars are not quantized:
they are small, and a router error sends a token to another expert. The layout is that of compressed-tensors
with one module per expert. What other runtimes do not read of it, `checkpoint/export.py` dequantizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dgemma.checkpoint.names import TensorSpec
from dgemma.checkpoint.quantized.schemes import (
    Awq,
    CompressedNvfp4,
    CompressedPacked,
    CompressedScaled,
    ModelOptNvfp4,
    QuantizationScheme,
)
from dgemma.checkpoint.quantized.tensor_index import module_names
from dgemma.checkpoint.safetensors_file import ITEM_BYTES
from dgemma.errors import ConfigError, InputError, suggestion
from dgemma.model.config import ModelConfig

_NVFP4 = "nvfp4-pack-quantized"
_PACKED = "pack-quantized"
_COMPRESSED = (_NVFP4, _PACKED, "int-quantized", "float-quantized", "naive-quantized")
_METHODS = ("compressed-tensors", "modelopt", "awq")
_MAX_GROUPS = 64


def schemes_from_config(raw: Mapping[str, Any]) -> tuple[QuantizationScheme, ...]:
    """The schemes that the `quantization_config` of a `config.json` names; none if there is no such field."""
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
    except RecursionError:  # from the repr of a value
        raise ConfigError("quantization_config is nested too deeply; it is corrupt.") from None
    raise ConfigError(f"quantization_config: {problem} dgemma reads {', '.join(_METHODS)}.")


def _modelopt(found: dict[str, Any]) -> QuantizationScheme:
    nested = found.get("quantization")  # the layout of hf_quant_config.json
    fields = {**nested, **found} if isinstance(nested, dict) else found
    algorithm = fields.get("quant_algo")
    if algorithm != "NVFP4":
        raise ConfigError(f"modelopt: quant_algo is {algorithm!r}; dgemma reads 'NVFP4'.")
    group = fields.get("group_size", 16)
    if group not in (16, None):
        raise ConfigError(f"modelopt: group_size is {group!r}; NVFP4 has 16.")
    return ModelOptNvfp4()


def _awq(found: dict[str, Any]) -> QuantizationScheme:
    _expect(found, "awq", "bits", (4,))
    _expect(found, "awq", "version", ("gemm", "GEMM"))
    _expect(found, "awq", "zero_point", (True,))
    return Awq(group_len=_group_len(found.get("group_size"), "awq"))


def _compressed(found: dict[str, Any]) -> tuple[QuantizationScheme, ...]:
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not 1 <= len(groups) <= _MAX_GROUPS:
        raise ConfigError("compressed-tensors: config_groups must name 1 to 64 groups of modules.")
    if found.get("sparsity_config"):
        raise ConfigError("compressed-tensors: sparsity_config is not supported; dgemma reads dense weights.")
    if found.get("transform_config"):
        raise ConfigError("compressed-tensors: transform_config is not supported; dgemma rotates no weights.")
    schemes: dict[QuantizationScheme, None] = {}  # in order, each once
    for name, group in groups.items():
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise ConfigError(f"compressed-tensors: {name} has no entry for weights.")
        layout = group.get("format") or found.get("format")
        schemes[_compressed_scheme(layout, group["weights"], f"compressed-tensors {name}")] = None
    return tuple(schemes)


def _compressed_scheme(layout: object, weights: dict[str, Any], where: str) -> QuantizationScheme:
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
    if not any(value == allowed and type(value) is type(allowed) for allowed in known):
        raise ConfigError(f"{where}: {name} is {value!r}; dgemma reads {' or '.join(map(repr, known))}.")


def _group_len(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 2 <= value <= 1 << 20 or value % 2:
        raise ConfigError(f"{where}: group_size is {value!r}; it must be an even number of neighbours.")
    return value


def _block(value: object, where: str) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    raise ConfigError(f"{where}: block_structure is {value!r}; it must be two sizes.")


INT8 = CompressedScaled("compressed-tensors int-quantized", integers=True)
NVFP4 = CompressedNvfp4()
GROUP_LENS = (32, 16, 8)  # of int4, the first that divides every row
NAMES = ("int8", "int4", "nvfp4")


@dataclass(frozen=True)
class QuantizationConfig:
    """The quantization scheme of each weight."""

    name: str
    experts: QuantizationScheme
    others: QuantizationScheme | None = INT8  # None: they are not quantized

    def scheme_of(self, spec: TensorSpec) -> QuantizationScheme | None:
        """The scheme of this tensor; None: it is not quantized."""
        if spec.part == "router" or len(spec.shape) < 2:
            return None
        return self.experts if spec.part == "experts" else self.others

    def nbytes(self, spec: TensorSpec) -> int | None:
        """Bytes of the quantized data and scales of this tensor; None: it is not quantized."""
        scheme = self.scheme_of(spec)
        if scheme is None:
            return None
        inner = spec.shape[-1]
        modules = len(next(module_names(spec)))
        total = 0
        for name, part in scheme.parts(spec.size // inner // modules, inner).items():
            dtype = "BF16" if name == "weight_scale" and "BF16" in part.dtypes else part.dtypes[0]
            total += math.prod(part.shapes[0]) * ITEM_BYTES[dtype]
        return total * modules

    def to_json(self) -> dict[str, Any]:
        """`quantization_config`, as compressed-tensors reads it."""
        groups = {"group_0": _group(["re:.*experts\\.\\d+\\..*"], self.experts)}
        if self.others is not None:
            groups["group_1"] = _group(["Linear", "Embedding"], self.others)
        layouts = {group["format"] for group in groups.values()}
        return {
            "quant_method": "compressed-tensors",
            "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ["lm_head", "re:.*router.*", "re:.*vision.*"],
            "kv_cache_scheme": None,
        }


def quantization_config_for(name: str, config: ModelConfig) -> QuantizationConfig:
    if name not in NAMES:
        raise InputError(f"the format is {name!r}; known: {', '.join(NAMES)}.", field="format")
    if name == "int8":
        return QuantizationConfig(name, INT8)
    rows = (config.hidden_size, config.expert_size)
    lens = (16,) if name == "nvfp4" else GROUP_LENS
    fitting = [length for length in lens if all(row % length == 0 for row in rows)]
    if not fitting:
        raise InputError(
            f"{name} has groups of {lens[-1]} numbers, but the experts' rows are {rows[0]} and {rows[1]} "
            "long. Use int8.",
            field="format",
        )
    int4 = CompressedPacked(bits=4, group_len=fitting[0])
    return QuantizationConfig(name, NVFP4 if name == "nvfp4" else int4)


def _group(targets: list[str], scheme: QuantizationScheme) -> dict[str, Any]:
    weights: dict[str, Any] = {"symmetric": True, "dynamic": False, "observer": "minmax"}
    match scheme:
        case CompressedPacked():
            layout = "pack-quantized"
            strategy = "channel" if scheme.group_len is None else "group"
            weights |= {"num_bits": scheme.bits, "type": "int", "symmetric": scheme.symmetric}
            weights |= {"strategy": strategy, "group_size": scheme.group_len}
        case CompressedNvfp4():
            layout = "nvfp4-pack-quantized"
            weights |= {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
            weights |= {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": None}
        case _:
            layout = "int-quantized"
            weights |= {"num_bits": 8, "type": "int", "strategy": "channel"}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": layout,
    }
