"""The images of a request, checked against the model. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from dgemma.errors import InputError
from dgemma.images.preprocess import PlacedImage
from dgemma.images.prompt import text_only
from dgemma.model.config import ModelConfig


def check_images(images: Sequence[PlacedImage], config: ModelConfig, prompt_len: int) -> None:
    """Raise if the model cannot take the images of a prompt."""
    if images and config.vision is None:
        raise text_only("images", "are given")
    after = 0
    for number, image in enumerate(images, start=1):
        assert config.vision is not None
        patches, vision = image.patches, config.vision
        if image.start < after or image.stop > prompt_len:
            raise InputError.about(
                "images",
                f"hold an image, number {number}, at positions {image.start} to {image.stop}; it must begin "
                f"at {after} or later and end within the prompt of {prompt_len} tokens.",
            )
        after = image.stop
        is_whole = patches.rows % vision.pooling == 0 and patches.columns % vision.pooling == 0
        num_patches = patches.rows * patches.columns
        sizes = (num_patches * vision.patch_values, num_patches // vision.pooling**2)
        if num_patches < 1 or not is_whole or (len(patches.pixels), patches.num_tokens) != sizes:
            raise InputError.about(
                "images",
                f"hold an image, number {number}, that was not prepared for this model: "
                f"{patches.rows} x {patches.columns} patches in {len(patches.pixels)} bytes with "
                f"{patches.num_tokens} tokens. Prepare it with this checkpoint's settings.",
            )
        if max(patches.rows, patches.columns) > vision.num_positions:
            raise InputError.about(
                "images",
                f"hold an image, number {number}, of {patches.rows} x {patches.columns} patches; this model "
                f"has positions for {vision.num_positions} on each side. Lower max_image_tokens.",
            )
