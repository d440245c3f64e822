"""A model in training of which each process holds a part of every weight (FSDP2).

Each rank computes its part of a batch with whole weights, a layer at a time: they are gathered before the
layer and dropped behind it, and its gradients are summed to the part that each rank keeps. All ranks must run
the same layers the same number of times.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from dgemma.checkpoint.hub import resolve
from dgemma.checkpoint.load import fill_rows, place
from dgemma.checkpoint.names import tensor_specs
from dgemma.checkpoint.source import CheckpointSource, check_tied_copies, open_checkpoint
from dgemma.errors import InputError
from dgemma.language_model import LanguageModel
from dgemma.model.attention import Rope
from dgemma.model.lora import LoraExpertLinear, LoraFactors, LoraLinear, adapted, adapted_weights
from dgemma.model.transformer import Transformer
from dgemma.training.divided import own_rows, whole
from dgemma.training.recipe import Recipe

# What is called from outside and reads weights. `head` is a value, not a call: it reads the embedding where
# `encode` or `denoise` have left it whole, which the outermost module does until the backward pass is over.
_ENTRIES = ("encode", "denoise", "logits", "soft_embedding")


def check_divisible(recipe: Recipe, size: int) -> None:
    """Refuse what several processes cannot do."""
    if size < 1:
        raise InputError.about("nproc", f"is {size}; it must be at least 1.")
    if recipe.batch % size:
        raise InputError.about(
            "batch", f"is {recipe.batch}, and {size} processes share it; make it divisible."
        )
    if recipe.objective != "denoise":
        raise InputError.about(
            "objective",
            f"is {recipe.objective!r}: its paths differ in length, and several processes must keep step. Run "
            "it in one process.",
        )
    if recipe.compile:
        raise InputError.about("compile", "is on; with several processes it was never tested. Turn it off.")


def open_unread(model: str, dtype: torch.dtype) -> tuple[LanguageModel, CheckpointSource]:
    """A model whose weights are to be divided, before they are read."""
    source = open_checkpoint(resolve(model))
    check_tied_copies(source)
    config = replace(source.config, vision=None)  # training is on text; its tensors are copied when saving
    return LanguageModel(Transformer(config, dtype=dtype, device="meta"), source), source


def divide(stack: Transformer, mesh: DeviceMesh) -> None:
    """Leave each rank its rows of every weight. The stack may be on the meta device: see `read_own_rows`."""
    for layer in stack.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(stack, mesh=mesh)
    for name in _ENTRIES:
        register_fsdp_forward_method(stack, name)


def read_own_rows(stack: Transformer, source: CheckpointSource, device: torch.device) -> None:
    """Load the base of a divided stack on the meta device: a rank reads its rows of each tensor."""
    for spec in tensor_specs(source.config):
        if spec.name in source.quantized:
            raise InputError.about("model", "is quantized; train an adapter of it in one process.")
        path = _path_in(stack, spec.path)
        parent, _, leaf = path.rpartition(".")
        empty = getattr(stack.get_submodule(parent), leaf)
        entry = source.entries[spec.name]
        if not isinstance(empty, DTensor):  # a buffer: whole on every rank
            whole = torch.empty(spec.shape, dtype=empty.dtype, device=device)
            fill_rows(whole, entry, slice(0, spec.shape[0]))
            place(stack, path, whole)
            continue
        rows = own_rows(empty)
        part = torch.empty((rows.stop - rows.start, *spec.shape[1:]), dtype=empty.dtype, device=device)
        if part.numel():
            fill_rows(part, entry, rows)
        held = DTensor.from_local(
            part,
            empty.device_mesh,
            empty.placements,
            run_check=False,
            shape=empty.shape,
            stride=empty.stride(),
        )
        place(stack, path, held)
        getattr(stack.get_submodule(parent), leaf).requires_grad_(empty.requires_grad)
    stack.rope = Rope(source.config, device)


@torch.no_grad()
def gathered(stack: Transformer, trained: dict[str, nn.Parameter], *, keep: bool) -> Transformer:
    """A whole stack on the CPU: all weights, or an adapter on an empty base. keep: on this rank."""
    result = Transformer(stack.config, dtype=stack.embedding.dtype, device="meta")
    weights = adapted_weights(stack)
    if weights:
        factors = {
            path: {name: whole(trained[f"{path}.{name}"].detach()).cpu() for name in ("down", "up")}
            for path in weights
        }
        added = {path: LoraFactors(**factors[path], alpha=weights[path].alpha) for path in weights}
        return adapted(result, added, dtype=torch.float32, device=torch.device("cpu"))
    stack.reshard()  # type: ignore[operator]
    for spec in tensor_specs(stack.config):
        parent, _, leaf = spec.path.rpartition(".")
        tensor = whole(getattr(stack.get_submodule(parent), leaf).detach()).cpu()
        if keep:
            place(result, spec.path, tensor)
    return result


def _path_in(stack: Transformer, path: str) -> str:
    """The path of a base's weight, which an adapter may wrap."""
    parent, _, leaf = path.rpartition(".")
    module: Any = stack.get_submodule(parent)
    return f"{parent}.base.{leaf}" if isinstance(module, LoraLinear | LoraExpertLinear) else path
