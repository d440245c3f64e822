"""Fingerprint of a base model, which identifies the base that an adapter belongs to.

The fingerprint hashes 64 numbers of every tensor, rounded to bf16: the same checkpoint has the same one in
fp32 and in bf16, loaded or on disk, with or without an adapter. Models from different training runs differ.
It does not cover the other numbers of a tensor, changes below bf16 rounding, the vision tower, or the
tokenizer. It is no protection against a deliberate collision.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from dgemma.checkpoint.load import TORCH_DTYPES
from dgemma.checkpoint.names import TensorSpec, tensor_specs
from dgemma.checkpoint.quantized.reader import read_module
from dgemma.checkpoint.quantized.tensor_index import QuantizedEntry
from dgemma.checkpoint.safetensors_file import ITEM_BYTES, read_into
from dgemma.checkpoint.source import CheckpointSource
from dgemma.model.lora import detach
from dgemma.model.quantized_linear import QuantizedWeight
from dgemma.model.transformer import Transformer

_SAMPLES = 64  # of each tensor


def fingerprint(transformer: Transformer) -> str:
    """The fingerprint of a transformer's base, in hexadecimal."""
    base = detach(transformer)

    def sample(spec: TensorSpec) -> Tensor:
        parent, _, leaf = spec.path.rpartition(".")
        module = base.get_submodule(parent)
        # The quantized data of a quantized weight: the same base under two schemes has two fingerprints.
        tensor = (
            module.qdata.view(torch.uint8) if isinstance(module, QuantizedWeight) else getattr(module, leaf)
        )
        return tensor.detach().reshape(-1)[_positions(tensor.numel()).to(tensor.device)]

    return _digest(tensor_specs(base.config), sample)


def file_fingerprint(source: CheckpointSource) -> str:
    """The same fingerprint of a checkpoint on disk; of a quantized one, memory holds one matrix at a time."""

    def sample(spec: TensorSpec) -> Tensor:
        if spec.name in source.quantized:
            return _quantized_sample(source.quantized[spec.name])
        entry = source.entries[spec.name]
        item = ITEM_BYTES[entry.dtype]
        positions = _positions(spec.size).tolist()
        buffer = bytearray(len(positions) * item)
        for number, position in enumerate(positions):
            read_into(entry, memoryview(buffer)[number * item : (number + 1) * item], position * item)
        return torch.frombuffer(buffer, dtype=TORCH_DTYPES[entry.dtype])

    return _digest(tensor_specs(source.config), sample)


def _quantized_sample(entry: QuantizedEntry) -> Tensor:
    """The quantized data at the positions in the whole weight; modules without one are not read."""
    first = read_module(entry, entry.modules[0]).qdata
    size = first.numel() * first.itemsize
    positions = _positions(size * len(entry.modules))
    del first
    found = []
    for number in (positions // size).unique().tolist():
        qdata = read_module(entry, entry.modules[number]).qdata.view(torch.uint8)
        found.append(qdata.reshape(-1)[positions[positions // size == number] % size])
    return torch.cat(found)


def _digest(specs: Iterable[TensorSpec], sample: Callable[[TensorSpec], Tensor]) -> str:
    digest = hashlib.sha256()
    for spec in specs:
        numbers = sample(spec).to("cpu", torch.bfloat16)
        digest.update(f"{spec.name}{list(spec.shape)}".encode())
        digest.update(numbers.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _positions(size: int) -> Tensor:
    count = min(_SAMPLES, size)
    return torch.arange(count) * size // count
