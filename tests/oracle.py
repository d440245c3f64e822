"""The reference implementation as the tests use it: tiny, random, well-conditioned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextConfig,
    DynamicCache,
)
from transformers.models.gemma4 import Gemma4VisionConfig

from dgemma.checkpoint.load import place
from dgemma.checkpoint.names import tensor_specs, vision_specs
from dgemma.language_model import LanguageModel
from dgemma.model.config import ModelConfig
from dgemma.model.execution import Execution
from dgemma.model.transformer import Transformer

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, eq=False)
class Case:
    """One tiny geometry. `text` overrides the defaults below. Hashed by identity."""

    name: str
    text: dict[str, Any] = field(default_factory=dict)
    canvas_len: int = 8
    one_expert: bool = False  # route every token to the same experts
    seed: int = 0

    @property
    def window(self) -> int:
        return int(self.text.get("sliding_window", 8))


DEFAULT_TEXT: dict[str, Any] = {
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
}

CASES = [
    Case("small window", seed=1),
    Case("one full layer", {"num_hidden_layers": 1, "layer_types": [FULL]}, seed=2),
    Case(
        "default layer pattern, grouped heads",
        {"num_hidden_layers": 7, "layer_types": None, "num_key_value_heads": 1,
         "num_global_key_value_heads": 2},
        seed=3,
    ),
    Case("window larger than canvas", {"sliding_window": 24}, seed=4),
    Case(
        "odd sizes",
        {"hidden_size": 40, "head_dim": 12, "global_head_dim": 20, "intermediate_size": 36,
         "moe_intermediate_size": 12, "vocab_size": 101,
         "rope_parameters": {
             SLIDING: {"rope_type": "default", "rope_theta": 500.0},
             FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 3e4}}},
        canvas_len=5,
        seed=5,
    ),
    Case("every expert for every token", {"top_k_experts": 8}, seed=6),
    Case("one expert per token, all the same", {"top_k_experts": 1}, one_expert=True, seed=7),
    Case(
        "twelve layers, window of two",
        {"num_hidden_layers": 12, "layer_types": None, "sliding_window": 2},
        canvas_len=6,
        seed=8,
    ),
    Case(
        "large eps, no key sharing",
        {"rms_norm_eps": 1e-2, "num_key_value_heads": 4, "num_global_key_value_heads": 4,
         "layer_types": [SLIDING, SLIDING, FULL]},
        seed=9,
    ),
    Case("canvas longer than the window", {"sliding_window": 4}, canvas_len=16, seed=10),
]  # fmt: skip


def make_oracle(case: Case) -> DiffusionGemmaForBlockDiffusion:
    """One per geometry and process, for tests that only read it; `new_oracle` may be changed."""
    return shared(new_oracle, case)


def calm_oracle(case: Case) -> DiffusionGemmaForBlockDiffusion:
    """Shared as above, with weights on which rounding does not grow from step to step."""
    return shared(new_calm_oracle, case)


_SHARED: dict[Any, tuple[DiffusionGemmaForBlockDiffusion, list[Any]]] = {}


def shared(make: Any, case: Case) -> DiffusionGemmaForBlockDiffusion:
    if (make, case) not in _SHARED:
        oracle = make(case)
        _SHARED[make, case] = oracle, versions(oracle)
    oracle, made = _SHARED[make, case]
    assert versions(oracle) == made, f"a test changed the shared oracle of {case.name!r}"
    torch.manual_seed(case.seed)  # the first caller and the last find the same random state
    return oracle


def versions(oracle: DiffusionGemmaForBlockDiffusion) -> list[Any]:
    """Changes with any write to a parameter, any cast and any wrapper."""
    return [(name, tensor.dtype, tensor._version) for name, tensor in oracle.named_parameters()]


def new_calm_oracle(case: Case) -> DiffusionGemmaForBlockDiffusion:
    oracle = new_oracle(case)
    calm(oracle)
    return oracle


@torch.no_grad()
def calm(oracle: DiffusionGemmaForBlockDiffusion) -> None:
    for name, tensor in oracle.named_parameters():
        if "vision" in name:
            continue
        if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            tensor *= 0.5  # at 0.2 nine of ten tokens would copy the noise they started from
        if name.endswith("self_conditioning.down_proj.weight"):
            tensor *= 0.3


def new_oracle(case: Case) -> DiffusionGemmaForBlockDiffusion:
    """A random oracle in fp32 whose rounding noise stays far below any real mistake."""
    torch.manual_seed(case.seed)
    model = DiffusionGemmaForBlockDiffusion(
        DiffusionGemmaConfig(
            text_config=DiffusionGemmaTextConfig(**{**DEFAULT_TEXT, **case.text}),
            vision_config=tiny_vision_config(),
            canvas_length=case.canvas_len,
        )
    ).eval()
    randomize(model, case)
    return model


def tiny_vision_config() -> Gemma4VisionConfig:
    return Gemma4VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, position_embedding_size=16,
    )  # fmt: skip


@torch.no_grad()
def randomize(model: DiffusionGemmaForBlockDiffusion, case: Case) -> None:
    """Every number that could be forgotten differs from its default."""
    generator = torch.Generator().manual_seed(case.seed)

    def uniform(tensor: Tensor, low: float, high: float) -> None:
        tensor.copy_(low + (high - low) * torch.rand(tensor.shape, generator=generator))

    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "vision" in name or "inv_freq" in name or "embed_scale" in name:
            continue
        if name.endswith("layer_scalar"):
            uniform(tensor, 0.6, 1.4)
        elif name.endswith("q_norm.weight"):
            uniform(tensor, 0.15, 0.45)
        elif tensor.ndim == 1:
            uniform(tensor, 0.5, 1.5)
        else:
            std = 0.2 if "embed" not in name else 0.5
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
        if name.endswith("self_conditioning.down_proj.weight"):
            tensor *= 0.3  # self-conditioning amplifies rounding from step to step
        if name.endswith("router.proj.weight"):
            tensor *= 8  # spread the routing, so that no choice hangs on the last bit
            if case.one_expert:
                tensor[0, 0] = 100
        if name.endswith("embed_tokens.weight") and case.one_expert:
            tensor *= 0.2
            tensor[:, 0] = 2  # a direction that every token has and the router reads


def make_ours(
    oracle: DiffusionGemmaForBlockDiffusion,
    *,
    dtype: torch.dtype = torch.float32,
    execution: Execution | None = None,
) -> LanguageModel:
    """Our stack with the oracle's weights."""
    config = ModelConfig.from_json(oracle.config.to_dict())
    transformer = Transformer(config, dtype=dtype, device="cpu", execution=execution)
    state = oracle.state_dict()
    for spec in (*tensor_specs(config), *vision_specs(config)):
        place(transformer, spec.path, state[spec.name].clone().to(dtype))
    return LanguageModel(transformer)


def oracle_cache(oracle: DiffusionGemmaForBlockDiffusion) -> DynamicCache:
    # Without the config its cache has no windows.
    return DynamicCache(config=oracle.config.text_config)


def encoder_logits(oracle: DiffusionGemmaForBlockDiffusion, hidden: Tensor) -> Tensor:
    cap = oracle.final_logit_softcapping
    return torch.tanh(oracle.lm_head(hidden).float() / cap) * cap


def tokens(case: Case, rows: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * case.seed + seed)
    vocab = int({**DEFAULT_TEXT, **case.text}["vocab_size"])
    return torch.randint(vocab, (rows, length), generator=generator)
