"""Patches, positions and numbers of soft tokens equal the reference's Pillow processor."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image
from transformers.image_utils import load_image
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from dgemma.errors import ConfigError, InputError
from dgemma.images.decode import decode_image
from dgemma.images.preprocess import (
    TOKEN_BUDGETS,
    ImageSettings,
    PlacedImage,
    check_token_budget,
    cut_patches,
    resized_size,
)
from images.test_decode import encoded, noise
from random_image import random_image
from sizes import cases

SIZES = [
    (1, 1),
    (1, 700),
    (700, 1),
    (768, 768),
    (47, 49),
    (1001, 333),
    (640, 480),
    (13, 2000),
    (2, 97),
    (799, 801),
]


@pytest.mark.parametrize("budget", TOKEN_BUDGETS[: cases(full=5, part=3)])
def test_patches_and_positions_equal_the_oracles(budget: int) -> None:
    oracle = Gemma4ImageProcessorPil(max_soft_tokens=budget)
    ours = ImageSettings(max_tokens=budget)
    for number, (width, height) in enumerate(SIZES):
        image = random_image(number, width, height)
        pixels = np.frombuffer(image.pixels, dtype=np.uint8).reshape(height, width, 3)
        theirs = oracle.preprocess(pixels, input_data_format="channels_last", return_tensors="np")
        found = cut_patches(image, ours)
        count = found.rows * found.columns
        assert theirs["num_soft_tokens_per_image"][0] == found.num_tokens
        assert np.array_equal(theirs["pixel_values"][0, :count], found.values())
        assert theirs["pixel_values"].dtype == found.values().dtype
        row, column = np.divmod(np.arange(count), found.columns)
        assert np.array_equal(theirs["image_position_ids"][0, :count], np.stack((column, row), -1))
        assert (theirs["image_position_ids"][0, count:] == -1).all()
        assert found.num_tokens <= budget


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.sampled_from(TOKEN_BUDGETS))
@settings(max_examples=cases(full=5000, part=400), deadline=None)
def test_sizes_equal_the_oracles(width: int, height: int, budget: int) -> None:
    theirs = get_aspect_ratio_preserving_size(
        height, width, patch_size=16, max_patches=budget * 9, pooling_kernel_size=3
    )
    assert resized_size(width, height, ImageSettings(max_tokens=budget)) == theirs[::-1]


def fifty_files() -> Iterator[tuple[str, bytes]]:
    """Odd sizes, alpha, grey, palettes, 16 bits, turned by EXIF, animated; in every format that is read."""
    sizes = [(33, 65), (201, 50), (7, 400), (97, 101), (160, 48), (350, 350)]
    kinds = [
        ("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "LA"), ("PNG", "L"), ("PNG", "P"), ("PNG", "1"),
        ("PNG", "I;16"), ("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("WEBP", "RGB"), ("WEBP", "RGBA"),
        ("GIF", "P"), ("GIF", "L"), ("BMP", "RGB"), ("BMP", "RGBA"),
    ]  # fmt: skip
    for number in range(36):
        (kind, mode), size = kinds[number % len(kinds)], sizes[number % len(sizes)]
        yield f"{kind} {mode} {size}", encoded(noise(mode, *size, seed=number), kind)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        yield f"turned {orientation}", encoded(noise("RGB", 300, 90, orientation), "JPEG", exif=exif)
    for number, kind in enumerate(("GIF", "WEBP", "PNG") * 2):
        frames = [noise("RGB", 90 + number, 60, seed) for seed in range(3)]
        yield f"animated {kind}", encoded(frames[0], kind, save_all=True, append_images=frames[1:])


def test_pixel_values_of_fifty_files_equal_the_oracles(tmp_path: Path) -> None:
    oracle = Gemma4ImageProcessorPil(max_soft_tokens=70)
    files = dict(fifty_files())
    assert sum(1 for _ in fifty_files()) == 50
    for name, content in files.items():
        file = tmp_path / "image"
        file.write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of transparency in palettes
            theirs = oracle.preprocess(load_image(str(file)), return_tensors="np")
        found = cut_patches(decode_image(content), ImageSettings(max_tokens=70))
        count = found.rows * found.columns
        assert np.array_equal(theirs["pixel_values"][0, :count], found.values()), name
        assert theirs["num_soft_tokens_per_image"][0] == found.num_tokens, name


def test_images_have_one_digest_if_and_only_if_they_have_the_same_patches() -> None:
    image, other = random_image(1, 300, 200), random_image(2, 300, 200)
    small, large = ImageSettings(max_tokens=70), ImageSettings(max_tokens=140)
    assert cut_patches(image, small) == cut_patches(image, small)
    digests = {cut_patches(one, budget).digest for one in (image, other) for budget in (small, large)}
    assert len(digests) == 4


def test_a_placed_image_ends_after_its_soft_tokens() -> None:
    patches = cut_patches(random_image(1, 300, 200), ImageSettings(max_tokens=70))
    assert PlacedImage(start=5, patches=patches).stop == 5 + patches.num_tokens


def test_settings_come_from_the_files_of_a_checkpoint() -> None:
    def read(raw: dict[str, object]) -> ImageSettings:
        return ImageSettings.from_json(raw, patch_size=16, pooling=3)

    assert read({}) == ImageSettings()
    assert read({"max_soft_tokens": 560, "patch_size": 16}) == ImageSettings(max_tokens=560)
    saved = Gemma4ImageProcessorPil(max_soft_tokens=140).to_dict()
    assert read(saved) == read({"image_processor": saved}) == ImageSettings(max_tokens=140)
    for name, value in (("do_normalize", True), ("resample", 2), ("patch_size", 14), ("rescale_factor", 1.0)):
        with pytest.raises(ConfigError, match=rf"{name} is {value}; dgemma supports only"):
            read({name: value})
    with pytest.raises(ConfigError, match="max_soft_tokens is 281; it must be one of 70, 140"):
        read({"max_soft_tokens": 281})
    with pytest.raises(ConfigError, match=r"max_soft_tokens is 280\.0; it must be one of"):
        read({"max_soft_tokens": 280.0})
    with pytest.raises(ConfigError, match="pooling is 0; it must be between 1 and 64"):
        ImageSettings(pooling=0)


def test_a_budget_is_one_that_the_model_knows() -> None:
    assert check_token_budget(70) == 70
    for wrong in (0, 71, True, 70.0, "70", None):
        with pytest.raises(InputError, match=r"max_image_tokens is .*; it must be one of 70, 140, 280"):
            check_token_budget(wrong)
