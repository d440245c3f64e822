"""Load and save LoRA adapters in the layout that `adapter_source.py` describes."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.checkpoint.adapter_config import AdapterConfig, patterns
from dgemma.checkpoint.adapter_source import (
    CONFIG,
    DGEMMA_CONFIG,
    WEIGHTS,
    AdapterSource,
    FactorEntries,
    check_tied_factors,
    targets_of,
)
from dgemma.checkpoint.division import Division, division_of
from dgemma.checkpoint.load import DTYPE_NAMES, TORCH_DTYPES
from dgemma.checkpoint.names import tensor_specs
from dgemma.checkpoint.safetensors_file import TensorEntry, TensorToWrite, read_into, write_file
from dgemma.checkpoint.save import write_json
from dgemma.durable_files import locked, sync_directory
from dgemma.errors import CheckpointError, InputError
from dgemma.model.config import ModelConfig
from dgemma.model.lora import LoraExpertLinear, LoraFactors, LoraLinear, adapted, adapted_weights
from dgemma.model.transformer import Transformer


def load_adapter(
    transformer: Transformer,
    source: AdapterSource,
    *,
    base_fingerprint: str,
    quantized_from: str | None = None,
    dtype: torch.dtype | None = None,
    trainable: bool = False,
) -> Transformer:
    """`transformer` with this adapter. dtype: of the factors; None: the model's.

    base_fingerprint: of `transformer`. quantized_from: the fingerprint of the base that `transformer` was
    quantized from; its adapters fit too.
    """
    check_base(source, base_fingerprint, quantized_from)
    check_tied_factors(source)
    divisions = {
        spec.path.removesuffix(".weight"): division_of(spec, transformer.part)
        for spec in tensor_specs(transformer.config)
    }
    added = {
        path: own_part(read_factors(entries), divisions[path]) for path, entries in source.factors.items()
    }
    return adapted(transformer, added, dtype=dtype, trainable=trainable)


def check_base(source: AdapterSource, base_fingerprint: str, quantized_from: str | None = None) -> None:
    """Refuse an adapter of another base. An adapter written by PEFT does not name its base."""
    if source.base_fingerprint not in (None, base_fingerprint, quantized_from):
        raise CheckpointError(
            f"{source.path} was made for the base {source.base_fingerprint}, but this model is "
            f"{base_fingerprint}. Take the checkpoint it was trained on."
        )


def read_factors(entries: FactorEntries) -> LoraFactors:
    """The factors of one weight on the CPU, as stored."""
    down, up = _read(entries.down), _read(entries.up)
    if len(entries.shape) == 3:
        experts, out, inner = entries.shape
        down = down.view(experts, entries.rank, inner)
        up = up.view(out, entries.rank, experts).permute(2, 0, 1).contiguous()
    return LoraFactors(down=down, up=up, alpha=entries.alpha)


def own_part(factors: LoraFactors, division: Division) -> LoraFactors:
    """The part of a rank that holds this division of the weight."""
    down, up = factors.down, factors.up
    if len(division.shape) == 3:  # by experts
        down, up = down[division.part], up[division.part]
    elif division.dim == 1:
        down = down[:, division.part]
    else:
        up = up[division.part]
    return LoraFactors(down=down.contiguous(), up=up.contiguous(), alpha=factors.alpha)


def save_adapter(
    transformer: Transformer,
    path: str | Path,
    *,
    base_fingerprint: str,
    base_name: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write the adapter of `transformer`. The new files are renamed only when all are complete."""
    weights = adapted_weights(transformer)
    if not weights:
        raise InputError("this model has no adapter to save; make one with `with_adapter`.")
    directory = Path(path)
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; give a directory.")
    if not overwrite and any((directory / name).exists() for name in (CONFIG, WEIGHTS)):
        raise CheckpointError(f"{directory} holds an adapter; choose another directory, or overwrite=True.")
    config = _adapter_config(transformer.config, weights)
    tensors = [
        TensorToWrite(
            target.key(factor),
            DTYPE_NAMES[_factor(weights[target.path], factor).dtype],
            target.shapes(weights[target.path].rank)[factor],
            partial(_bytes, weights[target.path], factor),
        )
        for target in targets_of(transformer.config, config)
        for factor in "AB"
    ]
    metadata = {"base_fingerprint": base_fingerprint, "dgemma_version": _version()}
    with locked(directory):
        try:
            write_file(directory / (WEIGHTS + ".new"), tensors)
            write_json(directory / (DGEMMA_CONFIG + ".new"), metadata)
            write_json(directory / (CONFIG + ".new"), config.to_json(base_name))
            # A directory without a configuration is no adapter: old and new files never form one together.
            (directory / CONFIG).unlink(missing_ok=True)
            for name in (WEIGHTS, DGEMMA_CONFIG, CONFIG):
                sync_directory(directory)
                (directory / (name + ".new")).replace(directory / name)
            sync_directory(directory)
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be written: {error.strerror}.") from error


def _adapter_config(config: ModelConfig, weights: dict[str, LoraLinear | LoraExpertLinear]) -> AdapterConfig:
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    parameters = []
    for spec in tensor_specs(config):
        weight = weights.get(spec.path.removesuffix(".weight"))
        if weight is None:
            continue
        for name in (spec.name, *spec.tied_names):
            target = name.removesuffix(".weight")
            ranks[target], alphas[target] = weight.rank, weight.alpha
            if len(spec.shape) == 3:
                parameters.append(target)
    # The experts' rank is the default where there are experts: PEFT applies a pattern that names parameters,
    # but warns that it did not.
    defaults = parameters or list(ranks)
    rank = Counter(ranks[target] for target in defaults).most_common(1)[0][0]
    alpha = Counter(alphas[target] for target in defaults).most_common(1)[0][0]
    return AdapterConfig(
        rank=rank,
        alpha=alpha,
        rank_pattern=patterns(ranks, rank),
        alpha_pattern=patterns(alphas, alpha),
        rank_stabilized=False,
        modules=tuple(target for target in ranks if target not in parameters),
        parameters=tuple(parameters),
    )


def _read(entry: TensorEntry) -> Tensor:
    tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
    read_into(entry, tensor.view(-1).view(torch.uint8).numpy())
    return tensor


def _factor(weight: LoraLinear | LoraExpertLinear, factor: str) -> Tensor:
    return weight.down if factor == "A" else weight.up


def _bytes(weight: LoraLinear | LoraExpertLinear, factor: str) -> list[Any]:
    tensor = _factor(weight, factor).detach()
    if isinstance(weight, LoraExpertLinear) and factor == "B":
        tensor = tensor.permute(1, 2, 0)  # [out, rank, experts]
    return [tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()]


def _version() -> str | None:
    try:
        return importlib.metadata.version("dgemma")
    except importlib.metadata.PackageNotFoundError:
        return None  # run from source, not installed
