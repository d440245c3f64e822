"""Load a checkpoint into a transformer: tensor by tensor, directly to its device and dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dgemma.checkpoint.division import division_of
from dgemma.checkpoint.names import TensorSpec, tensor_specs, vision_specs
from dgemma.checkpoint.quantized.reader import read_quantized
from dgemma.checkpoint.safetensors_file import TensorEntry, read_chunks, read_columns, read_into, rows_of
from dgemma.checkpoint.source import CheckpointSource, check_tied_copies
from dgemma.errors import InputError
from dgemma.model.attention import Rope
from dgemma.model.block_tensor import AnyQuantized
from dgemma.model.execution import Execution
from dgemma.model.quantized_linear import QuantizedExpertLinear, QuantizedLinear
from dgemma.model.ranks import ALONE, Ranks
from dgemma.model.transformer import Transformer

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all)."""


def load_transformer(
    source: CheckpointSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    execution: Execution | None = None,
    round_activations: bool = True,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> Transformer:
    """Build the transformer on the meta device, then load it tensor by tensor.

    Peak memory is the model plus one chunk of a file: bytes are read into the tensor itself, or
    through a 16 MiB buffer where device or dtype differ. A rank reads its part of each tensor.
    """
    check_tied_copies(source)
    transformer = Transformer(source.config, dtype=dtype, device="meta", execution=execution, ranks=ranks)
    total = source.nbytes
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    for spec in tensor_specs(source.config):
        division = division_of(spec, transformer.part)
        if spec.name in source.quantized:
            if ranks.size > 1:
                raise InputError.about(
                    "tensor_parallel", f"is {ranks.size}; a quantized model runs in one process."
                )
            quantized = read_quantized(source.quantized[spec.name], device, advance)
            place_quantized(transformer, spec, quantized, round_activations)
            continue
        entry = source.entries[spec.name]
        tensor = torch.empty(division.shape, dtype=dtype, device=device)
        if division.dim == 1:
            _fill_columns(tensor, entry, division.part)
        else:
            fill_rows(tensor, entry, division.part)
        place(transformer, spec.path, tensor)
        advance(entry.nbytes)
    for spec in vision_specs(source.config):
        entry = source.vision[spec.name]
        tensor = torch.empty(spec.shape, dtype=dtype, device=device)
        _fill(tensor, entry)
        place(transformer, spec.path, tensor)
        advance(entry.nbytes)
    transformer.rope = Rope(source.config, device)
    if transformer.vision is not None:
        transformer.vision.place_frequencies(device)
    return transformer


def place(transformer: Transformer, path: str, tensor: Tensor) -> None:
    """Set the parameter or buffer of the transformer at `path`."""
    parent_path, _, leaf = path.rpartition(".")
    parent = transformer.get_submodule(parent_path)
    if leaf in parent._parameters:
        setattr(parent, leaf, nn.Parameter(tensor, requires_grad=False))
    else:
        assert leaf in parent._buffers, path
        setattr(parent, leaf, tensor)


def place_quantized(
    transformer: Transformer, spec: TensorSpec, weight: AnyQuantized, round_activations: bool
) -> None:
    """Replace the plain linear that `spec` names by a quantized one."""
    path = spec.path.removesuffix(".weight")
    parent_path, _, leaf = path.rpartition(".")
    linear: nn.Module
    if len(spec.shape) == 3:
        linear = QuantizedExpertLinear(weight, rounds_activations=round_activations)
    else:
        dtype = transformer.norm.weight.dtype
        linear = QuantizedLinear(weight, dtype=dtype, rounds_activations=round_activations)
    setattr(transformer.get_submodule(parent_path), leaf, linear)


def fill_rows(tensor: Tensor, entry: TensorEntry, rows: slice) -> None:
    """Read neighbouring rows of a stored tensor."""
    _fill(tensor, rows_of(entry, rows))


def _fill(tensor: Tensor, entry: TensorEntry) -> None:
    stored = TORCH_DTYPES[entry.dtype]
    if tensor.dtype == stored and tensor.device.type == "cpu":
        read_into(entry, tensor.view(-1).view(torch.uint8).numpy())
        return
    flat = tensor.view(-1)
    at = 0
    for chunk in read_chunks(entry):
        numbers = torch.frombuffer(chunk, dtype=stored)
        flat[at : at + len(numbers)].copy_(numbers)
        at += len(numbers)


def _fill_columns(tensor: Tensor, entry: TensorEntry, columns: slice) -> None:
    for row, chunk in zip(tensor, read_columns(entry, columns), strict=True):
        row.copy_(torch.frombuffer(chunk, dtype=TORCH_DTYPES[entry.dtype]))
