"""`dgemma.load`: a `LanguageModel` from a checkpoint, with its adapter, device and execution."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dgemma.checkpoint.adapter_source import open_adapter
from dgemma.checkpoint.device import check_device, check_dtype, stored_dtype
from dgemma.checkpoint.hub import resolve
from dgemma.checkpoint.load import Progress, load_transformer
from dgemma.checkpoint.source import CheckpointSource, open_checkpoint
from dgemma.engine.model_runner import compile_ahead
from dgemma.errors import DeviceError
from dgemma.language_model import LanguageModel
from dgemma.model.execution import default_execution
from dgemma.model.ranks import ALONE, GroupRanks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def load(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    exact: bool = False,
    compile: bool = False,  # noqa: A002
    revision: str | None = None,
    adapter: str | Path | None = None,
    round_activations: bool = True,
    mesh: DeviceMesh | None = None,
    progress: Progress | None = None,
) -> LanguageModel:
    """Load a checkpoint in the released layout: a directory, or a hub name such as "owner/name".

    `encode` and `denoise` need no tokenizer files; methods that take or return text do.

    dtype: "float32", "bfloat16", or "auto" for the one config.json names; instead of bfloat16 float32, if the
      processor has no instructions for bfloat16 and there is memory enough.
    device: "auto" for a GPU if there is one, "cpu", "gpu", "cuda", "cuda:1", "mps".
    exact: run so that a row's bits never depend on what shares its batch (slower).
    compile: fuse the vocabulary end into one kernel; loading then takes seconds more.
    revision: branch, tag or commit of a hub name.
    adapter: directory of a LoRA adapter for this base, dgemma's or PEFT's.
    round_activations: where a model is quantized and products on its codes are faster (dgemma doctor says),
      round activations to eight bits, with a scale per 256 neighbours. False: dequantize each weight.
    mesh: processes that compute the model together, each with a part of its weights (tensor parallelism):
      all of them run the same program.
    progress: called with (bytes read, bytes in all) after each tensor.
    """
    ranks = ALONE if mesh is None else GroupRanks.of_mesh(mesh, in_order=exact)
    target = check_device(device)
    source = open_checkpoint(resolve(path, revision=revision))
    _check_formats(source, target)
    number_type = ranks.share(check_dtype(dtype, source, target))
    if adapter is not None:
        open_adapter(adapter, source.config)  # refuse a wrong one before a large base is read for nothing
    execution = replace(default_execution(target, number_type, exact=exact), fused_vocabulary=compile)
    transformer = load_transformer(
        source,
        dtype=number_type,
        device=target,
        execution=execution,
        round_activations=round_activations,
        progress=progress,
        ranks=ranks,
    )
    ranks.wait()  # a rank may have read its part minutes before another
    lm = LanguageModel(transformer, source)
    if dtype == "auto":
        lm._saved_dtype = stored_dtype(source)
    if adapter is not None:
        lm = lm.with_adapter(adapter)
    if compile:
        compile_ahead(lm.transformer)
    return lm


def _check_formats(source: CheckpointSource, device: torch.device) -> None:
    """Raise `DeviceError` if the device cannot hold the stored weights: Apple's GPU has no 8-bit floats."""
    if device.type != "mps":
        return
    for weight in source.quantized.values():
        if weight.scheme.uses_float8:
            raise DeviceError(
                f"{source.path} is quantized ({weight.scheme.name}) with 8-bit floats, which device "
                f"{device.type!r} does not have. Choose device cpu, or a checkpoint in int4 or int8."
            )
