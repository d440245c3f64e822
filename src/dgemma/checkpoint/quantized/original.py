"""What can be quantized: a plain checkpoint on disk, or random weights that are never on disk at all."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dgemma.checkpoint.fingerprint import file_fingerprint
from dgemma.checkpoint.load import TORCH_DTYPES
from dgemma.checkpoint.names import TensorSpec
from dgemma.checkpoint.quantized.write import Original
from dgemma.checkpoint.random_weights import random_chunks
from dgemma.checkpoint.safetensors_file import TensorEntry, TensorToWrite, read_chunks, read_into
from dgemma.checkpoint.source import CheckpointSource, check_tied_copies
from dgemma.model.config import ModelConfig


def from_checkpoint(source: CheckpointSource) -> Original:
    source.require_plain("quantizing")
    check_tied_copies(source)

    def numbers(spec: TensorSpec, rows: int) -> Iterator[Tensor]:
        entry = source.entries[spec.name]
        inner, dtype = spec.shape[-1], TORCH_DTYPES[entry.dtype]
        for begin in range(0, spec.size // inner, rows):
            block = torch.empty((min(rows, spec.size // inner - begin), inner), dtype=dtype)
            read_into(entry, block.view(-1).view(torch.uint8).numpy(), begin * inner * dtype.itemsize)
            yield block

    return Original(
        config=source.config,
        raw_config=source.raw_config,
        fingerprint=file_fingerprint(source),
        numbers=numbers,
        plain=lambda spec: _as_it_is(spec.name, source.entries[spec.name]),
        kept_aside=tuple(_as_it_is(entry.name, entry) for entry in source.kept_aside),
        companions=tuple(source.companions),
    )


def _as_it_is(name: str, entry: TensorEntry) -> TensorToWrite:
    return TensorToWrite(name, entry.dtype, entry.shape, partial(read_chunks, entry))


def from_random(config: ModelConfig, *, seed: int, companions: tuple[Path, ...] = ()) -> Original:
    """The weights `write_random` would write in bf16, without the file in between."""

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

    return Original(
        config=config,
        raw_config={**config.to_json(), "dtype": "bfloat16"},
        fingerprint=f"random {seed}",
        numbers=numbers,
        plain=plain,
        companions=companions,
    )
