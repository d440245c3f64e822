"""Save a transformer in the released layout, shard by shard."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.checkpoint.load import DTYPE_NAMES
from dgemma.checkpoint.names import tensor_specs, vision_specs
from dgemma.checkpoint.safetensors_file import TensorToWrite, header_of, read_chunks, write_file
from dgemma.checkpoint.source import CheckpointSource, EmbeddedFile, read_json
from dgemma.durable_files import locked, sha256_of, sync_directory, write_whole
from dgemma.errors import CheckpointError, InputError
from dgemma.model.quantized_linear import QuantizedWeight
from dgemma.model.transformer import Transformer

JOURNAL = "unfinished.json"


def save(
    transformer: Transformer,
    path: str | Path,
    source: CheckpointSource | None = None,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write `transformer`, and from `source` the companion files and, as they are, the vision tensors.

    dtype: of the file; None: as in memory.
    """
    if any(isinstance(module, QuantizedWeight) for module in transformer.modules()):
        raise InputError("this model is quantized; copy its directory. Only plain weights are written anew.")
    tensors = []
    specs = list(tensor_specs(transformer.config))
    if source is None:
        specs += vision_specs(transformer.config)
    for spec in specs:
        tensor = _at(transformer, spec.path)
        written = dtype or tensor.dtype
        content = _bytes_of(tensor, written)
        tensors.append(TensorToWrite(spec.name, DTYPE_NAMES[written], spec.shape, content))
    config = transformer.config.to_json()
    companions: list[Path | EmbeddedFile] = []
    if source is not None:
        config = dict(source.raw_config)
        companions = source.companions
        tensors += [
            TensorToWrite(e.name, e.dtype, e.shape, partial(read_chunks, e)) for e in source.kept_aside
        ]
    config["dtype"] = str(dtype or transformer.embedding.dtype).removeprefix("torch.")
    write_checkpoint(path, config, tensors, companions, max_shard_bytes=max_shard_bytes)


def write_checkpoint(
    path: str | Path,
    config: dict[str, Any],
    tensors: Iterable[TensorToWrite],
    companions: Iterable[Path | EmbeddedFile] = (),
    *,
    max_shard_bytes: int,
    source: str | None = None,
    more_json: Mapping[str, dict[str, Any]] = {},
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """`write_shards` of files that are as large as `max_shard_bytes` allows."""
    if max_shard_bytes < 1:
        raise InputError.about("max_shard_bytes", f"is {max_shard_bytes}; it must be positive.")
    shards = list(_shards(tensors, max_shard_bytes))
    write_shards(path, config, shards, companions, source=source, more_json=more_json, on_bytes=on_bytes)


def write_shards(
    path: str | Path,
    config: dict[str, Any],
    shards: Sequence[Sequence[TensorToWrite]],
    companions: Iterable[Path | EmbeddedFile] = (),
    *,
    source: str | None,
    more_json: Mapping[str, dict[str, Any]] = {},
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write a checkpoint into a directory that is new, empty, or left by an interrupted run.

    source: identifies the numbers of the tensors; a run of the same source, configuration and layout keeps
    the complete files of an interrupted one. None: every file is written anew.
    more_json: small files beside the companions, by name.
    """
    directory = Path(path)
    refuse_taken(directory)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    names = names if len(names) > 1 else ["model.safetensors"]
    with locked(directory):
        refuse_taken(directory)  # again: another writer may have finished
        try:
            journal = _Journal(directory, _identity(source, config, shards), names)
            for companion in companions:
                write_whole(directory / companion.name, companion.read_bytes())
            for name, content in more_json.items():
                write_json(directory / name, content)
            for name, shard in zip(names, shards, strict=True):
                if not journal.has(name):
                    journal.add(name, write_file(directory / name, shard, on_bytes))
                elif on_bytes is not None:
                    on_bytes(sum(tensor.nbytes for tensor in shard))
            if len(names) > 1:
                _write_index(directory, dict(zip(names, shards, strict=True)))
            # Last: config.json marks the checkpoint as complete.
            write_json(directory / "config.json", config)
            journal.remove()
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be written: {error.strerror}.") from error


class _Journal:
    """`unfinished.json`: there while a checkpoint is incomplete, with the SHA-256 of each complete file."""

    def __init__(self, directory: Path, identity: str | None, names: Collection[str]) -> None:
        self._directory, self._file = directory, directory / JOURNAL
        self._identity = identity
        self._sums: dict[str, Any] = {}
        if self._file.exists():
            before = self._read()
            if before["of"] != identity:
                raise CheckpointError(
                    f"{directory} holds the unfinished work of another model, format or option; remove it, "
                    "or choose another directory."
                )
            if identity is not None:
                self._sums = before["files"]
            for stale in directory.glob("model*.safetensors*"):
                if stale.name not in names:
                    stale.unlink()
        self._write()

    def has(self, name: str) -> bool:
        """Whether the file is there with the bytes that were written."""
        file = self._directory / name
        return name in self._sums and file.is_file() and sha256_of(file) == self._sums[name]

    def add(self, name: str, sha256: str) -> None:
        self._sums[name] = sha256
        self._write()

    def remove(self) -> None:
        self._file.unlink()
        sync_directory(self._directory)

    def _write(self) -> None:
        write_json(self._file, {"of": self._identity, "files": self._sums})

    def _read(self) -> dict[str, Any]:
        try:
            found = read_json(self._file)
        except CheckpointError as error:
            raise CheckpointError(f"{error} {self._remedy}") from None
        if "of" not in found or not isinstance(found.get("files"), dict):
            raise CheckpointError(f"{self._file} has no 'of' and 'files'; it is corrupt. {self._remedy}")
        return found

    @property
    def _remedy(self) -> str:
        return f"What {self._directory} holds is unknown: remove it, or choose another directory."


def _identity(
    source: str | None, config: dict[str, Any], shards: Iterable[Iterable[TensorToWrite]]
) -> str | None:
    if source is None:
        return None
    digest = hashlib.sha256(json.dumps([source, config], sort_keys=True).encode())
    for shard in shards:
        digest.update(header_of(shard))
    return digest.hexdigest()


def write_config(directory: Path, config: dict[str, Any]) -> None:
    with locked(directory):
        try:
            write_json(directory / "config.json", config)
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be written: {error.strerror}.") from error


def refuse_taken(directory: Path) -> None:
    """Refuse a directory that holds a checkpoint: overwriting could leave a mixture of two."""
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; give a directory.")
    if (directory / JOURNAL).exists():
        return  # an interrupted run, which may go on
    if (directory / "config.json").exists() or any(directory.glob("*.safetensors")):
        raise CheckpointError(f"{directory} already holds a checkpoint; choose another directory.")


def write_json(file: Path, content: dict[str, Any]) -> None:
    write_whole(file, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def _write_index(directory: Path, shards: Mapping[str, Sequence[TensorToWrite]]) -> None:
    weight_map = {tensor.name: name for name, shard in shards.items() for tensor in shard}
    total = sum(tensor.nbytes for shard in shards.values() for tensor in shard)
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


def _bytes_of(tensor: Tensor, dtype: torch.dtype) -> Callable[[], Iterable[Any]]:
    return lambda: [tensor.detach().to("cpu", dtype).contiguous().view(-1).view(torch.uint8).numpy()]
