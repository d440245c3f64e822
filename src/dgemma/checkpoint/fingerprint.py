"""Which base is this? A short name for the numbers of a model, to keep an adapter with its own.

The fingerprint reads 64 numbers of every tensor, rounded to bf16: the same checkpoint has the same one
in fp32 and in bf16, loaded or on disk, with or without an adapter. So it tells apart models that were
trained apart. It cannot see a change elsewhere in a tensor, one below bf16's rounding, the vision tower,
or the tokenizer; and it is no protection against somebody who wants two models to look alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from dgemma.checkpoint.load import TORCH_DTYPES
from dgemma.checkpoint.names import TensorSpec, tensor_specs
from dgemma.checkpoint.safetensors_file import ITEM_BYTES, read_into
from dgemma.checkpoint.source import CheckpointSource
from dgemma.model.coded_weight import CodedWeight
from dgemma.model.lora import detach
from dgemma.model.stack import Stack

_NUMBERS = 64  # of each tensor


def fingerprint(stack: Stack) -> str:
    """The fingerprint of a stack's base, in hexadecimal."""
    base = detach(stack)

    def sample(spec: TensorSpec) -> Tensor:
        parent, _, leaf = spec.path.rpartition(".")
        module = base.get_submodule(parent)
        # Of a quantized weight its codes: the same base quantized two ways is two bases.
        tensor = module.codes.view(torch.uint8) if isinstance(module, CodedWeight) else getattr(module, leaf)
        return tensor.detach().reshape(-1)[_positions(tensor.numel()).to(tensor.device)]

    return _digest(tensor_specs(base.config), sample)


def file_fingerprint(source: CheckpointSource) -> str:
    """The same of a plain checkpoint on disk, without loading it."""
    source.require_plain("the fingerprint of a file")

    def sample(spec: TensorSpec) -> Tensor:
        entry = source.entries[spec.name]
        item = ITEM_BYTES[entry.dtype]
        positions = _positions(spec.size).tolist()
        buffer = bytearray(len(positions) * item)
        for number, position in enumerate(positions):
            read_into(entry, memoryview(buffer)[number * item : (number + 1) * item], position * item)
        return torch.frombuffer(buffer, dtype=TORCH_DTYPES[entry.dtype])

    return _digest(tensor_specs(source.config), sample)


def _digest(specs: Iterable[TensorSpec], sample: Callable[[TensorSpec], Tensor]) -> str:
    digest = hashlib.sha256()
    for spec in specs:
        numbers = sample(spec).to("cpu", torch.bfloat16)
        digest.update(f"{spec.name}{list(spec.shape)}".encode())
        digest.update(numbers.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _positions(size: int) -> Tensor:
    count = min(_NUMBERS, size)
    return torch.arange(count) * size // count
