"""Quantize a checkpoint, or random weights, from file to file and layer by layer.

Memory holds a block of rows, and the scales of the weight that is being written. An interrupted run continues
with the first file that is missing or damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.checkpoint.fingerprint import file_fingerprint
from dgemma.checkpoint.load import TORCH_DTYPES
from dgemma.checkpoint.names import TensorSpec, tensor_specs
from dgemma.checkpoint.quantized.quantization_config import QuantizationConfig
from dgemma.checkpoint.quantized.rounding import Round, to_int4, to_int8, to_nvfp4
from dgemma.checkpoint.quantized.schemes import CompressedNvfp4, CompressedPacked, QuantizationScheme
from dgemma.checkpoint.quantized.tensor_index import module_names
from dgemma.checkpoint.random_weights import random_chunks
from dgemma.checkpoint.safetensors_file import TensorEntry, TensorToWrite, read_chunks, read_into
from dgemma.checkpoint.save import write_shards
from dgemma.checkpoint.source import CheckpointSource, EmbeddedFile, check_tied_copies
from dgemma.model.config import ModelConfig

_BLOCK_NUMBERS = 256 << 10  # quantized at once: they fit into the CPU cache

Numbers = Callable[[TensorSpec, int], Iterator[Tensor]]
"""(tensor, number of rows) -> the rows of a weight in order, at most so many [rows, in] at a time."""


@dataclass(frozen=True, kw_only=True)
class QuantizationSource:
    """The weights to quantize: a checkpoint on disk, or random numbers generated on demand."""

    config: ModelConfig
    raw_config: dict[str, Any]
    fingerprint: str
    numbers: Numbers
    plain: Callable[[TensorSpec], TensorToWrite]  # for tensors that are not quantized
    kept_aside: tuple[TensorToWrite, ...] = ()
    companions: tuple[Path | EmbeddedFile, ...] = ()


def write_quantized(
    path: str | Path,
    original: QuantizationSource,
    plan: QuantizationConfig,
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Quantize `original` into a directory that is new, empty, or left by an interrupted run."""
    config = dict(original.raw_config)
    config["quantization_config"] = plan.to_json()
    # Adapters of the original fit this checkpoint too.
    config["dgemma"] = {"quantized_from": original.fingerprint}
    write_shards(
        path,
        config,
        shards_of(original, plan),
        original.companions,
        source=original.fingerprint,
        on_bytes=on_bytes,
    )


def shards_of(original: QuantizationSource, plan: QuantizationConfig) -> list[list[TensorToWrite]]:
    """The files: embedding and self-conditioning, then one file per layer, then the rest."""
    shards: dict[str, list[TensorToWrite]] = {}
    for spec in tensor_specs(original.config):
        scheme = plan.scheme_of(spec)
        shard = shards.setdefault(_shard_name(spec), [])
        shard += [original.plain(spec)] if scheme is None else _quantized(spec, scheme, original.numbers)
    shards["rest"] = [*shards.pop("rest"), *original.kept_aside]
    return list(shards.values())


def _shard_name(spec: TensorSpec) -> str:
    if spec.path.startswith("layers."):
        return spec.path.split(".")[1]
    return "rest" if spec.part == "norms" else "first"


def _quantized(spec: TensorSpec, scheme: QuantizationScheme, numbers: Numbers) -> list[TensorToWrite]:
    """The tensors of a quantized weight. Quantized data comes first: computing it also gives the scales."""
    modules = next(module_names(spec))
    inner = spec.shape[-1]
    out = spec.size // inner // len(modules)
    rows = _RowQuantizer(spec, scheme, numbers, out, len(modules))
    first: list[TensorToWrite] = []
    later: list[TensorToWrite] = []
    for number, module in enumerate(modules):
        for name, part in scheme.parts(out, inner).items():
            dtype, shape = part.dtypes[0], part.shapes[0]
            target, chunks = later, partial(rows.kept, number, "scale")
            if name == scheme.main:
                target, chunks = first, partial(rows.qdata, number)
            elif name == "weight_shape":
                chunks = partial(_bytes, torch.tensor([out, inner]))
            elif name == "weight_global_scale":
                chunks, shape = partial(rows.kept, number, "global_scale"), (1,)
            elif dtype == "F32":
                dtype = "BF16"
            target.append(TensorToWrite(f"{module}.{name}", dtype, shape, chunks))
    return [*first, *later]


class _RowQuantizer:
    """Quantizes one weight, module by module in order, and keeps the scales until they are written."""

    def __init__(
        self, spec: TensorSpec, scheme: QuantizationScheme, numbers: Numbers, out: int, count: int
    ) -> None:
        self._spec, self._numbers, self._out, self._count = spec, numbers, out, count
        self._round: Round = to_int8
        rows = max(1, _BLOCK_NUMBERS // spec.shape[-1])
        if isinstance(scheme, CompressedPacked):
            assert scheme.group_len is not None
            self._round = partial(to_int4, group_len=scheme.group_len)
        elif isinstance(scheme, CompressedNvfp4):
            self._round, rows = to_nvfp4, out  # its global scale is that of the whole module
        # A block does not cross the border of a module.
        self._blocks_per_module = -(-out // min(rows, out))
        while out % self._blocks_per_module:
            self._blocks_per_module += 1
        self._blocks: Iterator[Tensor] | None = None
        self._kept: dict[tuple[int, str], list[Tensor]] = {}

    def qdata(self, number: int) -> Iterable[Any]:
        if number == 0:
            self._blocks = self._numbers(self._spec, self._out // self._blocks_per_module)
            self._kept = {}
        assert self._blocks is not None
        for _ in range(self._blocks_per_module):
            quantized = self._round(next(self._blocks))
            self._kept.setdefault((number, "scale"), []).append(quantized.scale)
            if quantized.global_scale is not None:
                self._kept[number, "global_scale"] = [quantized.global_scale[:1, 0].clone()]
            yield from _bytes(quantized.qdata)
        if number == self._count - 1:
            self._blocks = None

    def kept(self, number: int, name: str) -> Iterable[Any]:
        # Where rows are no whole 8-byte words, `write_file` may put the scales before the quantized data.
        if (number, name) not in self._kept:
            for module in range(self._count):
                for _ in self.qdata(module):
                    pass
        return _bytes(torch.cat(self._kept.pop((number, name))))


def _bytes(tensor: Tensor) -> Iterable[Any]:
    return [tensor.contiguous().view(-1).view(torch.uint8).numpy()]


def disk_bytes(shards: Iterable[Iterable[TensorToWrite]]) -> int:
    return sum(tensor.nbytes for shard in shards for tensor in shard)


def from_checkpoint(source: CheckpointSource) -> QuantizationSource:
    source.require_plain("quantizing")
    check_tied_copies(source)

    def numbers(spec: TensorSpec, rows: int) -> Iterator[Tensor]:
        entry = source.entries[spec.name]
        inner, dtype = spec.shape[-1], TORCH_DTYPES[entry.dtype]
        for begin in range(0, spec.size // inner, rows):
            block = torch.empty((min(rows, spec.size // inner - begin), inner), dtype=dtype)
            read_into(entry, block.view(-1).view(torch.uint8).numpy(), begin * inner * dtype.itemsize)
            yield block

    return QuantizationSource(
        config=source.config,
        raw_config=source.raw_config,
        fingerprint=file_fingerprint(source),
        numbers=numbers,
        plain=lambda spec: _copied(spec.name, source.entries[spec.name]),
        kept_aside=tuple(_copied(entry.name, entry) for entry in source.kept_aside),
        companions=tuple(source.companions),
    )


def _copied(name: str, entry: TensorEntry) -> TensorToWrite:
    return TensorToWrite(name, entry.dtype, entry.shape, partial(read_chunks, entry))


def from_random(config: ModelConfig, *, seed: int, companions: tuple[Path, ...] = ()) -> QuantizationSource:
    """The weights that `write_random` writes in bf16, without the file in between."""

    def numbers(spec: TensorSpec, rows: int) -> Iterator[Tensor]:
        inner = spec.shape[-1]
        left = torch.empty(0, dtype=torch.bfloat16)
        for chunk in random_chunks(spec, "BF16", seed):
            left = torch.cat((left, torch.from_numpy(chunk).view(torch.bfloat16)))
            whole = len(left) // (rows * inner) * rows * inner
            yield from left[:whole].view(-1, rows, inner)
            left = left[whole:].clone()
        if len(left):
            yield left.view(-1, inner)

    def plain(spec: TensorSpec) -> TensorToWrite:
        return TensorToWrite(spec.name, "BF16", spec.shape, partial(random_chunks, spec, "BF16", seed))

    return QuantizationSource(
        config=config,
        raw_config={**config.to_json(), "dtype": "bfloat16"},
        fingerprint=f"random {seed}",
        numbers=numbers,
        plain=plain,
        companions=companions,
    )
