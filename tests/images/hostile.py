"""Hostile image files of every format, from seeds. None of them may be decoded."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO

import numpy as np
from PIL import Image

Make = Callable[[random.Random], bytes]


def picture(draw: random.Random) -> Image.Image:
    width, height = draw.randint(16, 90), draw.randint(16, 90)
    pixels = np.random.default_rng(draw.getrandbits(32)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    crc = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", crc)


def png(width: int, height: int, *parts: bytes, depth: int = 8, colour: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"".join((b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header), *parts, chunk(b"IEND", b"")))


def zeros(count: int) -> bytes:
    """Compressed a thousandfold."""
    packer = zlib.compressobj(9)
    return b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(count >> 20)), packer.flush()])


def jpeg_with(segment: bytes, count: int) -> bytes:
    whole = encoded(Image.new("RGB", (8, 8)), "JPEG")
    return whole[:2] + segment * count + whole[2:]


def slow_jpeg() -> bytes:
    """A million pieces of EXIF, which Pillow joins one by one: minutes of processor time."""
    return jpeg_with(b"\xff\xe1" + struct.pack(">H", 10) + b"Exif\0\0xx", 1_000_000)


def truncated(kind: str) -> Make:
    def make(draw: random.Random) -> bytes:
        whole = encoded(picture(draw), kind)
        return whole[: draw.randint(20, len(whole) * 8 // 10)]

    return make


def side(draw: random.Random, most: int) -> int:
    return draw.randint(most * 9 // 10, most)


def jpeg_bomb(draw: random.Random) -> bytes:
    whole = encoded(picture(draw), "JPEG", progressive=draw.random() < 0.5)
    at = max(whole.find(b"\xff\xc0"), whole.find(b"\xff\xc2")) + 5
    return whole[:at] + struct.pack(">HH", side(draw, 65_535), side(draw, 65_535)) + whole[at + 4 :]


def gif_bomb(draw: random.Random) -> bytes:
    whole = bytearray(encoded(picture(draw).quantize(8), "GIF"))
    if draw.random() < 0.5:
        whole[6:10] = struct.pack("<HH", side(draw, 65_535), side(draw, 65_535))
    else:  # only the frame is large
        at = whole.index(b",", 13 + 3 * 8)
        whole[at + 5 : at + 9] = struct.pack("<HH", side(draw, 65_535), side(draw, 65_535))
    return bytes(whole)


def bmp_bomb(draw: random.Random) -> bytes:
    whole = bytearray(encoded(picture(draw), "BMP"))
    height = side(draw, 1 << 20) * (-1 if draw.random() < 0.5 else 1)
    whole[18:26] = struct.pack("<ii", side(draw, 1 << 20), height)
    return bytes(whole)


def webp_bomb(draw: random.Random) -> bytes:
    kind = draw.choice((b"VP8X", b"VP8L", b"VP8 "))
    if kind == b"VP8X":
        sides = (side(draw, 1 << 24) - 1).to_bytes(3, "little") + (side(draw, 1 << 24) - 1).to_bytes(
            3, "little"
        )
        content = bytes(4) + sides
    elif kind == b"VP8L":
        content = b"\x2f" + struct.pack("<I", 0x0FFFFFFF) + draw.randbytes(200)
    else:
        content = b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 16_383, 16_383) + draw.randbytes(200)
    body = b"WEBP" + kind + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_lie(draw: random.Random) -> bytes:
    """Small by its header, large by the picture in it."""
    whole = encoded(picture(draw), "WEBP", lossless=True, exif=b"Exif\0\0")
    at = whole.index(b"VP8L") + 9
    return whole[:at] + struct.pack("<I", 0x0FFFFFFF) + whole[at + 4 :]


def png_garbage(draw: random.Random) -> bytes:
    return png(60, 60, chunk(b"IDAT", draw.randbytes(draw.randint(10, 400))))


def png_length(draw: random.Random) -> bytes:
    text = chunk(draw.choice((b"tEXt", b"PLTE", b"abCd")), draw.randbytes(50))
    lie = struct.pack(">I", draw.randint(1 << 20, (1 << 32) - 1)) + text[4:]
    return png(4, 4, lie, chunk(b"IDAT", zlib.compress(bytes(13 * 4))))


def png_text(draw: random.Random) -> bytes:
    """A text or a profile that is a thousand times as large as its chunk."""
    name = draw.choice((b"zTXt", b"iCCP"))
    bomb = chunk(name, b"x\0\0" + zeros(draw.randint(4, 64) << 20))
    return png(4, 4, bomb, chunk(b"IDAT", zlib.compress(bytes(13 * 4))))


def jpeg_garbage(draw: random.Random) -> bytes:
    whole = encoded(picture(draw), "JPEG")
    return whole[: whole.index(b"\xff\xda")] + draw.randbytes(300).replace(b"\xff", b"\0")


def gif_garbage(draw: random.Random) -> bytes:
    whole = encoded(picture(draw).quantize(8), "GIF")
    return whole[:13] + draw.randbytes(200).replace(b",", b"!")


def other(draw: random.Random) -> bytes:
    begin = draw.choice(
        (b"", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"PK\x03\x04", b"\x7fELF", b"\x1f\x8b\x08", b"<svg>", b"<html>",
         b"II*\0", b"MM\0*", b"8BPS", b"P6 9 9 255\n", b"\0\0\1\0", b"qoif", b"\x80\x04\x95", b"%PDF-1.7",
         b"RIFF\0\0\0\0WAVE", b"\0\0\0\x1cftypheic", b"\0\0\0\x0cjP  ", b"icns", b"\xff\xd8", b"\x89PNG")
    )  # fmt: skip
    return begin + draw.randbytes(draw.randint(1, 500))


MAKERS: dict[str, Make] = {
    **{f"{kind}, truncated": truncated(kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")},
    "PNG, large": lambda draw: png(side(draw, 1 << 31), side(draw, 1 << 31), chunk(b"IDAT", zeros(1 << 20))),
    "PNG, zero": lambda draw: png(0, 9, chunk(b"IDAT", zeros(1 << 20))),
    "PNG, garbage": png_garbage,
    "PNG, without data": lambda draw: png(side(draw, 900), side(draw, 900)),
    "PNG, chunk length": png_length,
    "PNG, text": png_text,
    "PNG, colour": lambda draw: png(9, 9, chunk(b"IDAT", zeros(1 << 20)), colour=draw.choice((1, 5, 7, 200))),
    "JPEG, large": jpeg_bomb,
    "JPEG, garbage": jpeg_garbage,
    "GIF, large": gif_bomb,
    "GIF, garbage": gif_garbage,
    "BMP, large": bmp_bomb,
    "WEBP, large": webp_bomb,
    "WEBP, a lie": webp_lie,
    "another type": other,
}


def hostile_files(count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    for number in range(count):
        name = list(MAKERS)[number % len(MAKERS)]
        yield f"{number} {name}", MAKERS[name](random.Random(f"{seed} {number}"))
