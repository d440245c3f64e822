"""Write tests/data/mlx: a tiny model as mlx-vlm quantizes it, and digests of what MLX decodes of it.

Not run in CI. mlx-vlm gets an environment of its own, as for `dgemma conform`.
From the repository: python -m tools.make_mlx_fixtures
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from dgemma.checkpoint.random_weights import write_random
from dgemma.conform.runtimes import runtime_named
from dgemma.model.config import ModelConfig

OUT = Path(__file__).parent.parent / "tests" / "data" / "mlx"
SCRIPT = Path(__file__).with_name("mlx_quantize.py")
FIXTURES = {"bfloat16-4bit": ("BF16", 4), "float32-8bit": ("F32", 8), "float16-4bit": ("F16", 4)}


def tiny_config() -> ModelConfig:
    """Every row is whole groups of 64."""
    text = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "global_head_dim": 64,
        "num_global_key_value_heads": 1, "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 64,
        "max_position_embeddings": 512,
    }  # fmt: skip
    return ModelConfig.from_json({"model_type": "diffusion_gemma", "canvas_length": 8, "text_config": text})


def mlx(*arguments: object) -> None:
    """Run mlx_quantize.py in mlx-vlm's environment."""
    python = runtime_named("mlx-vlm").python()
    subprocess.run([str(python), str(SCRIPT), *map(str, arguments)], check=True)


def digest(numbers: Tensor) -> str:
    return hashlib.sha256(numbers.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def make(name: str) -> None:
    dtype, bits = FIXTURES[name]
    target = OUT / name
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        write_random(Path(directory) / "plain", tiny_config(), dtype=dtype, seed=7)
        mlx("quantize", Path(directory) / "plain", target, bits)
        mlx("decode", target, Path(directory) / "decoded.safetensors")
        decoded = load_file(Path(directory) / "decoded.safetensors")
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    versions = runtime_named("mlx-vlm").versions
    sha256 = {name: digest(numbers) for name, numbers in sorted(decoded.items())}
    made_by = {"tool": versions, "command": "python -m tools.make_mlx_fixtures", "sha256": sha256}
    (target / "MADE_BY.json").write_text(json.dumps(made_by, indent=1) + "\n")
    print(f"{name}: {len(decoded) // 2} weights, {sum(f.stat().st_size for f in target.iterdir())} bytes")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or FIXTURES:
        make(chosen)
