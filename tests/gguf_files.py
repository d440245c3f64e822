"""GGUF files written by the gguf package: a tiny model in each type, and its numbers as it decodes them.

The package quantizes no K types; those are random blocks, whose scales give them the spread of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from dgemma.checkpoint.gguf_names import gguf_name
from dgemma.checkpoint.names import TensorSpec, tensor_specs
from dgemma.checkpoint.random_weights import random_chunks
from dgemma.model.block_tensor import BLOCK_FORMATS
from dgemma.model.config import ModelConfig

ARCHITECTURE = "diffusion-gemma"
TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
# The second scale of a block relative to its first one, which makes the mean of random blocks zero.
_SECOND = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5}
Numbers = np.ndarray[Any, np.dtype[Any]]


def tiny_config() -> ModelConfig:
    """Every row is a whole block of 256; the layers differ in heads, and half of a full head rotates."""
    text = {
        "vocab_size": 320, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {
            "0": {"head_dim": 64, "num_key_value_heads": 2}, "1": {"head_dim": 128, "num_key_value_heads": 1},
        },
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
            },
        },
        "sliding_window": 8, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 256,
        "max_position_embeddings": 512,
    }  # fmt: skip
    return ModelConfig.from_json({"model_type": "diffusion_gemma", "canvas_length": 16, "text_config": text})


def weights_of(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random weights by their released names."""
    found = {}
    for spec in tensor_specs(config):
        data = b"".join(chunk.tobytes() for chunk in random_chunks(spec, "F32", seed))
        found[spec.name] = torch.frombuffer(bytearray(data), dtype=torch.float32).view(spec.shape)
    return found


def blocks_like(numbers: Tensor, kind: str) -> Numbers:
    """`numbers` in blocks of a type; of a K type other numbers of the same spread."""
    number = gguf.GGMLQuantizationType[kind]
    if not kind.endswith("_K"):
        return gguf.quantize(numbers.numpy(), number)
    known = BLOCK_FORMATS[kind]
    *outer, inner = numbers.shape
    generator = np.random.default_rng(numbers.numel() + inner)
    blocks = generator.integers(
        0, 256, (*outer, inner // known.block_len * known.block_bytes), dtype=np.uint8
    )

    def set_scales(first: float) -> None:
        flat = blocks.reshape(-1, known.block_bytes)
        ratios = (1.0, _SECOND.get(kind, 0.0))
        for at, ratio in zip(known.halves, ratios, strict=False):
            flat[:, at : at + 2] = np.array([first * ratio], dtype=np.float16).view(np.uint8)

    set_scales(1e-2)
    spread = float(gguf.dequantize(blocks, number).std())
    set_scales(1e-2 * float(numbers.std()) / spread)
    return blocks


def decoded(data: Numbers, kind: str) -> Numbers:
    """As the package decodes it, in fp32."""
    return np.asarray(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]))


def metadata_of(config: ModelConfig) -> dict[str, Any]:
    sliding, full = config.layers
    a = ARCHITECTURE
    return {
        f"{a}.block_count": 2, f"{a}.context_length": config.max_positions,
        f"{a}.embedding_length": config.hidden_size, f"{a}.feed_forward_length": config.mlp_size,
        f"{a}.attention.head_count": config.num_heads,
        f"{a}.attention.head_count_kv": [layer.num_kv_heads for layer in config.layers],
        f"{a}.attention.key_length": full.head_dim, f"{a}.attention.value_length": full.head_dim,
        f"{a}.attention.key_length_swa": sliding.head_dim,
        f"{a}.attention.value_length_swa": sliding.head_dim,
        f"{a}.attention.sliding_window": config.window,
        f"{a}.attention.sliding_window_pattern": [True, False],
        f"{a}.attention.layer_norm_rms_epsilon": 1e-6, f"{a}.attention.shared_kv_layers": 0,
        f"{a}.attention.causal": False, f"{a}.embedding_length_per_layer_input": 0,
        f"{a}.rope.freq_base": 1e6, f"{a}.rope.freq_base_swa": 1e4,
        f"{a}.rope.dimension_count": full.head_dim, f"{a}.rope.dimension_count_swa": sliding.head_dim,
        f"{a}.expert_count": config.num_experts, f"{a}.expert_used_count": config.experts_per_token,
        f"{a}.expert_feed_forward_length": config.expert_size, f"{a}.final_logit_softcapping": 30.0,
        "diffusion.canvas_length": config.canvas_len, "diffusion.eb_max_steps": 12,
        "diffusion.eb_entropy_bound": 0.2,
    }  # fmt: skip


Data = dict[str, tuple[Numbers, str]]  # by name in GGUF: the stored data and its type


def type_by_part(kind: str) -> Callable[[TensorSpec], str]:
    """As llama.cpp chooses: matrices in `kind`, routers and vectors in F32."""
    return lambda spec: "F32" if spec.part == "router" or len(spec.shape) < 2 else kind


def data_of(config: ModelConfig, type_of: Callable[[TensorSpec], str]) -> tuple[Data, dict[str, Tensor]]:
    """The tensors of a file, and the numbers that the package decodes of them, by their released names."""
    data: Data = {}
    expected = {}
    weights = weights_of(config)
    for spec in tensor_specs(config):
        kind = type_of(spec)
        stored = blocks_like(weights[spec.name], kind)
        data[gguf_name(spec.name)] = (stored, kind)
        expected[spec.name] = torch.from_numpy(decoded(stored, kind).copy()).view(spec.shape)
    frequencies = np.array([1.0] * 16 + [1e30] * 48, dtype=np.float32)  # 0.25 of 128, by pairs
    return {**data, "rope_freqs.weight": (frequencies, "F32")}, expected


def write_gguf(path: Path, data: Data, metadata: Mapping[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, (stored, kind) in data.items():
        writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(path: Path, kind: str) -> dict[str, Tensor]:
    """A whole model with its matrices in `kind` -> its weights as the package decodes them."""
    config = tiny_config()
    data, expected = data_of(config, type_by_part(kind))
    write_gguf(path, data, metadata_of(config))
    return expected
