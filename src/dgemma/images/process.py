"""The caller's side of `worker.py`: one process, started when needed and again after its end."""

from __future__ import annotations

import atexit
import json
import os
import pickle

from dgemma.errors import InputError
from dgemma.images.decode import ImageLimits, RgbImage, too_many_bytes
from dgemma.images.worker import HEAD, IMAGE, REFUSED
from dgemma.worker_process import AskedWorker, end_reason

# An image of 64 million pixels takes up to 3.4 s on a slow core.
MAX_CPU_SECONDS = 10.0
# By the clock, long enough for a busy machine. The worker limits its processor time itself, not on Windows.
MAX_SECONDS = 60.0


class ImageProcess(AskedWorker):
    """Decodes images of strangers in a process of their own. Safe to use from several threads."""

    def __init__(self, *, cpu_seconds: float = MAX_CPU_SECONDS) -> None:
        super().__init__("dgemma.images.worker", "decodes images", max_seconds=MAX_SECONDS)
        self._cpu_seconds = cpu_seconds

    def decode(self, content: bytes, limits: ImageLimits | None = None) -> RgbImage:
        """As `decode_image`; an image that takes too much time or memory is refused as well."""
        limits = limits or ImageLimits()
        if len(content) > limits.max_bytes:  # not sent at all
            raise too_many_bytes(len(content), limits)
        reply = self.exchange(pickle.dumps((content, limits, self._cpu_seconds), pickle.HIGHEST_PROTOCOL))
        if isinstance(reply, int):
            raise InputError.about(
                "image",
                f"cannot be decoded within limits: {end_reason(reply, self._cpu_seconds)}. Give another one.",
                code="invalid_image",
            )
        if reply[:1] == REFUSED:
            message, code = json.loads(reply[1:])
            raise InputError.about("image", message.removeprefix("image "), code=code)
        return _decoded(memoryview(reply), limits)


def _decoded(reply: memoryview, limits: ImageLimits) -> RgbImage:
    """Checked: the worker ran on a stranger's bytes."""
    width, height, digest = HEAD.unpack_from(reply, len(IMAGE))
    pixels = reply[len(IMAGE) + HEAD.size :]
    if reply[:1] != IMAGE or width * height > limits.max_pixels or len(pixels) != 3 * width * height:
        raise RuntimeError("the process that decodes images replied what it cannot have found")
    return RgbImage(width=width, height=height, pixels=bytes(pixels), digest=digest)


IMAGES = ImageProcess()
atexit.register(IMAGES.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=IMAGES.forget)
