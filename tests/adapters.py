"""What the adapter tests share: every logit of both doors, and an adapter that does something."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dgemma.language_model import LanguageModel
from dgemma.model.lora import LoraSettings, lora_parameters

if TYPE_CHECKING:
    from oracle import Case

# Ranks that need filling up in bf16 (3) and differ between linears and experts.
SETTINGS = LoraSettings(
    rank=5, expert_rank=3, alpha=7.0, expert_alpha=6.0,
    targets=("attention", "mlp", "experts", "self_conditioning", "router"),
)  # fmt: skip


def every_logit(lm: LanguageModel, case: Case) -> Tensor:
    """Both doors, with and without self-conditioning, rows of different lengths."""
    from oracle import tokens  # the reference takes seconds to import, and who wants an adapter needs it not

    cache = lm.new_cache(2)
    hidden = lm.encode(tokens(case, 2, 20, seed=1), cache, lengths=[20, 13])
    canvas = tokens(case, 2, case.canvas_len, seed=2)
    logits = lm.logits(lm.denoise(canvas, cache))
    again = lm.logits(lm.denoise(canvas, cache, lm.soft_embedding(logits)))
    return torch.cat([lm.logits(hidden), logits, again], dim=1)


@torch.no_grad()
def train(lm: LanguageModel, seed: int, size: float = 0.1) -> LanguageModel:
    """Numbers in `up` as training would leave them."""
    generator = torch.Generator().manual_seed(seed)
    for name, factor in lora_parameters(lm.transformer).items():
        if name.endswith(".up"):
            factor.copy_(size * torch.randn(factor.shape, generator=generator))
    return lm
