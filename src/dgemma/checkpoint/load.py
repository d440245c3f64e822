"""From a checkpoint to a stack: tensor by tensor, straight to the place, device and dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dgemma.checkpoint.names import tensor_specs
from dgemma.checkpoint.safetensors_file import TensorEntry, read_chunks, read_into
from dgemma.checkpoint.source import CheckpointSource, check_tied_copies
from dgemma.model.execution import Execution
from dgemma.model.rope import Rope
from dgemma.model.stack import Stack

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all)."""


def load_stack(
    source: CheckpointSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    execution: Execution | None = None,
    progress: Progress | None = None,
) -> Stack:
    """Build the stack without memory, then fill it tensor by tensor.

    Peak memory is the model plus one chunk of a file: bytes are read into the tensor itself, or
    through a 16 MiB buffer where device or dtype differ.
    """
    check_tied_copies(source)
    stack = Stack(source.config, dtype=dtype, device="meta", execution=execution)
    total = sum(entry.nbytes for entry in source.entries.values())
    done = 0
    for spec in tensor_specs(source.config):
        entry = source.entries[spec.name]
        tensor = torch.empty(spec.shape, dtype=dtype, device=device)
        _fill(tensor, entry)
        place(stack, spec.path, tensor)
        done += entry.nbytes
        if progress is not None:
            progress(done, total)
    stack.rope = Rope(source.config, device)
    return stack


def place(stack: Stack, path: str, tensor: Tensor) -> None:
    """Put a tensor where `path` names a parameter or a buffer of the stack."""
    parent_path, _, leaf = path.rpartition(".")
    parent = stack.get_submodule(parent_path)
    if leaf in parent._parameters:
        setattr(parent, leaf, nn.Parameter(tensor, requires_grad=False))
    else:
        assert leaf in parent._buffers, path
        setattr(parent, leaf, tensor)


def _fill(tensor: Tensor, entry: TensorEntry) -> None:
    stored = TORCH_DTYPES[entry.dtype]
    if tensor.dtype == stored and tensor.device.type == "cpu":
        read_into(entry, tensor.view(-1).view(torch.uint8).numpy())
        return
    flat = tensor.view(-1)
    at = 0
    for chunk in read_chunks(entry):
        piece = torch.frombuffer(chunk, dtype=stored)
        flat[at : at + len(piece)].copy_(piece)
        at += len(piece)
