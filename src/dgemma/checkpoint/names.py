"""The tensors of a model: their released names, their paths in `Transformer`, their shapes. Imports no torch.

Loading, saving, counting (`dgemma info`) and checking all use this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dgemma.model.config import LayerKind, ModelConfig

VISION_PREFIXES = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
_DECODER = "model.decoder."
_ENCODER = "model.encoder.language_model."


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: its released name, its path in `Transformer`, its shape, and its part of the model."""

    name: str
    path: str
    shape: tuple[int, ...]
    part: str

    @property
    def size(self) -> int:
        total = 1
        for length in self.shape:
            total *= length
        return total

    @property
    def tied_names(self) -> tuple[str, ...]:
        """Other names that the same tensor may have in a file."""
        if self.name == _DECODER + "embed_tokens.weight":
            return (_ENCODER + "embed_tokens.weight", "lm_head.weight")
        shared = self.name.startswith(_DECODER) and not self.name.endswith(".layer_scalar")
        if not shared or ".self_conditioning." in self.name:
            return ()
        return (_ENCODER + self.name.removeprefix(_DECODER),)


def tensor_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of the model, once, in the order of a forward."""
    hidden, mlp = config.hidden_size, config.mlp_size
    yield TensorSpec(
        _DECODER + "embed_tokens.weight",
        "embedding.weight",
        (config.vocab_size, hidden),
        "embedding",
    )
    conditioning = (
        ("pre_norm.weight", "norm.weight", (hidden,)),
        ("gate_proj.weight", "mlp.gate.weight", (mlp, hidden)),
        ("up_proj.weight", "mlp.up.weight", (mlp, hidden)),
        ("down_proj.weight", "mlp.down.weight", (hidden, mlp)),
    )
    for name, path, shape in conditioning:
        yield TensorSpec(
            f"{_DECODER}self_conditioning.{name}",
            f"self_conditioning.{path}",
            shape,
            "self_conditioning",
        )
    for index in range(len(config.layers)):
        yield from _layer_specs(config, index)
    yield TensorSpec(_DECODER + "norm.weight", "norm.weight", (hidden,), "norms")


def _layer_specs(config: ModelConfig, index: int) -> Iterator[TensorSpec]:
    layer = config.layers[index]
    hidden, mlp, width = config.hidden_size, config.mlp_size, config.expert_size
    queries = config.num_heads * layer.head_dim
    keys = layer.num_kv_heads * layer.head_dim
    table: list[tuple[str, str, tuple[int, ...], str]] = [
        ("input_layernorm.weight", "before_attention.weight", (hidden,), "norms"),
        ("self_attn.q_proj.weight", "attention.query.weight", (queries, hidden), "attention"),
        ("self_attn.k_proj.weight", "attention.key.weight", (keys, hidden), "attention"),
        ("self_attn.v_proj.weight", "attention.value.weight", (keys, hidden), "attention"),
        ("self_attn.q_norm.weight", "attention.query_norm.weight", (layer.head_dim,), "attention"),
        ("self_attn.k_norm.weight", "attention.key_norm.weight", (layer.head_dim,), "attention"),
        ("self_attn.o_proj.weight", "attention.output.weight", (hidden, queries), "attention"),
        ("post_attention_layernorm.weight", "after_attention.weight", (hidden,), "norms"),
        ("pre_feedforward_layernorm.weight", "before_mlp.weight", (hidden,), "norms"),
        ("mlp.gate_proj.weight", "mlp.gate.weight", (mlp, hidden), "shared_mlp"),
        ("mlp.up_proj.weight", "mlp.up.weight", (mlp, hidden), "shared_mlp"),
        ("mlp.down_proj.weight", "mlp.down.weight", (hidden, mlp), "shared_mlp"),
        ("post_feedforward_layernorm_1.weight", "after_mlp.weight", (hidden,), "norms"),
        ("router.proj.weight", "router.scores.weight", (config.num_experts, hidden), "router"),
        ("router.scale", "router.scale", (hidden,), "router"),
        ("router.per_expert_scale", "router.expert_scale", (config.num_experts,), "router"),
        ("pre_feedforward_layernorm_2.weight", "before_experts.weight", (hidden,), "norms"),
        (
            "experts.gate_up_proj",
            "experts.gate_up.weight",
            (config.num_experts, 2 * width, hidden),
            "experts",
        ),
        (
            "experts.down_proj",
            "experts.down.weight",
            (config.num_experts, hidden, width),
            "experts",
        ),
        ("post_feedforward_layernorm_2.weight", "after_experts.weight", (hidden,), "norms"),
        ("post_feedforward_layernorm.weight", "after_both.weight", (hidden,), "norms"),
        ("layer_scalar", "denoising_scalar", (1,), "norms"),
    ]
    for name, path, shape, part in table:
        if name == "self_attn.v_proj.weight" and layer.kind is LayerKind.FULL:
            continue
        yield TensorSpec(f"{_DECODER}layers.{index}.{name}", f"layers.{index}.{path}", shape, part)
    yield TensorSpec(f"{_ENCODER}layers.{index}.layer_scalar", f"layers.{index}.causal_scalar", (1,), "norms")
