"""Quantize a checkpoint from file to file, layer by layer.

Memory holds a block of rows, and of the weight being written its scales. An interrupted run goes on with the
first file that is missing: each file appears under its name only when it is whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.checkpoint.names import TensorSpec, tensor_specs
from dgemma.checkpoint.quantized.entries import module_names
from dgemma.checkpoint.quantized.formats import CompressedNvfp4, CompressedPacked, Format
from dgemma.checkpoint.quantized.plan import QuantizationPlan
from dgemma.checkpoint.quantized.rounding import Round, to_int4, to_int8, to_nvfp4
from dgemma.checkpoint.safetensors_file import TensorToWrite, write_file
from dgemma.checkpoint.save import write_json
from dgemma.errors import CheckpointError
from dgemma.model.config import ModelConfig

_BLOCK_NUMBERS = 256 << 10  # rounded at once: they stay in the cache meanwhile
_STATE = "quantize.json"  # there while the work is unfinished: what it was begun with

Numbers = Callable[[TensorSpec, int], Iterator[Tensor]]
"""A weight's rows in order, [at most so many, in] at a time."""


@dataclass(frozen=True, kw_only=True)
class Original:
    """What is quantized: a checkpoint on disk, or numbers made as they are asked for."""

    config: ModelConfig
    raw_config: dict[str, Any]
    fingerprint: str
    numbers: Numbers
    plain: Callable[[TensorSpec], TensorToWrite]  # for what stays as it is
    kept_aside: tuple[TensorToWrite, ...] = ()
    companions: tuple[Path, ...] = ()


def write_quantized(
    path: str | Path,
    original: Original,
    plan: QuantizationPlan,
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write `original` in few bits into a directory that is new, empty, or left by an interrupted run."""
    directory = Path(path)
    shards = shards_of(original, plan)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    try:
        _begin(directory, {"of": original.fingerprint, "format": plan.name})
        for companion in original.companions:
            shutil.copyfile(companion, directory / companion.name)
        for name, shard in zip(names, shards, strict=True):
            if (directory / name).exists():
                if on_bytes is not None:
                    on_bytes(sum(tensor.nbytes for tensor in shard))
            else:
                write_file(directory / name, shard, on_bytes)
        weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        total = sum(tensor.nbytes for shard in shards for tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(directory / "model.safetensors.index.json", index)
        config = dict(original.raw_config)
        config["quantization_config"] = plan.to_json()
        # An adapter of the original may be used here too.
        config["dgemma"] = {"quantized_from": original.fingerprint}
        write_json(directory / "config.json", config)  # last: with it the checkpoint is whole
        (directory / _STATE).unlink()
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written: {error.strerror}.") from error


def check_target(path: str | Path, original: Original, plan: QuantizationPlan) -> None:
    """Refuse before any work what `write_quantized` would refuse."""
    directory = Path(path)
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; give a directory.")
    if (directory / "config.json").exists():
        raise CheckpointError(f"{directory} already holds a checkpoint; choose another directory.")
    state = directory / _STATE
    if state.exists():
        if json.loads(state.read_text()) != {"of": original.fingerprint, "format": plan.name}:
            raise CheckpointError(
                f"{directory} holds the unfinished work of another model or format; choose another directory."
            )
    elif any(directory.glob("*.safetensors")):
        raise CheckpointError(f"{directory} holds weights already; choose another directory.")


def shards_of(original: Original, plan: QuantizationPlan) -> list[list[TensorToWrite]]:
    """The files: embedding and self-conditioning, then a file to each layer, then the rest."""
    shards: dict[str, list[TensorToWrite]] = {}
    for spec in tensor_specs(original.config):
        form = plan.format_of(spec)
        shard = shards.setdefault(_shard_name(spec), [])
        shard += [original.plain(spec)] if form is None else _quantized(spec, form, original.numbers)
    shards["rest"] = [*shards.pop("rest"), *original.kept_aside]
    return list(shards.values())


def _shard_name(spec: TensorSpec) -> str:
    if spec.path.startswith("layers."):
        return spec.path.split(".")[1]
    return "rest" if spec.part == "norms" else "first"


def _begin(directory: Path, state: dict[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for partial_file in directory.glob("*.partial"):
        partial_file.unlink()
    write_json(directory / _STATE, state)


def _quantized(spec: TensorSpec, form: Format, numbers: Numbers) -> list[TensorToWrite]:
    """The tensors of a weight. Codes come first: making them finds the scales, which are then kept."""
    modules = next(module_names(spec))
    inner = spec.shape[-1]
    out = spec.size // inner // len(modules)
    rounded = _Rounded(spec, form, numbers, out, len(modules))
    first: list[TensorToWrite] = []
    later: list[TensorToWrite] = []
    for number, module in enumerate(modules):
        for name, part in form.parts(out, inner).items():
            dtype, shape = part.dtypes[0], part.shapes[0]
            target, chunks = later, partial(rounded.kept, number, "scale")
            if name == form.main:
                target, chunks = first, partial(rounded.codes, number)
            elif name == "weight_shape":
                chunks = partial(_bytes, torch.tensor([out, inner]))
            elif name == "weight_global_scale":
                chunks, shape = partial(rounded.kept, number, "outer"), (1,)
            elif dtype == "F32":
                dtype = "BF16"
            target.append(TensorToWrite(f"{module}.{name}", dtype, shape, chunks))
    return [*first, *later]


class _Rounded:
    """One weight on its way: pieces are asked for in order, first their codes, later what was kept."""

    def __init__(self, spec: TensorSpec, form: Format, numbers: Numbers, out: int, count: int) -> None:
        self._spec, self._numbers, self._out, self._count = spec, numbers, out, count
        self._round: Round = to_int8
        rows = max(1, _BLOCK_NUMBERS // spec.shape[-1])
        if isinstance(form, CompressedPacked):
            assert form.group_len is not None
            self._round = partial(to_int4, group_len=form.group_len)
        elif isinstance(form, CompressedNvfp4):
            self._round, rows = to_nvfp4, out  # its outer scale is the whole piece's
        # Blocks do not cross from a piece into the next.
        self._blocks_each = -(-out // min(rows, out))
        while out % self._blocks_each:
            self._blocks_each += 1
        self._blocks: Iterator[Tensor] | None = None
        self._kept: dict[tuple[int, str], list[Tensor]] = {}

    def codes(self, number: int) -> Iterable[Any]:
        if number == 0:
            self._blocks = self._numbers(self._spec, self._out // self._blocks_each)
            self._kept = {}
        assert self._blocks is not None
        for _ in range(self._blocks_each):
            held = self._round(next(self._blocks))
            self._kept.setdefault((number, "scale"), []).append(held.scale)
            if held.outer is not None:
                self._kept[number, "outer"] = [held.outer[:1, 0].clone()]
            yield from _bytes(held.codes)
        if number == self._count - 1:
            self._blocks = None

    def kept(self, number: int, name: str) -> Iterable[Any]:
        return _bytes(torch.cat(self._kept.pop((number, name))))


def _bytes(tensor: Tensor) -> Iterable[Any]:
    return [tensor.contiguous().view(-1).view(torch.uint8).numpy()]


def disk_bytes(shards: Iterable[Iterable[TensorToWrite]]) -> int:
    return sum(tensor.nbytes for shard in shards for tensor in shard)
