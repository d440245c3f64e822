"""Images of the command line: read and checked before a model is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dgemma.errors import InputError
from dgemma.images.decode import RgbImage, decode_image
from dgemma.images.preprocess import TOKEN_BUDGETS

FLAG = "--image"


def add_image_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        FLAG, action="append", metavar="PATH", help="an image before the prompt (PNG, JPEG, ...); repeatable"
    )
    parser.add_argument(
        "--max-image-tokens", type=int, choices=TOKEN_BUDGETS,
        help="of each image; more show more detail (default: the checkpoint's)",
    )  # fmt: skip


def image_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `lm.chat` and `lm.generate` that are about images."""
    budget = args.max_image_tokens
    if budget is not None and not args.image:
        raise InputError.about("--max-image-tokens", f"is {budget}, but there is no {FLAG}. Drop it.")
    return {} if budget is None else {"max_image_tokens": budget}


def read_images(paths: Sequence[str] | None) -> list[RgbImage]:
    return [read_image(path, FLAG) for path in paths or ()]


def read_image(path: str, name: str) -> RgbImage:
    """`name`: the option or command that gives it, for errors."""
    if path.startswith(("http://", "https://")):
        raise InputError.about(name, f"{path} is an address; download it and give the path of the file.")
    try:
        return decode_image(Path(path).expanduser())
    except InputError as error:
        raise error.with_field(name) from None


def content_of(images: Sequence[object], text: str) -> str | list[dict[str, Any]]:
    """The content of a user's message: the images, then the text."""
    if not images:
        return text
    return [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
