"""Images in prompts: where their soft tokens stand, and images in the messages of a chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgemma.errors import InputError
from dgemma.images.decode import RgbImage, decode_image
from dgemma.images.preprocess import ImagePatches, ImageSettings, PlacedImage, cut_patches

PrepareImage = Callable[[RgbImage | ImagePatches], ImagePatches]


@dataclass(frozen=True)
class ImageMarks:
    """The control tokens of images: in place of each soft token, before an image, and after it."""

    image: int
    begin: int
    end: int


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt's tokens, with the images among them."""

    tokens: tuple[int, ...]
    images: tuple[PlacedImage, ...] = ()


def text_only(field: str, found: str) -> InputError:
    """Images for a model that has no vision tower."""
    return InputError.about(
        field, f"{found}, but this model reads text only: its checkpoint has no vision tower."
    )


def place_images(tokens: Sequence[int], images: Sequence[ImagePatches], marks: ImageMarks) -> ImagePrompt:
    """`tokens` with one image token per image -> with one per soft token, between the two marks."""
    count = sum(token == marks.image for token in tokens)
    if count != len(images):
        raise InputError.about(
            "images", f"are {len(images)}, but the prompt has places for {count}; give one for each place."
        )
    placed: list[int] = []
    found: list[PlacedImage] = []
    for token in tokens:
        if token != marks.image:
            placed.append(token)
            continue
        patches = images[len(found)]
        found.append(PlacedImage(start=len(placed) + 1, patches=patches))
        placed += [marks.begin, *[marks.image] * patches.num_tokens, marks.end]
    return ImagePrompt(tuple(placed), tuple(found))


@dataclass(frozen=True)
class ModelImages:
    """How images become prompts of one model."""

    settings: ImageSettings
    marks: ImageMarks

    def patches(self, image: RgbImage | ImagePatches, *, budget: int | None = None) -> ImagePatches:
        """budget: of soft tokens, in place of the checkpoint's."""
        if isinstance(image, ImagePatches):
            return image
        return cut_patches(image, self.settings.with_budget(budget))

    def prompt(
        self, tokens: Sequence[int], images: Sequence[object], *, budget: int | None, bos: int | None
    ) -> ImagePrompt:
        """`tokens` with an image at each image token; where it has none, all of them first, behind `bos`."""
        patches = [self.patches(read_image(image), budget=budget) for image in images]
        placed = list(tokens)
        if self.marks.image not in placed:
            begin = 1 if placed[:1] == [bos] else 0
            placed[begin:begin] = [self.marks.image] * len(images)
        return place_images(placed, patches, self.marks)


def read_image(source: object) -> RgbImage | ImagePatches:
    """The pixels of an image that a caller gives in Python: a path, bytes, or an image of Pillow.

    One whose patches are cut already stays as it is.
    """
    if isinstance(source, RgbImage | ImagePatches):
        return source
    if isinstance(source, str):
        if source.startswith(("http://", "https://", "data:")):
            raise InputError.about(
                "image", f"is {source[:40]!r}; addresses are not fetched. Give a path, or the file's bytes."
            )
        source = Path(source)
    return decode_image(source)  # type: ignore[arg-type]  # it refuses other types by name


def read_message_images(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Copies of messages whose image parts hold pixels. What is no message is left to its own check."""
    return [_with_pixels(message) for message in messages]


def _with_pixels(message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    return {**message, "content": [_read_part(part) for part in content]}


def _read_part(part: Any) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "image" or part.get("image") is None:
        return part
    return {**part, "image": read_image(part["image"])}
