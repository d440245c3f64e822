"""From a checkpoint to a stack: tensor by tensor, straight to the place, device and dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dgemma.checkpoint.names import TensorSpec, tensor_specs
from dgemma.checkpoint.quantized.read import read_coded
from dgemma.checkpoint.safetensors_file import TensorEntry, read_chunks, read_into
from dgemma.checkpoint.source import CheckpointSource, check_tied_copies
from dgemma.model.coded_weight import CodedBank, CodedMatrix
from dgemma.model.codes import Codes
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
    round_activations: bool = True,
    progress: Progress | None = None,
) -> Stack:
    """Build the stack without memory, then fill it tensor by tensor.

    Peak memory is the model plus one chunk of a file: bytes are read into the tensor itself, or
    through a 16 MiB buffer where device or dtype differ.
    """
    check_tied_copies(source)
    stack = Stack(source.config, dtype=dtype, device="meta", execution=execution)
    total = source.nbytes
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    for spec in tensor_specs(source.config):
        if spec.name in source.coded:
            held = read_coded(source.coded[spec.name], device, advance)
            place_coded(stack, spec, held, round_activations)
            continue
        entry = source.entries[spec.name]
        tensor = torch.empty(spec.shape, dtype=dtype, device=device)
        _fill(tensor, entry)
        place(stack, spec.path, tensor)
        advance(entry.nbytes)
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


def place_coded(stack: Stack, spec: TensorSpec, held: Codes, round_activations: bool) -> None:
    """Put a quantized weight in place of the plain one that `spec` names."""
    path = spec.path.removesuffix(".weight")
    parent_path, _, leaf = path.rpartition(".")
    coded: nn.Module
    if len(spec.shape) == 3:
        coded = CodedBank(held, rounds_activations=round_activations)
    else:
        dtype = stack.norm.weight.dtype
        coded = CodedMatrix(held, dtype=dtype, rounds_activations=round_activations)
    setattr(stack.get_submodule(parent_path), leaf, coded)


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
