"""The process that decodes images of strangers and cuts them into patches, within limits on memory and time.

The size of an image bounds what its decoder allocates, nothing bounds its time: a JPEG of 20 MB may hold
thousands of scans, or a million pieces of EXIF that are joined one by one. A decoder may also crash. This
process ends alone, and the next image gets a new one. `process.py` starts it and asks it.
"""

from __future__ import annotations

import json
import pickle
import struct
import sys
from dataclasses import dataclass

from dgemma.errors import InputError
from dgemma.images.decode import ImageLimits, decode_image
from dgemma.images.preprocess import ImagePatches, ImageSettings, cut_patches
from dgemma.worker_process import limits, read_message, say_ready, write_message

# Measured: 21 for WEBP, the most of all formats.
_BYTES_PER_PIXEL = 28
_MORE_BYTES = 128 << 20  # and for each byte of the file eight more

PATCHES, REFUSED = b"p", b"r"
HEAD = struct.Struct("<III32s")  # rows, columns, soft tokens and digest; the pixels follow


@dataclass(frozen=True, kw_only=True)
class ImageJob:
    content: bytes
    settings: ImageSettings
    limits: ImageLimits
    cpu_seconds: float


def main() -> None:
    """Answer requests until the caller closes the pipe, which it does at the latest by ending."""
    say_ready()
    while (request := read_message(sys.stdin.buffer)) is not None:
        job = pickle.loads(request)  # noqa: S301, the caller is our own package
        most = _BYTES_PER_PIXEL * job.limits.max_pixels + 8 * len(request) + _MORE_BYTES
        with limits(most, job.cpu_seconds):
            reply = answer(job)
        write_message(sys.stdout.buffer, reply)


def answer(job: ImageJob) -> bytes:
    """The patches, or why there are none. It is no pickle: a decoder that was taken over may write it."""
    try:
        return _encoded(cut_patches(decode_image(job.content, limits=job.limits), job.settings))
    except InputError as error:
        return REFUSED + json.dumps([str(error), error.code]).encode()


def _encoded(patches: ImagePatches) -> bytes:
    head = HEAD.pack(patches.rows, patches.columns, patches.num_tokens, patches.digest)
    return b"".join((PATCHES, head, patches.pixels))
