"""Checkpoints with random weights, for experiments, tests and measurements."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from dgemma.checkpoint.load import TORCH_DTYPES
from dgemma.checkpoint.names import TensorSpec, tensor_specs, vision_specs
from dgemma.checkpoint.safetensors_file import TensorToWrite
from dgemma.checkpoint.save import write_checkpoint
from dgemma.model.config import ModelConfig

_CHUNK = 4 << 20  # numbers generated at once


def write_random(
    path: str | Path,
    config: ModelConfig,
    *,
    dtype: str = "BF16",
    seed: int = 0,
    max_shard_bytes: int = 5_000_000_000,
    on_bytes: Callable[[int], None] | None = None,
    companions: Sequence[Path] | None = None,
) -> None:
    """Write a random model of this geometry. Memory holds one chunk.

    companions: files to copy with it; None for those of the small tokenizer.
    """
    raw = config.to_json()
    raw["dtype"] = str(TORCH_DTYPES[dtype]).removeprefix("torch.")
    tensors = [
        TensorToWrite(spec.name, dtype, spec.shape, partial(random_chunks, spec, dtype, seed))
        for spec in (*tensor_specs(config), *vision_specs(config))
    ]
    with tokenizer_files() as small_tokenizer:
        files = small_tokenizer if companions is None else companions
        write_checkpoint(
            path,
            raw,
            tensors,
            files,
            max_shard_bytes=max_shard_bytes,
            source=f"random {seed}",
            on_bytes=on_bytes,
        )


@contextmanager
def tokenizer_files() -> Iterator[tuple[Path, ...]]:
    """The files of the small tokenizer that is written with random weights."""
    with resources.as_file(resources.files("dgemma") / "data" / "tokenizer") as assets:
        yield tuple(sorted(Path(assets).iterdir()))


def random_chunks(spec: TensorSpec, dtype: str, seed: int) -> Iterator[Any]:
    # Seeded by name, so that a tensor does not depend on the order of writing.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(spec.name.encode()))
    mean, spread = distribution(spec)
    left = spec.size
    while left:
        numbers = torch.randn(min(left, _CHUNK), generator=generator) * spread + mean
        left -= len(numbers)
        yield numbers.to(TORCH_DTYPES[dtype]).view(torch.uint8).numpy()


def distribution(spec: TensorSpec) -> tuple[float, float]:
    """Mean and standard deviation that keep the activations of a random model stable.

    Query norms near 1 with score scale 1 make attention nearly one-hot, and unscaled residual
    branches let self-conditioning amplify rounding about twenty times per step.
    """
    if spec.path.endswith("query_norm.weight"):
        return 0.3, 0.01
    if spec.path.endswith(("after_attention.weight", "after_both.weight")):
        return 0.5, 0.01
    if spec.path == "embedding.weight":
        return 0.0, 1.5 * spec.shape[-1] ** -0.5  # the standard deviation of logits is about 1.5
    if spec.path == "vision.positions":
        return 0.0, 0.1
    if spec.path == "vision.bias":
        return 0.0, 0.02
    if not spec.shape:  # limits of a layer that clips
        return (-8.0 if spec.path.endswith("_min") else 8.0), 0.1
    if len(spec.shape) == 1:
        return 1.0, 0.02
    gain = 0.1 if spec.path == "self_conditioning.mlp.down.weight" else 1.0
    return 0.0, gain / math.sqrt(spec.shape[-1])
