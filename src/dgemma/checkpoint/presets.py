"""Model geometries for `dgemma new`, from a tiny model to the released one. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from dgemma.model.config import LayerKind, LayerShape, ModelConfig, RopeShape

_ROPE = {
    LayerKind.SLIDING: RopeShape(theta=1e4, rotated_share=1.0),
    LayerKind.FULL: RopeShape(theta=1e6, rotated_share=0.25),
}


@dataclass(frozen=True)
class Preset:
    purpose: str
    config: ModelConfig


def layers(
    count: int, *, head_dim: int, kv_heads: int, full_head_dim: int, full_kv_heads: int, every: int = 6
) -> tuple[LayerShape, ...]:
    sliding = LayerShape(kind=LayerKind.SLIDING, num_kv_heads=kv_heads, head_dim=head_dim)
    full = LayerShape(kind=LayerKind.FULL, num_kv_heads=full_kv_heads, head_dim=full_head_dim)
    return tuple(full if (i + 1) % every == 0 or i + 1 == count else sliding for i in range(count))


PRESETS = {
    "tiny": Preset(
        "tests and first steps; a megabyte",
        ModelConfig(
            vocab_size=2048, hidden_size=64, mlp_size=96, num_heads=4,
            layers=layers(3, head_dim=16, kv_heads=2, full_head_dim=32, full_kv_heads=1),
            window=64, rope=_ROPE, num_experts=8, experts_per_token=2, expert_size=32,
            norm_eps=1e-6, logit_cap=30.0, canvas_len=32, max_positions=8192,
        ),
    ),
    "small": Preset(
        "training experiments on a CPU",
        ModelConfig(
            vocab_size=2048, hidden_size=256, mlp_size=384, num_heads=4,
            layers=layers(6, head_dim=64, kv_heads=2, full_head_dim=128, full_kv_heads=1),
            window=256, rope=_ROPE, num_experts=16, experts_per_token=4, expert_size=128,
            norm_eps=1e-6, logit_cap=30.0, canvas_len=128, max_positions=32_768,
        ),
    ),
    "medium": Preset(
        "speed measurements: 0.7 B parameters, released vocabulary and canvas",
        ModelConfig(
            vocab_size=262_144, hidden_size=1024, mlp_size=1024, num_heads=8,
            layers=layers(8, head_dim=128, kv_heads=4, full_head_dim=256, full_kv_heads=2),
            window=1024, rope=_ROPE, num_experts=32, experts_per_token=4, expert_size=512,
            norm_eps=1e-6, logit_cap=30.0, canvas_len=256, max_positions=262_144,
        ),
    ),
    "26b": Preset(
        "the released geometry; 51 GB, or --config-only",
        ModelConfig(
            vocab_size=262_144, hidden_size=2816, mlp_size=2112, num_heads=16,
            layers=layers(30, head_dim=256, kv_heads=8, full_head_dim=512, full_kv_heads=2),
            window=1024, rope=_ROPE, num_experts=128, experts_per_token=8, expert_size=704,
            norm_eps=1e-6, logit_cap=30.0, canvas_len=256, max_positions=262_144,
        ),
    ),
}  # fmt: skip
