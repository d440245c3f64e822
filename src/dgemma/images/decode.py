"""Images decoded to RGB pixels. The bytes may come from anybody.

The file's signature selects one decoder of Pillow, never a name or a media type. The size that its header
states is checked before pixels are allocated. Pixels equal those of `transformers.image_utils.load_image`:
the first frame, upright as its EXIF says, converted to RGB.

What a decoder allocates is bounded by the size of the image; its time is not. A server decodes in a process
of its own (`process.py`).
"""

from __future__ import annotations

import hashlib
import importlib
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

from dgemma.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_PIXEL_BYTES = 3
_HEAD_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class RgbImage:
    """An upright image of 8 bits per channel."""

    width: int
    height: int
    pixels: bytes = field(repr=False)  # rows from above, in each from left, three bytes per pixel
    digest: bytes = field(repr=False)  # SHA-256 of size and pixels

    @classmethod
    def of_pixels(cls, width: int, height: int, pixels: bytes) -> Self:
        assert len(pixels) == width * height * _PIXEL_BYTES
        digest = hashlib.sha256(f"{width}x{height}:".encode())
        digest.update(pixels)
        return cls(width=width, height=height, pixels=pixels, digest=digest.digest())


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """What `decode_image` takes."""

    max_bytes: int = 20 << 20
    """Of the file."""
    max_pixels: int = 64 << 20
    """Width times height, as the header states them."""
    formats: tuple[str, ...] = FORMATS

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_pixels"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError.about(name, f"is {value!r}; it must be a whole number from 1.")
        unknown = [name for name in self.formats if name not in FORMATS]
        if unknown or not self.formats:
            raise InputError.about("formats", f"is {self.formats!r}; give some of {', '.join(FORMATS)}.")


def decode_image(source: bytes | Path | Image, *, limits: ImageLimits | None = None) -> RgbImage:
    """The pixels of a file's bytes, of a file, or of an image that Pillow has opened.

    A text is refused: whoever has one must say whether it is a path or something else.
    """
    limits = limits or ImageLimits()
    check_pillow()
    from PIL import Image

    if isinstance(source, Image.Image):
        image = source
        _check_size(image.size, limits)
        return _decoded(lambda: _pixels_of(image, is_ours=False))
    if isinstance(source, Path):
        try:
            return decode_image(read_image_file(source, limits), limits=limits)
        except InputError as error:
            rule = str(error).removeprefix("image ")
            raise InputError.about("image", f"{source} {rule}", code=error.code) from None
    content = source
    if not isinstance(content, bytes):
        raise InputError.about(
            "image", f"is of type {type(content).__name__}; give bytes, a Path, or an image of Pillow."
        )
    if not content:
        raise _invalid("is empty; give the bytes of an image file.")
    if len(content) > limits.max_bytes:
        raise too_many_bytes(len(content), limits)
    kind = image_format(content[:_HEAD_BYTES], limits)

    def decode() -> RgbImage:
        if kind == "WEBP":  # its decoder allocates when it is opened
            _check_size(_webp_size(content[:_HEAD_BYTES]), limits)
        opened = _opened(kind, BytesIO(content))
        _check_size(opened.size, limits)
        return _pixels_of(opened, is_ours=True)

    return _decoded(decode, kind)


def check_pillow() -> None:
    try:
        importlib.import_module("PIL.Image")
    except ImportError:
        raise InputError.about("image", "needs Pillow; run: pip install 'dgemma[vision]'") from None


def read_image_file(path: Path, limits: ImageLimits) -> bytes:
    """The bytes of a regular file; of one that is too large none are read."""
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise InputError.about("image", "is not a file; give the path of an image file.")
        if facts.st_size > limits.max_bytes:
            raise too_many_bytes(facts.st_size, limits)
        return path.read_bytes()
    except OSError as error:
        raise InputError.about("image", f"cannot be read: {error.strerror}.") from None


def image_format(head: bytes, limits: ImageLimits) -> str:
    """The name of the format of a file that begins so."""
    for kind, is_kind in _SIGNATURES.items():
        if is_kind(head) and kind in limits.formats:
            return kind
    found = next((name for name, is_kind in _OTHERS.items() if is_kind(head)), None)
    what = "is in a format that is not read" if found is None else f"is {found}, which is not read"
    raise InputError.about(
        "image",
        f"{what}; give {' or '.join(filter(None, (', '.join(limits.formats[:-1]), limits.formats[-1])))}.",
        code="invalid_image_format",
    )


def _starts(*prefixes: bytes) -> Callable[[bytes], bool]:
    return lambda head: head.startswith(prefixes)


def _brand(*brands: bytes) -> Callable[[bytes], bool]:
    return lambda head: head[4:8] == b"ftyp" and head[8:12] in brands


_SIGNATURES: dict[str, Callable[[bytes], bool]] = {
    "PNG": _starts(b"\x89PNG\r\n\x1a\n"),
    "JPEG": _starts(b"\xff\xd8\xff"),
    "WEBP": lambda head: head[:4] == b"RIFF" and head[8:12] == b"WEBP",
    "GIF": _starts(b"GIF87a", b"GIF89a"),
    "BMP": _starts(b"BM"),
}
# Not read, but named, so that an error says what was sent.
_OTHERS: dict[str, Callable[[bytes], bool]] = {
    **{f"a {kind}": is_kind for kind, is_kind in _SIGNATURES.items()},  # where limits leave it out
    # What the decoder of TIFF allocates is not bounded by the size of the image.
    "a TIFF": _starts(b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "an AVIF": _brand(b"avif", b"avis"),
    "a HEIC": _brand(b"heic", b"heix", b"hevc", b"mif1", b"msf1"),
    "a PDF": _starts(b"%PDF"),
    "an SVG": lambda head: b"<svg" in head.lower() or head.lstrip().startswith(b"<?xml"),
    "an HTML page": lambda head: head.lstrip().lower().startswith((b"<!doctype html", b"<html")),
    "a video": _brand(b"isom", b"mp42", b"qt  ", b"avc1", b"M4V "),
}


def _webp_size(head: bytes) -> tuple[int, int]:
    kind, content = head[12:16], head[20:30]
    if kind == b"VP8X" and len(content) == 10:
        return (
            1 + int.from_bytes(content[4:7], "little"),
            1 + int.from_bytes(content[7:10], "little"),
        )
    if kind == b"VP8L" and content[:1] == b"\x2f":
        bits = int.from_bytes(content[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and content[3:6] == b"\x9d\x01\x2a":
        return (
            int.from_bytes(content[6:8], "little") & 0x3FFF,
            int.from_bytes(content[8:10], "little") & 0x3FFF,
        )
    raise _invalid("is no whole WEBP file: its header is damaged. Send it again, or another file.")


def _opened(kind: str, file: IO[bytes]) -> Image:
    """With its header read. The decoder is called itself: `Image.open` would ask others too, and warn."""
    from PIL import (
        BmpImagePlugin,
        GifImagePlugin,
        JpegImagePlugin,
        PngImagePlugin,
        WebPImagePlugin,
    )

    decoders: dict[str, Callable[[IO[bytes]], Image]] = {
        "PNG": PngImagePlugin.PngImageFile,
        "JPEG": JpegImagePlugin.JpegImageFile,
        "WEBP": WebPImagePlugin.WebPImageFile,
        "GIF": GifImagePlugin.GifImageFile,
        "BMP": BmpImagePlugin.BmpImageFile,
    }
    return decoders[kind](file)


def _pixels_of(image: Image, *, is_ours: bool) -> RgbImage:
    from PIL import ImageOps

    if is_ours:
        ImageOps.exif_transpose(image, in_place=True)
        upright = image
    else:
        upright = ImageOps.exif_transpose(image)  # a copy
    # Pillow warns of it, and it has no part in the colours: these are as if nothing were transparent.
    upright.info.pop("transparency", None)
    rgb = upright.convert("RGB")
    return RgbImage.of_pixels(rgb.width, rgb.height, rgb.tobytes())


def _decoded(decode: Callable[[], RgbImage], kind: str = "image") -> RgbImage:
    try:
        return decode()
    except InputError:
        raise
    except MemoryError:
        raise InputError.about(
            "image", "needs more memory than there is; give a smaller one.", code="image_too_large"
        ) from None
    except Exception as error:  # damaged files make decoders raise anything: SyntaxError, zlib.error, ...
        why = " ".join(str(error).split())[:200]
        raise _invalid(f"cannot be decoded as {kind}: {why or type(error).__name__}.") from error


def _check_size(size: tuple[int, int], limits: ImageLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise _invalid(f"has {width} x {height} pixels; give one that has some.")
    if width * height > limits.max_pixels:
        raise InputError.about(
            "image",
            f"has {width} x {height} pixels; at most {limits.max_pixels:,} are taken. Give a smaller one.",
            code="image_too_large",
        )


def too_many_bytes(num_bytes: int, limits: ImageLimits) -> InputError:
    return InputError.about(
        "image",
        f"has {num_bytes:,} bytes; at most {limits.max_bytes:,} are taken. Give a smaller one.",
        code="image_too_large",
    )


def _invalid(rule: str) -> InputError:
    return InputError.about("image", rule, code="invalid_image")
