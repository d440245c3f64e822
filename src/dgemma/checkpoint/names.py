"""The tensors of a model: their released names, their paths in `Transformer`, their shapes. Imports no torch.

Loading, saving, counting (`dgemma info`) and checking all use this table. The vision tower has a table of
its own: it is never quantized, trained, adapted or divided, and a fingerprint does not cover it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dgemma.model.config import LayerKind, ModelConfig
from dgemma.model.vision_config import VisionConfig

_TOWER = "model.encoder.vision_tower."
_PROJECTOR = "model.encoder.embed_vision."
VISION_PREFIXES = (_TOWER, _PROJECTOR)
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


def vision_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of the vision tower and its projector, once; none for a model of text only."""
    vision = config.vision
    if vision is None:
        return
    hidden = vision.hidden_size
    table: list[tuple[str, str, tuple[int, ...]]] = [
        ("patch_embedder.input_proj.weight", "patches.weight", (hidden, vision.patch_values)),
        ("patch_embedder.position_embedding_table", "positions", (2, vision.num_positions, hidden)),
    ]
    for index in range(vision.num_layers):
        table += _vision_layer(vision, index)
    if vision.standardizes:
        table += [("std_bias", "bias", (hidden,)), ("std_scale", "scale", (hidden,))]
    for name, path, shape in table:
        yield TensorSpec(_TOWER + name, f"vision.{path}", shape, "vision")
    yield TensorSpec(
        _PROJECTOR + "embedding_projection.weight",
        "vision.projection.weight",
        (config.hidden_size, hidden),
        "vision",
    )


def _vision_layer(vision: VisionConfig, index: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    hidden, mlp, dim = vision.hidden_size, vision.mlp_size, vision.head_dim
    queries, keys = vision.num_heads * dim, vision.num_kv_heads * dim
    here, there = f"encoder.layers.{index}.", f"layers.{index}."
    norms = (
        ("input_layernorm", "before_attention", hidden),
        ("self_attn.q_norm", "query_norm", dim),
        ("self_attn.k_norm", "key_norm", dim),
        ("post_attention_layernorm", "after_attention", hidden),
        ("pre_feedforward_layernorm", "before_mlp", hidden),
        ("post_feedforward_layernorm", "after_mlp", hidden),
    )
    linears = (
        ("self_attn.q_proj", "query", (queries, hidden)),
        ("self_attn.k_proj", "key", (keys, hidden)),
        ("self_attn.v_proj", "value", (keys, hidden)),
        ("self_attn.o_proj", "output", (hidden, queries)),
        ("mlp.gate_proj", "mlp.gate", (mlp, hidden)),
        ("mlp.up_proj", "mlp.up", (mlp, hidden)),
        ("mlp.down_proj", "mlp.down", (hidden, mlp)),
    )
    for name, path, size in norms:
        yield f"{here}{name}.weight", f"{there}{path}.weight", (size,)
    for name, path, shape in linears:
        yield f"{here}{name}.linear.weight", f"{there}{path}.weight", shape
        for limit in ("input_min", "input_max", "output_min", "output_max") if vision.clips else ():
            yield f"{here}{name}.{limit}", f"{there}{path}.{limit}", ()
