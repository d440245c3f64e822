"""The geometry of the vision tower (`gemma4_vision`), read from `config.json`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dgemma.errors import ConfigError
from dgemma.model.config_fields import ConfigFields

_LARGEST = 1 << 20


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A transformer over the patches of one image, pooled to soft tokens."""

    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    patch_size: int  # pixels of a side of a patch
    pooling: int  # patches of a side of a soft token
    num_positions: int  # rows of the position table of each axis
    rope_theta: float
    norm_eps: float
    clips: bool  # linear layers clamp their inputs and outputs to stored limits
    standardizes: bool  # soft tokens get a stored bias and scale
    image_token: int = 258_880  # stands in a prompt where a soft token goes
    begin_token: int = 255_999  # before an image
    end_token: int = 258_882  # after an image

    def __post_init__(self) -> None:
        sizes = (
            "hidden_size", "mlp_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "patch_size",
            "pooling", "num_positions",
        )  # fmt: skip
        for name in sizes:
            value = getattr(self, name)
            if not 1 <= value <= _LARGEST:
                raise ConfigError(f"vision_config: {name} is {value}; it must be between 1 and {_LARGEST}.")
        if self.head_dim % 4:
            raise ConfigError(
                f"vision_config: head_dim is {self.head_dim}; rotary positions on two axes need a multiple "
                "of 4."
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"vision_config: {self.num_heads} query heads cannot share {self.num_kv_heads} KV heads "
                "evenly."
            )
        if not 0 < self.norm_eps < 1:
            raise ConfigError(f"vision_config: rms_norm_eps is {self.norm_eps}; it must be between 0 and 1.")
        if not 1 < self.rope_theta < 1e12:
            raise ConfigError(f"vision_config: rope_theta is {self.rope_theta}; it must be above 1.")

    @property
    def patch_values(self) -> int:
        """Numbers of a patch: three colours per pixel."""
        return 3 * self.patch_size**2

    @classmethod
    def from_json(cls, raw: object, outer: ConfigFields) -> VisionConfig:
        """Read `vision_config` and the image tokens beside it in `outer`."""
        fields = ConfigFields(raw, "vision_config")
        fields.expect("model_type", "gemma4_vision")
        fields.expect("hidden_activation", "gelu_pytorch_tanh")
        fields.expect("attention_bias", False)
        rope = fields.get("rope_parameters")
        rotary = ConfigFields({} if rope is None else rope, "vision_config: rope_parameters")
        rotary.expect("rope_type", "axial")
        return cls(
            hidden_size=fields.integer("hidden_size", 768),
            mlp_size=fields.integer("intermediate_size", 3072),
            num_layers=fields.integer("num_hidden_layers", 16),
            num_heads=fields.integer("num_attention_heads", 12),
            num_kv_heads=fields.integer("num_key_value_heads", 12),
            head_dim=fields.integer("head_dim", 64),
            patch_size=fields.integer("patch_size", 16),
            pooling=fields.integer("pooling_kernel_size", 3),
            num_positions=fields.integer("position_embedding_size", 10 * 1024),
            rope_theta=rotary.number("rope_theta", 100.0),
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            clips=fields.flag("use_clipped_linears", default=False),
            standardizes=fields.flag("standardize", default=False),
            image_token=outer.integer("image_token_id", 258_880),
            begin_token=outer.integer("boi_token_id", 255_999),
            end_token=outer.integer("eoi_token_id", 258_882),
        )

    def to_json(self) -> dict[str, Any]:
        """The entries of a `config.json`."""
        return {
            "vision_config": {
                "model_type": "gemma4_vision",
                "hidden_size": self.hidden_size,
                "intermediate_size": self.mlp_size,
                "num_hidden_layers": self.num_layers,
                "num_attention_heads": self.num_heads,
                "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_dim,
                "patch_size": self.patch_size,
                "pooling_kernel_size": self.pooling,
                "position_embedding_size": self.num_positions,
                "rope_parameters": {"rope_type": "axial", "rope_theta": self.rope_theta},
                "rms_norm_eps": self.norm_eps,
                "use_clipped_linears": self.clips,
                "standardize": self.standardizes,
                "hidden_activation": "gelu_pytorch_tanh",
            },
            "image_token_id": self.image_token,
            "boi_token_id": self.begin_token,
            "eoi_token_id": self.end_token,
        }
