"""Decoded pixels equal the reference's loader; what is not an image, or too large, is refused by name."""

from __future__ import annotations

import random
import struct
import sys
import warnings
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image
from transformers.image_utils import load_image

from dgemma.errors import InputError
from dgemma.images.decode import FORMATS, ImageLimits, RgbImage, decode_image

MODES = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "JPEG": ("L", "RGB", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("L", "P"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
}


def noise(mode: str, width: int, height: int, seed: int) -> Image.Image:
    draw = np.random.default_rng(seed)
    if mode == "I;16":
        return Image.fromarray(draw.integers(0, 1 << 16, (height, width), dtype=np.uint16))
    rgba = Image.fromarray(draw.integers(0, 256, (height, width, 4), dtype=np.uint8), "RGBA")
    if mode in ("RGBA", "LA"):
        return rgba.convert(mode)
    return rgba.convert("RGB").convert(mode)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def reference(content: bytes, directory: Path) -> RgbImage:
    file = directory / "image"
    file.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transparency in palettes
        found = load_image(str(file))
    return RgbImage.of_pixels(found.width, found.height, found.tobytes())


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [(1, 1), (7, 5), (64, 33)])
def test_pixels_equal_the_reference(kind: str, size: tuple[int, int], tmp_path: Path) -> None:
    for seed, mode in enumerate(MODES[kind]):
        content = encoded(noise(mode, *size, seed), kind)
        assert decode_image(content) == reference(content, tmp_path), mode


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_images_are_upright(kind: str, orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    content = encoded(noise("RGB", 9, 4, orientation), kind, exif=exif)
    found = decode_image(content)
    assert found == reference(content, tmp_path)
    assert (found.width, found.height) == ((9, 4) if orientation < 5 else (4, 9))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation(kind: str, tmp_path: Path) -> None:
    frames = [noise("RGB", 8, 6, seed) for seed in range(3)]
    content = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    assert decode_image(content) == reference(content, tmp_path)


def test_transparency_is_ignored_as_the_reference_does(tmp_path: Path) -> None:
    palette = noise("RGB", 12, 12, 0).quantize(16)
    for transparency in (3, bytes(range(16))):
        content = encoded(palette, "PNG", transparency=transparency)
        assert decode_image(content) == reference(content, tmp_path)
    content = encoded(noise("RGB", 4, 4, 0), "PNG", transparency=(1, 2, 3))
    assert decode_image(content) == reference(content, tmp_path)


def test_progressive_and_interlaced_files(tmp_path: Path) -> None:
    for content in (
        encoded(noise("RGB", 40, 30, 1), "JPEG", progressive=True, quality=95),
        encoded(noise("RGB", 40, 30, 1), "WEBP", lossless=True),
        encoded(noise("P", 40, 30, 1), "GIF", interlace=True),
    ):
        assert decode_image(content) == reference(content, tmp_path)


def test_paths_bytes_and_opened_images_are_the_same(tmp_path: Path) -> None:
    content = encoded(noise("RGBA", 5, 4, 0), "PNG")
    file = tmp_path / "image.jpg"  # a name says nothing
    file.write_bytes(content)
    with Image.open(file) as opened:
        assert decode_image(content) == decode_image(file) == decode_image(opened)
        assert opened.mode == "RGBA"  # the caller's image stays as it is


def test_an_opened_image_may_be_of_any_format(tmp_path: Path) -> None:
    content = encoded(noise("RGB", 5, 4, 0), "TIFF")
    assert decode_image(Image.open(BytesIO(content))) == reference(content, tmp_path)


def test_digests_are_of_size_and_pixels() -> None:
    flat, high = decode_image(Image.new("RGB", (6, 2))), decode_image(Image.new("RGB", (2, 6)))
    assert flat.pixels == high.pixels
    assert flat.digest != high.digest
    assert decode_image(encoded(Image.new("RGB", (6, 2)), "PNG")).digest == flat.digest


def png(width: int, height: int, rows: bytes, depth: int = 8, colour: int = 2) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        crc = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.mark.parametrize("size", [(8193, 8193), (1 << 31, 1 << 31), (1, (64 << 20) + 1)])
def test_large_sizes_are_refused_by_the_header(size: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=rf"^image has {size[0]} x {size[1]} pixels; at most") as raised:
        decode_image(png(*size, b""))
    assert raised.value.code == "image_too_large"
    assert raised.value.field == "image"


def test_limits_count() -> None:
    content = encoded(noise("RGB", 10, 10, 0), "PNG")
    decode_image(content, limits=ImageLimits(max_bytes=len(content), max_pixels=100))
    with pytest.raises(InputError, match=r"has 10 x 10 pixels; at most 99 are taken"):
        decode_image(content, limits=ImageLimits(max_pixels=99))
    with pytest.raises(InputError, match=r"has 10 x 10 pixels; at most 99 are taken"):
        decode_image(Image.new("L", (10, 10)), limits=ImageLimits(max_pixels=99))
    with pytest.raises(InputError, match=f"has {len(content)} bytes; at most {len(content) - 1}"):
        decode_image(content, limits=ImageLimits(max_bytes=len(content) - 1))
    with pytest.raises(InputError, match=r"is a PNG, which is not read; give JPEG or GIF\."):
        decode_image(content, limits=ImageLimits(formats=("JPEG", "GIF")))


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "zeros.png"
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(InputError, match=r"image .*zeros\.png has 1,099,511,627,776 bytes; at most"):
        decode_image(file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bytes": 0}, "max_bytes is 0; it must be a whole number from 1."),
        ({"max_pixels": True}, "max_pixels is True"),
        ({"formats": ("TIFF",)}, "formats is .* give some of PNG, JPEG, WEBP, GIF, BMP"),
        ({"formats": ()}, "formats is"),
    ],
)
def test_limits_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ImageLimits(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (encoded(Image.new("RGB", (2, 2)), "TIFF"), "a TIFF"),
        (b"\0\0\0\x1cftypavif", "an AVIF"),
        (b"\0\0\0\x1cftypheic", "a HEIC"),
        (b"\0\0\0\x1cftypmp42", "a video"),
        (b"%PDF-1.7", "a PDF"),
        (b'<?xml version="1.0"?><svg/>', "an SVG"),
        (b"<!DOCTYPE html><html>", "an HTML page"),
    ],
)
def test_what_is_not_read_is_named(content: bytes, what: str) -> None:
    with pytest.raises(InputError, match=f"^image is {what}, which is not read; give PNG, JPEG") as raised:
        decode_image(content)
    assert raised.value.code == "invalid_image_format"


@pytest.mark.parametrize(
    ("formats", "known"),
    [(("PNG",), "PNG"), (("PNG", "GIF"), "PNG or GIF"), (FORMATS[:3], "PNG, JPEG or WEBP")],
)
def test_the_formats_that_are_read_are_named(formats: tuple[str, ...], known: str) -> None:
    with pytest.raises(InputError, match=rf"is a BMP, which is not read; give {known}\."):
        decode_image(b"BM", limits=ImageLimits(formats=formats))


def test_wrong_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"image is of type str; give bytes, a Path, or an image of Pillow"):
        decode_image(str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="image is empty"):
        decode_image(b"")
    with pytest.raises(InputError, match="is in a format that is not read"):
        decode_image(random.Random(0).randbytes(100))
    with pytest.raises(InputError, match=f"{tmp_path} is not a file"):
        decode_image(tmp_path)
    with pytest.raises(InputError, match=r"no\.png cannot be read: No such file or directory"):
        decode_image(tmp_path / "no.png")


def test_damaged_files_are_refused_and_say_what_they_are() -> None:
    for kind in FORMATS:
        content = encoded(noise("RGB", 40, 30, 0), kind)
        with pytest.raises(InputError, match=f"image (cannot be decoded as|is no whole) {kind}") as raised:
            decode_image(content[:30])
        assert raised.value.code == "invalid_image"


def test_an_image_without_pixels_is_refused() -> None:
    with pytest.raises(InputError, match="image has 0 x 3 pixels"):
        decode_image(Image.new("RGB", (0, 3)))


def test_want_of_memory_is_an_error_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("dgemma.images.decode._pixels_of", fail)
    with pytest.raises(InputError, match="image needs more memory than there is"):
        decode_image(encoded(Image.new("L", (2, 2)), "BMP"))


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(InputError, match=r"image needs Pillow; run: pip install 'dgemma\[vision\]'"):
        decode_image(b"BM")
