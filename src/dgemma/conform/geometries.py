"""Tiny checkpoints on which every number matters: what a runtime forgets changes the result."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dgemma.language_model import LanguageModel
from dgemma.model.config import ModelConfig
from dgemma.model.transformer import Transformer

SLIDING, FULL = "sliding_attention", "full_attention"
_TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "sliding_window": 8,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "layer_types": [SLIDING, FULL, FULL],
    "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
# A runtime that insists on a vision tower gets a small one.
_VISION: dict[str, Any] = {
    "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Geometry:
    """A model's shape. `text` overrides the text configuration above. Hashed by identity."""

    name: str
    text: dict[str, Any] = field(default_factory=dict)
    canvas_len: int = 8
    seed: int = 0

    @property
    def text_config(self) -> dict[str, Any]:
        return {**_TEXT, **self.text}

    @property
    def window(self) -> int:
        return int(self.text_config["sliding_window"])

    def to_json(self) -> dict[str, Any]:
        return {
            "architectures": ["DiffusionGemmaForBlockDiffusion"],
            "model_type": "diffusion_gemma",
            "canvas_length": self.canvas_len,
            "tie_word_embeddings": True,
            "dtype": "float32",
            "text_config": {"model_type": "diffusion_gemma_text", **self.text_config},
            "vision_config": _VISION,
        }


GEOMETRIES = (
    Geometry("small window", seed=1),
    Geometry("one full layer", {"num_hidden_layers": 1, "layer_types": [FULL]}, seed=2),
    Geometry(
        "seven layers, grouped heads",
        {"num_hidden_layers": 7, "layer_types": [*[SLIDING] * 5, FULL, FULL], "num_key_value_heads": 1,
         "num_global_key_value_heads": 2},
        seed=3,
    ),
    Geometry("window larger than the canvas", {"sliding_window": 24}, seed=4),
    Geometry(
        "odd sizes",
        {"hidden_size": 40, "head_dim": 12, "global_head_dim": 20, "intermediate_size": 36,
         "moe_intermediate_size": 12, "vocab_size": 101,
         "rope_parameters": {
             SLIDING: {"rope_type": "default", "rope_theta": 500.0},
             FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 3e4}}},
        canvas_len=5,
        seed=5,
    ),
    Geometry("every expert for every token", {"top_k_experts": 8}, seed=6),
    Geometry("four experts per token", {"top_k_experts": 4}, seed=7),
    Geometry(
        "twelve layers, window of two",
        {"num_hidden_layers": 12, "layer_types": [*[SLIDING] * 5, FULL] * 2, "sliding_window": 2},
        canvas_len=6,
        seed=8,
    ),
    Geometry(
        "large eps, no shared keys",
        {"rms_norm_eps": 1e-2, "num_key_value_heads": 4, "num_global_key_value_heads": 4,
         "layer_types": [SLIDING, SLIDING, FULL]},
        seed=9,
    ),
    Geometry("canvas longer than the window", {"sliding_window": 4}, canvas_len=16, seed=10),
)  # fmt: skip


def write_geometry(geometry: Geometry, path: Path) -> LanguageModel:
    """Write a checkpoint of this shape in fp32 -> the model."""
    config = replace(ModelConfig.from_json(geometry.to_json()), vision=None)  # compared on text
    transformer = Transformer(config, dtype=torch.float32, device="cpu")
    _randomize(transformer, geometry.seed)
    lm = LanguageModel(transformer)
    lm.save(path)
    # As other runtimes spell it, and with a vision tower that they may build.
    (path / "config.json").write_text(json.dumps(geometry.to_json(), indent=2))
    return lm


@torch.no_grad()
def _randomize(transformer: Transformer, seed: int) -> None:
    """No number is at its default, and rounding does not grow from layer to layer."""
    generator = torch.Generator().manual_seed(seed)
    named = [*transformer.named_parameters(), *transformer.named_buffers()]
    for name, tensor in named:
        if "rope" in name or not tensor.is_floating_point():
            continue
        shape = tensor.shape
        if name.endswith("scalar"):
            tensor.copy_(0.6 + 0.8 * torch.rand(shape, generator=generator))
        elif name.endswith("query_norm.weight"):
            tensor.copy_(0.15 + 0.3 * torch.rand(shape, generator=generator))
        elif tensor.ndim == 1:
            tensor.copy_(0.5 + torch.rand(shape, generator=generator))
        else:
            spread = 0.5 if "embedding" in name else 0.2
            tensor.copy_(torch.randn(shape, generator=generator) * spread)
        if name.endswith("self_conditioning.mlp.down.weight"):
            tensor *= 0.1  # it amplifies rounding from step to step
        if name.endswith("router.scores.weight"):
            tensor *= 8  # no choice of an expert hangs on the last bit
        if "after_attention" in name or "after_mlp" in name or "after_experts" in name:
            tensor *= 0.5
