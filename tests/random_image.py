"""Images of noise, for tests."""

from __future__ import annotations

import numpy as np

from dgemma.images.decode import RgbImage


def random_image(seed: int, width: int, height: int) -> RgbImage:
    """Smooth, so that resizing matters, and different in every part."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (3 + height // 8, 3 + width // 8, 3))
    rows, columns = (
        np.linspace(0, n - 1, size) for n, size in zip(coarse.shape, (height, width), strict=False)
    )
    picture = coarse[np.ix_(rows.round().astype(int), columns.round().astype(int))]
    picture = (picture + generator.integers(0, 40, picture.shape)).clip(0, 255).astype(np.uint8)
    return RgbImage.of_pixels(width, height, picture.tobytes())
