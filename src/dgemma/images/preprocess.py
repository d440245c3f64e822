"""From a decoded image to the patches of the vision tower, and to the number of its soft tokens.

An image keeps its aspect ratio. It is resized to the largest size whose patches fit into the budget of soft
tokens and whose sides are whole numbers of soft tokens, then cut into patches, row by row.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dgemma.errors import ConfigError, InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dgemma.images.decode import RgbImage

# The budgets that the model was trained with.
TOKEN_BUDGETS = (70, 140, 280, 560, 1120)
DEFAULT_TOKEN_BUDGET = 280
_BICUBIC = 3
# What a checkpoint may say of the steps that are not settings here.
_FIXED = {
    "do_resize": True,
    "do_rescale": True,
    "do_convert_rgb": True,
    "do_normalize": False,
    "resample": _BICUBIC,
}


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """How a checkpoint's images are prepared.

    patch_size: pixels of a side of a patch. pooling: patches of a side of a soft token.
    max_tokens: the most soft tokens of an image, its budget.
    """

    patch_size: int = 16
    pooling: int = 3
    max_tokens: int = DEFAULT_TOKEN_BUDGET

    def __post_init__(self) -> None:
        for name, largest in (("patch_size", 256), ("pooling", 64), ("max_tokens", 1 << 16)):
            value = getattr(self, name)
            if not 1 <= value <= largest:
                raise ConfigError(f"{name} is {value}; it must be between 1 and {largest}.")

    @property
    def token_side(self) -> int:
        """Pixels of a side of a soft token."""
        return self.patch_size * self.pooling

    def with_budget(self, max_tokens: int | None) -> ImageSettings:
        """With a caller's budget; None: the same."""
        return self if max_tokens is None else replace(self, max_tokens=check_token_budget(max_tokens))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], *, patch_size: int, pooling: int) -> ImageSettings:
        """Read a checkpoint's processor_config.json or preprocessor_config.json.

        patch_size, pooling: of its vision tower, with which the file must agree.
        """
        nested = raw.get("image_processor")
        fields = nested if isinstance(nested, Mapping) else raw
        expected = {"patch_size": patch_size, "pooling_kernel_size": pooling, "rescale_factor": 1 / 255}
        for name, value in {**_FIXED, **expected}.items():
            found = fields.get(name)
            if found is not None and found != value:
                raise ConfigError(f"image processor: {name} is {found!r}; dgemma supports only {value!r}.")
        budget = fields.get("max_soft_tokens", DEFAULT_TOKEN_BUDGET)
        if type(budget) is not int or budget not in TOKEN_BUDGETS:
            raise ConfigError(
                f"image processor: max_soft_tokens is {budget!r}; it must be one of "
                f"{', '.join(map(str, TOKEN_BUDGETS))}."
            )
        return cls(patch_size=patch_size, pooling=pooling, max_tokens=budget)


@dataclass(frozen=True, kw_only=True)
class ImagePatches:
    """An image as the vision tower reads it."""

    rows: int  # of patches
    columns: int
    pixels: bytes = field(repr=False)  # uint8 [rows * columns, patch_size * patch_size * 3]
    num_tokens: int  # soft tokens, its positions in a prompt
    digest: bytes = field(repr=False)  # of the image and of its size in patches: equal digests, equal patches

    def values(self) -> NDArray[np.float32]:
        """Pixels from 0 to 1 [rows * columns, patch_size * patch_size * 3]."""
        import numpy as np

        levels = (np.arange(256) * (1 / 255)).astype(np.float32)  # multiplied in float64, then rounded
        found: NDArray[np.float32] = levels[np.frombuffer(self.pixels, dtype=np.uint8)]
        return found.reshape(self.rows * self.columns, -1)


@dataclass(frozen=True, kw_only=True)
class PlacedImage:
    """An image in a prompt: its soft tokens are the positions from `start` to `stop`."""

    start: int
    patches: ImagePatches

    @property
    def stop(self) -> int:
        return self.start + self.patches.num_tokens


def check_token_budget(budget: object) -> int:
    """The budget a caller gives for an image."""
    if isinstance(budget, bool) or not isinstance(budget, int) or budget not in TOKEN_BUDGETS:
        raise InputError.about(
            "max_image_tokens", f"is {budget!r}; it must be one of {', '.join(map(str, TOKEN_BUDGETS))}."
        )
    return budget


def resized_size(width: int, height: int, settings: ImageSettings) -> tuple[int, int]:
    """The width and height in pixels to which an image is resized.

    The largest size of about its aspect ratio that keeps the budget, in whole soft tokens. A long and narrow
    image, whose short side would vanish, is one soft token wide.
    """
    side = settings.token_side
    budget_px = settings.max_tokens * side**2
    factor = math.sqrt(budget_px / (height * width))
    new_height = math.floor(factor * height / side) * side
    new_width = math.floor(factor * width / side) * side
    if new_height == 0:
        new_height, new_width = side, min(width // height, settings.max_tokens) * side
    elif new_width == 0:
        new_height, new_width = min(height // width, settings.max_tokens) * side, side
    assert 0 < new_height * new_width <= budget_px
    return new_width, new_height


def cut_patches(image: RgbImage, settings: ImageSettings) -> ImagePatches:
    """Resize an image and cut it into patches."""
    import numpy as np
    from PIL import Image

    width, height = resized_size(image.width, image.height, settings)
    picture = Image.frombytes("RGB", (image.width, image.height), image.pixels)
    if (width, height) != (image.width, image.height):
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    size = settings.patch_size
    rows, columns = height // size, width // size
    patches = np.asarray(picture).reshape(rows, size, columns, size, 3).transpose(0, 2, 1, 3, 4)
    return ImagePatches(
        rows=rows,
        columns=columns,
        pixels=patches.tobytes(),
        num_tokens=rows * columns // settings.pooling**2,
        digest=hashlib.sha256(image.digest + f" {rows} {columns} {size}".encode()).digest(),
    )
