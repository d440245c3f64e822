"""The geometry of a model, read from the released `config.json`. Imports no torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dgemma.errors import ConfigError
from dgemma.model.config_fields import ConfigFields, shown_kind
from dgemma.model.vision_config import VisionConfig

# Far above any model of this family; a larger number in a file is an error or an attack.
_LARGEST = {"layers": 1024, "size": 1 << 20, "vocabulary": 1 << 24, "positions": 1 << 32}
_MOST_DIGITS = 20  # of a layer's number, zeros in front included


# Per-layer field -> the field that sets it for every full-attention layer.
_GLOBAL_FIELDS = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


class LayerKind(enum.Enum):
    SLIDING = "sliding_attention"
    FULL = "full_attention"


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The attention shape of one layer (GQA); everything else is the same in every layer."""

    kind: LayerKind
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class RopeShape:
    """RoPE of one layer kind. `rotated_share` is the share of the head dimensions that rotate."""

    theta: float
    rotated_share: float


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model's geometry, validated once. `from_json` reads `config.json` as released."""

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    layers: tuple[LayerShape, ...]
    window: int
    rope: Mapping[LayerKind, RopeShape]
    num_experts: int
    experts_per_token: int
    expert_size: int
    norm_eps: float
    logit_cap: float
    canvas_len: int
    max_positions: int
    mask_token: int | None = None
    """The noise of a model that was trained by masked diffusion; DiffusionGemma has none."""
    vision: VisionConfig | None = None  # of the tower in front of the causal pass; None: text only
    sees_whole_images: bool = False
    """Whether the tokens of an image attend to all tokens of this image in the causal pass."""

    def __post_init__(self) -> None:
        limits = {
            "vocab_size": _LARGEST["vocabulary"],
            "hidden_size": _LARGEST["size"],
            "mlp_size": _LARGEST["size"],
            "num_heads": _LARGEST["size"],
            "window": _LARGEST["positions"],
            "num_experts": _LARGEST["size"],
            "experts_per_token": _LARGEST["size"],
            "expert_size": _LARGEST["size"],
            "canvas_len": _LARGEST["size"],
            "max_positions": _LARGEST["positions"],
        }
        for name, largest in limits.items():
            value = getattr(self, name)
            if not 1 <= value <= largest:
                raise ConfigError(f"{name} is {value}; it must be between 1 and {largest}.")
        if not 1 <= len(self.layers) <= _LARGEST["layers"]:
            raise ConfigError(f"the model has {len(self.layers)} layers; 1 to 1024 are supported.")
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"top_k_experts is {self.experts_per_token} but there are only {self.num_experts} experts."
            )
        if self.mask_token is not None and not 0 <= self.mask_token < self.vocab_size:
            raise ConfigError(
                f"mask_token_id is {self.mask_token}; the vocabulary has {self.vocab_size} tokens."
            )
        if not 0 < self.norm_eps < 1:
            raise ConfigError(f"rms_norm_eps is {self.norm_eps}; it must be between 0 and 1.")
        if not 0 < self.logit_cap < 1e6:
            raise ConfigError(f"final_logit_softcapping is {self.logit_cap}; it must be positive.")
        for index, layer in enumerate(self.layers):
            self._check_layer(index, layer)

    def _check_layer(self, index: int, layer: LayerShape) -> None:
        if not (2 <= layer.head_dim <= _LARGEST["size"] and layer.head_dim % 2 == 0):
            raise ConfigError(
                f"layer {index}: head_dim is {layer.head_dim}; rotary positions need an even number."
            )
        if not 1 <= layer.num_kv_heads <= self.num_heads or self.num_heads % layer.num_kv_heads:
            raise ConfigError(
                f"layer {index}: {self.num_heads} query heads cannot share "
                f"{layer.num_kv_heads} KV heads evenly."
            )
        if layer.kind not in self.rope:
            raise ConfigError(f"rope_parameters lacks an entry for {layer.kind.value!r}.")
        first = next(other for other in self.layers if other.kind is layer.kind)
        if layer.head_dim != first.head_dim:
            raise ConfigError(
                f"layer {index}: head_dim is {layer.head_dim} where other {layer.kind.value} layers "
                f"have {first.head_dim}; layers of one kind share their rotary positions."
            )

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The layer kinds that occur, in a fixed order."""
        return tuple(kind for kind in LayerKind if any(s.kind is kind for s in self.layers))

    def head_dim(self, kind: LayerKind) -> int:
        return next(shape.head_dim for shape in self.layers if shape.kind is kind)

    @classmethod
    def from_json(cls, raw: object) -> ModelConfig:
        """Read the dictionary of a released `config.json`; refuse by name each unsupported setting."""
        outer = ConfigFields(raw, "config.json")
        outer.expect("model_type", "diffusion_gemma", required=True)
        outer.expect("tie_word_embeddings", True)
        text = ConfigFields(outer.get("text_config"), "text_config")
        text.expect("tie_word_embeddings", True)
        text.expect("hidden_activation", "gelu_pytorch_tanh")
        text.expect("attention_bias", False)
        if text.get("use_bidirectional_attention") == "all":
            raise ConfigError("use_bidirectional_attention 'all' is not supported: encode is causal.")
        vision = outer.get("vision_config")
        num_layers = text.integer("num_hidden_layers")
        if not 1 <= num_layers <= _LARGEST["layers"]:
            raise ConfigError(f"num_hidden_layers is {num_layers}; 1 to 1024 are supported.")
        kinds = _layer_kinds(text, num_layers)
        return cls(
            vocab_size=text.integer("vocab_size"),
            hidden_size=text.integer("hidden_size"),
            mlp_size=text.integer("intermediate_size"),
            num_heads=text.integer("num_attention_heads"),
            layers=_layer_shapes(text, kinds),
            window=text.integer("sliding_window", 512),
            rope=_rope_shapes(text),
            num_experts=text.integer("num_experts"),
            experts_per_token=text.integer("top_k_experts"),
            expert_size=text.integer("moe_intermediate_size"),
            norm_eps=text.number("rms_norm_eps", 1e-6),
            logit_cap=text.number("final_logit_softcapping", 30.0),
            canvas_len=outer.integer("canvas_length", 256),
            max_positions=text.integer("max_position_embeddings", 131_072),
            mask_token=None if outer.get("mask_token_id") is None else outer.integer("mask_token_id"),
            vision=None if vision is None else VisionConfig.from_json(vision, outer),
            sees_whole_images=text.get("use_bidirectional_attention") == "vision",
        )

    def to_json(self) -> dict[str, Any]:
        """The geometry as a `config.json` dictionary, which the reference implementation reads too."""
        rope: dict[str, dict[str, Any]] = {}
        for kind, rotary in self.rope.items():
            rope[kind.value] = {"rope_type": "default", "rope_theta": rotary.theta}
            if rotary.rotated_share != 1:
                rope[kind.value] |= {
                    "rope_type": "proportional",
                    "partial_rotary_factor": rotary.rotated_share,
                }
        sliding = next((s for s in self.layers if s.kind is LayerKind.SLIDING), self.layers[0])
        overrides = {
            str(index): {"head_dim": shape.head_dim, "num_key_value_heads": shape.num_kv_heads}
            for index, shape in enumerate(self.layers)
            if (shape.head_dim, shape.num_kv_heads) != (sliding.head_dim, sliding.num_kv_heads)
            or shape.kind is LayerKind.FULL
        }
        text = {
            "model_type": "diffusion_gemma_text",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.mlp_size,
            "num_hidden_layers": len(self.layers),
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": sliding.num_kv_heads,
            "head_dim": sliding.head_dim,
            "per_layer_config": overrides,
            **self._global_fields(),
            "layer_types": [shape.kind.value for shape in self.layers],
            "sliding_window": self.window,
            "rope_parameters": rope,
            "num_experts": self.num_experts,
            "top_k_experts": self.experts_per_token,
            "moe_intermediate_size": self.expert_size,
            "rms_norm_eps": self.norm_eps,
            "final_logit_softcapping": self.logit_cap,
            "max_position_embeddings": self.max_positions,
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }
        if self.sees_whole_images:
            text["use_bidirectional_attention"] = "vision"
        return {
            "architectures": ["DiffusionGemmaForBlockDiffusion"],
            "model_type": "diffusion_gemma",
            "canvas_length": self.canvas_len,
            "tie_word_embeddings": True,
            "text_config": text,
            **({} if self.mask_token is None else {"mask_token_id": self.mask_token}),
            **({} if self.vision is None else self.vision.to_json()),
        }

    def _global_fields(self) -> dict[str, int]:
        """The `global_` fields, which mlx-vlm and others read: one shape for all full layers."""
        full = {(s.head_dim, s.num_kv_heads) for s in self.layers if s.kind is LayerKind.FULL}
        if len(full) != 1:
            return {}
        ((head_dim, num_kv_heads),) = full
        return {"global_head_dim": head_dim, "num_global_key_value_heads": num_kv_heads}


def _layer_kinds(text: ConfigFields, num_layers: int) -> tuple[LayerKind, ...]:
    names = text.get("layer_types")
    if names is None:
        names = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention"
                 for i in range(num_layers)]  # fmt: skip
    if not isinstance(names, list) or len(names) != num_layers:
        raise ConfigError(f"text_config: layer_types must be a list of {num_layers} layer kinds.")
    known = {kind.value: kind for kind in LayerKind}
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise ConfigError(f"text_config: layer_types holds {name!r}; known: {sorted(known)}.")
    # The last layer of the released model always has full attention, regardless of the list.
    return (*(known[name] for name in names[:-1]), LayerKind.FULL)


def _layer_shapes(text: ConfigFields, kinds: tuple[LayerKind, ...]) -> tuple[LayerShape, ...]:
    """Shapes of all layers. Full layers are set by `per_layer_config` or by the `global_` fields."""
    head_dim = text.integer("head_dim", 256)
    num_kv_heads = text.integer("num_key_value_heads", 4)
    overrides = _per_layer_config(text, len(kinds))
    stated = {
        field: text.integer(name) for field, name in _GLOBAL_FIELDS.items() if text.get(name) is not None
    }
    full_head_dim = stated.get("head_dim", 512 if overrides is None else head_dim)
    full_kv_heads = stated.get("num_key_value_heads", num_kv_heads)
    shapes = []
    for index, kind in enumerate(kinds):
        full = kind is LayerKind.FULL
        own = (overrides or {}).get(index, {})
        fields = ConfigFields(own, f"per_layer_config[{index}]")
        for field, value in stated.items() if full else ():
            if own.get(field, value) != value:
                raise ConfigError(
                    f"text_config: {_GLOBAL_FIELDS[field]} is {value}, but per_layer_config[{index}] sets "
                    f"{field} to {own[field]!r}. The two spellings must agree."
                )
        shapes.append(
            LayerShape(
                kind=kind,
                num_kv_heads=fields.integer("num_key_value_heads", full_kv_heads if full else num_kv_heads),
                head_dim=fields.integer("head_dim", full_head_dim if full else head_dim),
            )
        )
    return tuple(shapes)


def _per_layer_config(text: ConfigFields, num_layers: int) -> dict[int, dict[str, Any]] | None:
    raw = text.get("per_layer_config")
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise ConfigError(f"text_config: per_layer_config is {shown_kind(raw)}; it must be an object.")
    overrides: dict[int, dict[str, Any]] = {}
    for key, values in raw.items():
        # Keys are zero-padded from ten layers on: "05" is layer 5. Python reads no number of 5,000 digits.
        is_layer = key.isdecimal() and len(key) <= _MOST_DIGITS and int(key) < num_layers
        if not is_layer or not isinstance(values, dict):
            raise ConfigError(f"text_config: per_layer_config[{key!r}] does not name a layer.")
        unknown = sorted(set(values) - set(_GLOBAL_FIELDS))
        if unknown:
            raise ConfigError(
                f"text_config: per_layer_config[{key!r}] sets {unknown[0]!r}; dgemma supports "
                "only head_dim and num_key_value_heads there."
            )
        overrides[int(key)] = values
    return overrides


def _rope_shapes(text: ConfigFields) -> dict[LayerKind, RopeShape]:
    raw = text.get("rope_parameters")
    if raw is None:
        return {
            LayerKind.SLIDING: RopeShape(theta=1e4, rotated_share=1.0),
            LayerKind.FULL: RopeShape(theta=1e6, rotated_share=0.25),
        }
    table = ConfigFields(raw, "rope_parameters")
    shapes: dict[LayerKind, RopeShape] = {}
    for kind in LayerKind:
        if table.get(kind.value) is None:
            continue
        fields = ConfigFields(table.get(kind.value), f"rope_parameters[{kind.value!r}]")
        share = fields.number("partial_rotary_factor", 1.0)
        rope_type = fields.get("rope_type")
        # "default" with a partial factor would rotate a head of another size: not in this family.
        if rope_type not in ("default", "proportional") or (rope_type == "default" and share != 1):
            raise ConfigError(
                f"rope_parameters[{kind.value!r}]: rope_type {rope_type!r} with "
                f"partial_rotary_factor {share} is not supported; known: default, proportional."
            )
        if fields.number("factor", 1.0) != 1.0:
            raise ConfigError(f"rope_parameters[{kind.value!r}]: a scaling factor is not supported.")
        theta = fields.number("rope_theta", 1e4)
        if not 1 < theta < 1e12 or not 0 <= share <= 1:
            raise ConfigError(f"rope_parameters[{kind.value!r}]: theta {theta}, share {share} out of range.")
        shapes[kind] = RopeShape(theta=theta, rotated_share=share)
    return shapes
