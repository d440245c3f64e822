"""Save a transformer in the released layout, shard by shard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.checkpoint.load import TORCH_DTYPES
from dgemma.checkpoint.names import tensor_specs
from dgemma.checkpoint.safetensors_file import TensorToWrite, read_chunks, write_file
from dgemma.checkpoint.source import CheckpointSource
from dgemma.errors import CheckpointError, InputError
from dgemma.model.quantized_linear import QuantizedWeight
from dgemma.model.transformer import Transformer

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def save(
    transformer: Transformer,
    path: str | Path,
    source: CheckpointSource | None = None,
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write `transformer`, and from `source` the vision tensors and the companion files."""
    if any(isinstance(module, QuantizedWeight) for module in transformer.modules()):
        raise InputError("this model is quantized; copy its directory. Only plain weights are written anew.")
    tensors = []
    for spec in tensor_specs(transformer.config):
        tensor = _at(transformer, spec.path)
        dtype = _DTYPE_NAMES[tensor.dtype]
        tensors.append(TensorToWrite(spec.name, dtype, spec.shape, _bytes_of(tensor)))
    config = transformer.config.to_json()
    companions: list[Path] = []
    if source is not None:
        config = dict(source.raw_config)
        companions = source.companions
        tensors += [
            TensorToWrite(e.name, e.dtype, e.shape, partial(read_chunks, e)) for e in source.kept_aside
        ]
    config["dtype"] = str(transformer.embedding.dtype).removeprefix("torch.")
    write_checkpoint(path, config, tensors, companions, max_shard_bytes=max_shard_bytes)


def write_checkpoint(
    path: str | Path,
    config: dict[str, Any],
    tensors: Iterable[TensorToWrite],
    companions: Iterable[Path] = (),
    *,
    max_shard_bytes: int,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write configuration, weights and companion files into a new or empty directory."""
    directory = Path(path)
    if max_shard_bytes < 1:
        raise InputError.about("max_shard_bytes", f"is {max_shard_bytes}; it must be positive.")
    refuse_taken(directory)
    shards = list(_shards(tensors, max_shard_bytes))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for companion in companions:
            shutil.copyfile(companion, directory / companion.name)
        if len(shards) == 1:
            write_file(directory / "model.safetensors", shards[0], on_bytes)
        else:
            _write_shards(directory, shards, on_bytes)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written: {error.strerror}.") from error
    # Last: config.json marks the checkpoint as complete.
    write_config(directory, config)


def write_config(directory: Path, config: dict[str, Any]) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / "config.json", config)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written: {error.strerror}.") from error


def refuse_taken(directory: Path) -> None:
    """Refuse a directory that holds a checkpoint: overwriting could leave a mixture of two."""
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; give a directory.")
    if (directory / "config.json").exists() or any(directory.glob("*.safetensors")):
        raise CheckpointError(f"{directory} already holds a checkpoint; choose another directory.")


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_shards(
    directory: Path, shards: list[list[TensorToWrite]], on_bytes: Callable[[int], None] | None
) -> None:
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(directory / name, shard, on_bytes)
        weight_map.update(dict.fromkeys((tensor.name for tensor in shard), name))
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )


def _shards(tensors: Iterable[TensorToWrite], max_shard_bytes: int) -> Iterator[list[TensorToWrite]]:
    shard: list[TensorToWrite] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.nbytes
    yield shard


def _at(transformer: Transformer, path: str) -> Tensor:
    parent_path, _, leaf = path.rpartition(".")
    tensor = getattr(transformer.get_submodule(parent_path), leaf)
    assert isinstance(tensor, Tensor), path
    return tensor


def _bytes_of(tensor: Tensor) -> Callable[[], Iterable[Any]]:
    return lambda: [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()]
