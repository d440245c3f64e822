"""The reference's vision tower, tiny and random, and its image processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextConfig,
)
from transformers.models.gemma4 import Gemma4VisionConfig
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from dgemma.images.preprocess import ImagePatches, ImageSettings, PlacedImage, cut_patches
from oracle import CASES, DEFAULT_TEXT, Case, calm, randomize
from random_image import random_image

DEFAULT_VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "position_embedding_size": 64,
    "patch_size": 4,
    "pooling_kernel_size": 3,
}


@dataclass(frozen=True, eq=False)
class VisionCase:
    """A tiny tower. `vision` overrides the defaults above. Hashed by identity."""

    name: str
    vision: dict[str, Any] = field(default_factory=dict)
    grids: tuple[tuple[int, int], ...] = ((3, 9), (9, 6), (3, 3))  # rows and columns of patches
    seed: int = 0

    @property
    def settings(self) -> ImageSettings:
        fields = {**DEFAULT_VISION, **self.vision}
        return ImageSettings(
            patch_size=fields["patch_size"], pooling=fields["pooling_kernel_size"], max_tokens=6
        )


VISION_CASES = [
    VisionCase("squares of three by three", seed=1),
    VisionCase("odd grids", {"pooling_kernel_size": 5}, ((5, 15), (15, 5), (5, 5)), seed=2),
    VisionCase(
        "standardized, pairs",
        {"standardize": True, "pooling_kernel_size": 2, "num_hidden_layers": 3},
        ((2, 10), (6, 4)),
        seed=3,
    ),
    VisionCase("clipped linear layers", {"use_clipped_linears": True}, seed=4),
    VisionCase(
        "grouped heads, odd sizes",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "hidden_size": 20,
         "intermediate_size": 28, "rms_norm_eps": 1e-2,
         "rope_parameters": {"rope_type": "axial", "rope_theta": 37.0}},
        seed=5,
    ),
    VisionCase(
        "the table of positions to its last row",
        {"position_embedding_size": 12, "patch_size": 2, "standardize": True, "use_clipped_linears": True},
        ((12, 3), (3, 12)),
        seed=6,
    ),
]  # fmt: skip


def vision_oracle(
    case: VisionCase, text: Case = CASES[0], *, bidirectional: bool = True
) -> DiffusionGemmaForBlockDiffusion:
    """A random model with a random tower. bidirectional: images are seen whole."""
    torch.manual_seed(case.seed)
    model = DiffusionGemmaForBlockDiffusion(
        DiffusionGemmaConfig(
            text_config=DiffusionGemmaTextConfig(
                **{**DEFAULT_TEXT, **text.text},
                use_bidirectional_attention="vision" if bidirectional else None,
            ),
            vision_config=Gemma4VisionConfig(**{**DEFAULT_VISION, **case.vision}),
            canvas_length=text.canvas_len,
            image_token_id=IMAGE,
            boi_token_id=BEGIN,
            eoi_token_id=END,
        )
    ).eval()
    randomize(model, text)
    randomize_vision(model, case.seed)
    return model


def calm_vision_oracle(
    case: VisionCase, text: Case, *, bidirectional: bool = True
) -> DiffusionGemmaForBlockDiffusion:
    """One per geometry and process, on which rounding does not grow from step to step."""
    key = (case, text, bidirectional)
    if key not in _CALM:
        _CALM[key] = vision_oracle(case, text, bidirectional=bidirectional)
        calm(_CALM[key])
    return _CALM[key]


_CALM: dict[tuple[VisionCase, Case, bool], DiffusionGemmaForBlockDiffusion] = {}

# Of the small vocabulary of `oracle.DEFAULT_TEXT`.
IMAGE, BEGIN, END = 90, 91, 92


@torch.no_grad()
def randomize_vision(model: DiffusionGemmaForBlockDiffusion, seed: int) -> None:
    """Every number that could be forgotten differs from its default; limits clip a tenth of the numbers."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator)

    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "vision" not in name or "inv_freq" in name:
            continue
        if name.endswith(("_min", "_max")):
            limit = 1.5 + 0.2 * torch.rand((), generator=generator)
            tensor.copy_(limit if name.endswith("_max") else -limit)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            tensor.copy_(0.5 + 0.1 * noise(tensor))
        elif name.endswith("std_bias"):
            tensor.copy_(noise(tensor))
        elif tensor.ndim == 1:
            tensor.copy_(1 + 0.3 * noise(tensor))
        elif name.endswith("position_embedding_table"):
            tensor.copy_(0.5 * noise(tensor))
        else:
            tensor.copy_(noise(tensor) * tensor.shape[-1] ** -0.5)


def processor(settings: ImageSettings) -> Gemma4ImageProcessorPil:
    made = Gemma4ImageProcessorPil(patch_size=settings.patch_size, pooling_kernel_size=settings.pooling)
    made.max_soft_tokens = settings.max_tokens  # past its check: tiny models have small budgets
    return made


def patches_of_grid(case: VisionCase, rows: int, columns: int, seed: int = 0) -> ImagePatches:
    """Random patches of exactly this grid."""
    size = case.settings.patch_size
    image = random_image(1000 * case.seed + seed, columns * size, rows * size)
    settings = ImageSettings(
        patch_size=size, pooling=case.settings.pooling, max_tokens=rows * columns // case.settings.pooling**2
    )
    found = cut_patches(image, settings)
    assert (found.rows, found.columns) == (rows, columns)
    return found


def as_oracle_reads(images: Sequence[ImagePatches], settings: ImageSettings) -> dict[str, Tensor]:
    """Pixel values and positions, padded as its processor pads."""
    most = max(image.num_tokens for image in images) * settings.pooling**2
    values = torch.zeros(len(images), most, images[0].values().shape[1])
    places = torch.full((len(images), most, 2), -1)
    for number, image in enumerate(images):
        own = torch.from_numpy(image.values())
        values[number, : len(own)] = own
        row, column = np.divmod(np.arange(len(own)), image.columns)
        places[number, : len(own)] = torch.from_numpy(np.stack((column, row), axis=-1))
    return {"pixel_values": values, "image_position_ids": places}


def mm_token_type_ids(prompt: Tensor) -> Tensor:
    return (prompt == IMAGE).long()


def place_images(
    prompt: Sequence[int], images: Sequence[ImagePatches]
) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """A prompt with one `IMAGE` per image -> with as many as it has soft tokens, between its two marks."""
    tokens: list[int] = []
    placed: list[PlacedImage] = []
    left = iter(images)
    for token in prompt:
        if token != IMAGE:
            tokens.append(token)
            continue
        image = next(left)
        placed.append(PlacedImage(start=len(tokens) + 1, patches=image))
        tokens += [BEGIN, *[IMAGE] * image.num_tokens, END]
    assert next(left, None) is None
    return tokens, tuple(placed)
