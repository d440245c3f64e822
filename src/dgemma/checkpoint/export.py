"""Export a checkpoint to other runtimes, from file to file.

Transformers has one stacked tensor for all experts of a layer and cannot fill it from quantized modules, so
the export is plain: quantized weights are dequantized, and an adapter is added in. vLLM reads that too. It
also reads experts as packed integers of compressed-tensors, but self-conditioning only as plain weights.

Memory holds one stored weight and a block of its rows in fp32. Fields that are missing in the configuration
are written out, because runtimes differ in what they take for them.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.checkpoint.adapter import check_base, read_factors
from dgemma.checkpoint.adapter_source import CONFIG, WEIGHTS, AdapterSource, FactorEntries, check_tied_factors
from dgemma.checkpoint.device import stored_dtype
from dgemma.checkpoint.fingerprint import file_fingerprint
from dgemma.checkpoint.load import DTYPE_NAMES, TORCH_DTYPES
from dgemma.checkpoint.merge import merged_chunks
from dgemma.checkpoint.names import TensorSpec, tensor_specs
from dgemma.checkpoint.quantized.quantization_config import QuantizationConfig
from dgemma.checkpoint.quantized.reader import read_module, read_tensor
from dgemma.checkpoint.quantized.schemes import CompressedPacked
from dgemma.checkpoint.quantized.tensor_index import QuantizedEntry, module_names
from dgemma.checkpoint.safetensors_file import TensorEntry, TensorToWrite, read_chunks
from dgemma.checkpoint.save import write_checkpoint
from dgemma.checkpoint.source import CheckpointSource, EmbeddedFile, check_tied_copies, read_generation_config
from dgemma.durable_files import sha256_of
from dgemma.errors import InputError
from dgemma.model.lora import LoraFactors, merged_weight

RUNTIMES = {"hf": "Transformers and vLLM", "vllm": "vLLM"}
_BLOCK_NUMBERS = 1 << 20  # dequantized at once
_GENERATION = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class Export:
    """What is to be written. Everything about the source that can be refused was refused before."""

    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: list[TensorToWrite]
    companions: list[Path | EmbeddedFile]
    identity: str
    num_layers: int
    num_double_scalars: int  # layers whose scalar differs between the two passes

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def plan_export(source: CheckpointSource, adapter: AdapterSource | None = None, *, to: str = "hf") -> Export:
    """The export of `source`, with `adapter` added in. to: of RUNTIMES."""
    plan = _kept_experts(source, adapter) if to == "vllm" else None
    check_tied_copies(source)
    fingerprint = file_fingerprint(source)
    identity = ["export", to, fingerprint]
    if adapter is not None:
        check_base(adapter, fingerprint, source.quantized_from)
        check_tied_factors(adapter)
        identity += [sha256_of(adapter.path / name) for name in (CONFIG, WEIGHTS)]
    tensors: list[TensorToWrite] = []
    for spec in tensor_specs(source.config):
        factors = None if adapter is None else adapter.factors.get(spec.path.removesuffix(".weight"))
        if plan is not None and plan.scheme_of(spec) is not None:
            tensors += _as_stored(spec, source.quantized[spec.name])
        else:
            tensors.append(_plain(spec, source, factors))
    tensors += [TensorToWrite(e.name, e.dtype, e.shape, partial(read_chunks, e)) for e in source.kept_aside]
    return Export(
        config=_config(source, plan),
        generation_config=_generation_config(read_generation_config(source.path) or {}),
        tensors=tensors,
        companions=[file for file in source.companions if file.name != _GENERATION],
        identity=" ".join(identity),
        num_layers=len(source.config.layers),
        num_double_scalars=_num_double_scalars(source),
    )


def write_export(
    path: str | Path,
    export: Export,
    *,
    max_shard_bytes: int = 5_000_000_000,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write into a directory that is new, empty, or left by an interrupted export; config.json comes last."""
    write_checkpoint(
        path,
        export.config,
        export.tensors,
        export.companions,
        max_shard_bytes=max_shard_bytes,
        source=export.identity,
        more_json={_GENERATION: export.generation_config},
        on_bytes=on_bytes,
    )


def _kept_experts(source: CheckpointSource, adapter: AdapterSource | None) -> QuantizationConfig:
    """The quantization that is left of `source` for vLLM: its experts."""
    found = {
        source.quantized[spec.name].scheme if spec.name in source.quantized else None
        for spec in tensor_specs(source.config)
        if spec.part == "experts"
    }
    scheme = found.pop()
    if found or not isinstance(scheme, CompressedPacked):
        name = "several schemes" if found else "plain weights" if scheme is None else scheme.name
        raise InputError(
            f"for vLLM alone experts are exported as packed integers (compressed-tensors pack-quantized); "
            f"those of {source.path} are in {name}. `--to hf` writes plain weights, which vLLM reads too; "
            "`dgemma quantize --format int4` packs experts.",
            field="to",
        )
    if adapter is not None:
        raise InputError(
            "an adapter cannot be added into weights that stay quantized; `--to hf` writes plain ones.",
            field="adapter",
        )
    return QuantizationConfig("experts", scheme, others=None)


def _as_stored(spec: TensorSpec, entry: QuantizedEntry) -> Iterator[TensorToWrite]:
    """The tensors of a quantized weight under the first of its names."""
    for name, module in zip(next(module_names(spec)), entry.modules, strict=True):
        for part, e in module.entries.items():
            yield TensorToWrite(f"{name}.{part}", e.dtype, e.shape, partial(read_chunks, e))


def _plain(spec: TensorSpec, source: CheckpointSource, factors: FactorEntries | None) -> TensorToWrite:
    quantized = source.quantized.get(spec.name)
    if quantized is not None:
        dtype = stored_dtype(source)
        chunks = partial(_dequantized_chunks, quantized, factors, dtype)
        return TensorToWrite(spec.name, DTYPE_NAMES[dtype], spec.shape, chunks)
    entry = source.entries[spec.name]
    copied = partial(read_chunks, entry) if factors is None else partial(merged_chunks, entry, factors)
    return TensorToWrite(spec.name, entry.dtype, spec.shape, copied)


def _dequantized_chunks(
    entry: QuantizedEntry, factors: FactorEntries | None, dtype: torch.dtype
) -> Iterator[Any]:
    """The bytes of a weight, dequantized and summed in fp32 and rounded once, some rows at a time."""
    out, inner = entry.module_shape
    added = None if factors is None else read_factors(factors)
    num_rows = max(1, _BLOCK_NUMBERS // inner)
    for number, stored in enumerate(entry.modules):
        module = read_module(entry, stored)
        for begin in range(0, out, num_rows):
            end = min(begin + num_rows, out)
            block: Tensor = module[begin:end].dequantize(torch.float32)
            if added is not None:
                block = merged_weight(block, _rows(added, entry.shape[-2], number * out + begin, end - begin))
            yield block.to(dtype).view(-1).view(torch.uint8).numpy()


def rows_in_float32(tensor: TensorToWrite) -> Iterator[Tensor]:
    """The rows of a tensor that would be written, some at a time: [rows, in] (a vector is one row)."""
    inner = tensor.shape[-1]
    stored = TORCH_DTYPES[tensor.dtype]
    row_bytes = inner * stored.itemsize
    at_once = max(1, _BLOCK_NUMBERS // inner) * row_bytes
    left = b""
    for chunk in tensor.chunks():
        left += bytes(chunk)
        whole = len(left) // row_bytes * row_bytes
        for begin in range(0, whole, at_once):
            block = bytearray(left[begin : min(begin + at_once, whole)])
            yield torch.frombuffer(block, dtype=stored).view(-1, inner).float()
        left = left[whole:]


def _rows(added: LoraFactors, rows_each: int, begin: int, count: int) -> LoraFactors:
    """The factors of neighbouring rows of one matrix; `rows_each`: of each expert's."""
    if added.down.ndim == 2:
        return LoraFactors(down=added.down, up=added.up[begin : begin + count], alpha=added.alpha)
    expert, begin = divmod(begin, rows_each)
    up = added.up[expert, begin : begin + count]
    return LoraFactors(down=added.down[expert], up=up, alpha=added.alpha)


def _config(source: CheckpointSource, plan: QuantizationConfig | None) -> dict[str, Any]:
    """`config.json` with every field of the geometry: where one is missing, vLLM has other defaults."""
    raw, ours = source.raw_config, source.config.to_json()
    config = _completed(raw, ours)
    config["text_config"] = _completed(raw["text_config"], ours["text_config"])
    config["text_config"]["layer_types"] = ours["text_config"]["layer_types"]  # the last one is always full
    for name in ("quantization_config", "quantization", "dgemma", "torch_dtype"):
        config.pop(name, None)
    if source.quantized or "dtype" not in config:
        config["dtype"] = str(stored_dtype(source)).removeprefix("torch.")
    if plan is not None:
        config["quantization_config"] = plan.to_json()
    return config


def _generation_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The sampler's settings: vLLM does not start where one is missing."""
    file = importlib.resources.files("dgemma") / "data" / "tokenizer" / _GENERATION
    defaults = json.loads(file.read_text(encoding="utf-8"))
    config = _completed(raw, defaults)
    sampler = raw.get("sampler_config")
    config["sampler_config"] = _completed(
        sampler if isinstance(sampler, dict) else {}, defaults["sampler_config"]
    )
    return config


def _completed(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`raw`, and what it lacks or has as null."""
    return {**raw, **{name: value for name, value in defaults.items() if raw.get(name) is None}}


def _num_double_scalars(source: CheckpointSource) -> int:
    def stored(path: str) -> dict[str, TensorEntry]:
        return {
            spec.path.split(".")[1]: source.entries[spec.name]
            for spec in tensor_specs(source.config)
            if spec.path.endswith(path)
        }

    causal, denoising = stored(".causal_scalar"), stored(".denoising_scalar")
    return sum(not torch.equal(read_tensor(causal[at]), read_tensor(denoising[at])) for at in causal)
