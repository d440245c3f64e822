"""Quantize a checkpoint with mlx-vlm, or decode one, in an environment of its own. Imports nothing of dgemma.

python mlx_quantize.py quantize SOURCE TARGET BITS    as `mlx_vlm.convert --quantize` does
python mlx_quantize.py decode CHECKPOINT FILE         every quantized weight as `mx.dequantize` makes it

FILE has each weight twice: decoded with scales and biases in float32, and, under `own.`, as they are stored.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

mx: Any = importlib.import_module("mlx.core")
utils: Any = importlib.import_module("mlx_vlm.utils")


def quantize(source: Path, target: Path, bits: int) -> None:
    quantizing: Any = importlib.import_module("mlx_vlm.quant_utils")
    model = utils.load_model(source, lazy=True, strict=False)
    model.model.encoder.vision_tower = model.model.encoder.embed_vision = None  # the source has none
    config = json.loads((source / "config.json").read_text())
    model, config = quantizing.quantize_model(
        model, config, 64, bits, mode="affine", quant_predicate=model.quant_predicate
    )
    utils.save_weights(target, model)
    utils.save_config(config, target / "config.json")


def decode(checkpoint: Path, file: Path) -> None:
    raw = json.loads((checkpoint / "config.json").read_text())["quantization"]
    tensors = dict(mx.load(str(checkpoint / "model.safetensors")))
    found = {}
    for name, scales in tensors.items():
        module = name.removesuffix(".scales")
        if module == name:
            continue
        settings = {**raw, **(raw.get(module) or {})}
        options = {"group_size": settings["group_size"], "bits": settings["bits"]}
        weight, biases = tensors[f"{module}.weight"], tensors[f"{module}.biases"]
        found[f"own.{module}"] = mx.dequantize(weight, scales, biases, **options)
        wide = (scales.astype(mx.float32), biases.astype(mx.float32))
        found[module] = mx.dequantize(weight, *wide, **options)
    mx.save_safetensors(str(file), found)


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    if sys.argv[1] == "quantize":
        quantize(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        decode(Path(sys.argv[2]), Path(sys.argv[3]))
