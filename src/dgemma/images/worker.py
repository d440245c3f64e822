"""The process that decodes images of strangers, within limits on memory and processor time.

The size of an image bounds what its decoder allocates, nothing bounds its time: a JPEG of 20 MB may hold
thousands of scans, or a million pieces of EXIF that are joined one by one. A decoder may also crash. This
process ends alone, and the next image gets a new one. `process.py` starts it and asks it.
"""

from __future__ import annotations

import json
import pickle
import struct
import sys

from dgemma.errors import InputError
from dgemma.images.decode import ImageLimits, RgbImage, decode_image
from dgemma.worker_process import limits, read_message, write_message

# Measured: 21 for WEBP, the most of all formats.
_BYTES_PER_PIXEL = 28
_MORE_BYTES = 128 << 20  # and for each byte of the file eight more

IMAGE, REFUSED = b"i", b"r"
HEAD = struct.Struct("<II32s")  # width, height and digest; the pixels follow


def main() -> None:
    """Answer requests until the caller closes the pipe, which it does at the latest by ending."""
    while (request := read_message(sys.stdin.buffer)) is not None:
        content, image_limits, cpu_seconds = pickle.loads(request)  # noqa: S301, the caller is our own package
        most = _BYTES_PER_PIXEL * image_limits.max_pixels + 8 * len(content) + _MORE_BYTES
        with limits(most, cpu_seconds):
            reply = answer(content, image_limits)
        write_message(sys.stdout.buffer, reply)


def answer(content: bytes, image_limits: ImageLimits) -> bytes:
    """The image, or why there is none. It is no pickle: a decoder that was taken over may write it."""
    try:
        return _encoded(decode_image(content, limits=image_limits))
    except InputError as error:
        return REFUSED + json.dumps([str(error), error.code]).encode()


def _encoded(image: RgbImage) -> bytes:
    return b"".join((IMAGE, HEAD.pack(image.width, image.height, image.digest), image.pixels))
