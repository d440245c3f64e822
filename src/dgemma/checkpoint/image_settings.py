"""How a checkpoint's images are prepared, read from its files. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from dgemma.checkpoint.source import read_json
from dgemma.errors import ConfigError
from dgemma.images.preprocess import ImageSettings
from dgemma.model.vision_config import VisionConfig

# The newer file holds the settings of all processors.
_FILES = ("processor_config.json", "preprocessor_config.json")


def read_image_settings(directory: Path | None, vision: VisionConfig) -> ImageSettings:
    """Of a checkpoint's directory; without such a file, the reference's defaults."""
    for file in () if directory is None else (directory / name for name in _FILES):
        if file.is_file():
            try:
                return ImageSettings.from_json(
                    read_json(file), patch_size=vision.patch_size, pooling=vision.pooling
                )
            except ConfigError as error:
                raise ConfigError(f"{file}: {error}") from None
    return ImageSettings(patch_size=vision.patch_size, pooling=vision.pooling)
