"""Compare the MLX export with MLX itself: `python -m tools.compare_mlx`, a part of `make others`.

A tiny model is exported in 4 and in 8 bits. `mx.dequantize` must find the numbers that we read, bit for bit,
and mlx-vlm must load the export and compute the hidden states and logits of our decoded weights. Status 3: it
does not install.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from dgemma.checkpoint.export import write_export
from dgemma.checkpoint.mlx_export import FORMATS, plan_mlx
from dgemma.checkpoint.quantized.reader import read_quantized
from dgemma.checkpoint.random_weights import write_random
from dgemma.checkpoint.source import open_checkpoint
from dgemma.conform.run import conform
from dgemma.conform.runtimes import NotInstalledError, runtime_named
from tools.make_mlx_fixtures import mlx, tiny_config


def compare(directory: Path, name: str) -> bool:
    exported = directory / name
    write_export(exported, plan_mlx(open_checkpoint(directory / "plain"), name=name))
    mlx("decode", exported, directory / "decoded.safetensors")
    decoded = load_file(directory / "decoded.safetensors")
    quantized = open_checkpoint(exported).quantized
    same = [
        torch.equal(
            read_quantized(entry, torch.device("cpu")).dequantize(torch.float32),
            decoded[weight.removesuffix(".weight")],
        )
        for weight, entry in quantized.items()
    ]
    (found,) = conform(runtime_named("mlx-vlm"), str(exported), ())
    print(
        f"{name}: {sum(same)} of {len(same)} weights as mx.dequantize makes them; largest difference of "
        f"{found.compared} outputs of mlx-vlm: {found.largest:.1e}"
    )
    return all(same) and len(same) == len(decoded) // 2 and found.passed


def main() -> int:
    try:
        runtime_named("mlx-vlm").python()
    except NotInstalledError as error:
        print(error)
        return 3
    with tempfile.TemporaryDirectory() as directory:
        write_random(Path(directory) / "plain", tiny_config(), dtype="F32", seed=7)
        passed = [compare(Path(directory), name) for name in FORMATS]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
