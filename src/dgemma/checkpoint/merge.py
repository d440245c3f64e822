"""Merge an adapter into a checkpoint, from file to file: memory holds one matrix at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dgemma.checkpoint.adapter import check_base, read_factors
from dgemma.checkpoint.adapter_source import (
    CONFIG,
    WEIGHTS,
    AdapterSource,
    FactorEntries,
    check_tied_factors,
)
from dgemma.checkpoint.fingerprint import file_fingerprint
from dgemma.checkpoint.load import TORCH_DTYPES
from dgemma.checkpoint.names import tensor_specs
from dgemma.checkpoint.safetensors_file import TensorEntry, TensorToWrite, read_chunks, read_into
from dgemma.checkpoint.save import write_checkpoint
from dgemma.checkpoint.source import CheckpointSource, check_tied_copies
from dgemma.durable_files import sha256_of
from dgemma.model.lora import LoraFactors, merged_weight


def write_merged(
    path: str | Path,
    source: CheckpointSource,
    adapter: AdapterSource,
    *,
    max_shard_bytes: int = 5_000_000_000,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write `source` with `adapter` merged in, each tensor in its dtype on disk."""
    source.require_plain("merging")
    base = file_fingerprint(source)
    check_base(adapter, base)
    check_tied_copies(source)
    check_tied_factors(adapter)
    tensors = []
    for spec in tensor_specs(source.config):
        entry = source.entries[spec.name]
        factors = adapter.factors.get(spec.path.removesuffix(".weight"))
        chunks = partial(read_chunks, entry) if factors is None else partial(merged_chunks, entry, factors)
        tensors.append(TensorToWrite(spec.name, entry.dtype, spec.shape, chunks))
    tensors += [TensorToWrite(e.name, e.dtype, e.shape, partial(read_chunks, e)) for e in source.kept_aside]
    write_checkpoint(
        path,
        source.raw_config,
        tensors,
        source.companions,
        max_shard_bytes=max_shard_bytes,
        source=" ".join(["merged", base, *(sha256_of(adapter.path / name) for name in (CONFIG, WEIGHTS))]),
        on_bytes=on_bytes,
    )


def merged_chunks(entry: TensorEntry, factors: FactorEntries) -> Iterator[Any]:
    """The bytes of a weight with its LoRA factors added, matrix by matrix."""
    added = read_factors(factors)
    rank, inner = added.down.shape[-2:]
    downs, ups = added.down.view(-1, rank, inner), added.up.view(-1, added.up.shape[-2], rank)
    nbytes = entry.nbytes // len(downs)
    for number, (down, up) in enumerate(zip(downs, ups, strict=True)):
        buffer = bytearray(nbytes)
        read_into(entry, buffer, number * nbytes)
        weight = torch.frombuffer(buffer, dtype=TORCH_DTYPES[entry.dtype]).view(-1, inner)
        merged = merged_weight(weight, LoraFactors(down=down, up=up, alpha=added.alpha))
        yield merged.view(-1).view(torch.uint8).numpy()
