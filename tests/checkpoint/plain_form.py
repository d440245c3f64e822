"""The decoded form of a quantized checkpoint: the same model in fp32, and what it generates."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import dgemma
from dgemma.checkpoint.names import tensor_specs
from dgemma.checkpoint.quantized.reader import read_quantized, read_tensor
from dgemma.checkpoint.safetensors_file import TensorToWrite
from dgemma.checkpoint.save import write_checkpoint
from dgemma.checkpoint.source import CheckpointSource
from dgemma.model.config import ModelConfig

CPU = torch.device("cpu")


def read_all(source: CheckpointSource) -> dict[str, Tensor]:
    """Every weight in fp32."""
    plain = {name: read_tensor(entry).float() for name, entry in source.entries.items()}
    quantized = {
        name: read_quantized(entry, CPU).dequantize(torch.float32) for name, entry in source.quantized.items()
    }
    return {**plain, **quantized}


def write_plain(directory: Path, config: ModelConfig, weights: dict[str, Tensor]) -> Path:
    """The same model in the released layout, in fp32."""
    tensors = [
        TensorToWrite(
            spec.name,
            "F32",
            spec.shape,
            partial(iter, [weights[spec.name].contiguous().view(-1).view(torch.uint8).numpy()]),
        )
        for spec in tensor_specs(config)
    ]
    write_checkpoint(directory, {**config.to_json(), "dtype": "float32"}, tensors, max_shard_bytes=1 << 30)
    return directory


def answer(path: Path) -> list[int]:
    lm = dgemma.load(path, dtype="float32", device="cpu", round_activations=False)
    # Options by name: a file may have its own defaults.
    answer = lm.generate(
        [2, 5, 7, 11, 13, 17, 19, 23, 29, 31],
        max_tokens=40, seed=3, max_denoising_steps=6, entropy_bound=0.1, ignore_end=True,
    )  # fmt: skip
    return list(answer.tokens)
