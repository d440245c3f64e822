"""The caller's side of `worker.py`: one process, started when needed and again after its end."""

from __future__ import annotations

import atexit
import json
import os
import pickle

from dgemma.errors import InputError
from dgemma.images.decode import ImageLimits, too_many_bytes
from dgemma.images.preprocess import ImagePatches, ImageSettings
from dgemma.images.worker import HEAD, PATCHES, REFUSED, ImageJob
from dgemma.worker_process import AskedWorker, end_reason

# An image of 64 million pixels takes up to 3.4 s on a slow core.
MAX_CPU_SECONDS = 10.0
# By the clock, long enough for a busy machine. The worker limits its processor time itself, not on Windows.
MAX_SECONDS = 60.0


class ImageProcess(AskedWorker):
    """Prepares images of strangers in a process of their own. Safe to use from several threads."""

    def __init__(self, *, cpu_seconds: float = MAX_CPU_SECONDS) -> None:
        super().__init__("dgemma.images.worker", "decodes images", max_seconds=MAX_SECONDS)
        self._cpu_seconds = cpu_seconds

    def patches(
        self, content: bytes, settings: ImageSettings, limits: ImageLimits | None = None
    ) -> ImagePatches:
        """As `cut_patches(decode_image(content))`; what takes too much time or memory is refused as well."""
        limits = limits or ImageLimits()
        if len(content) > limits.max_bytes:  # not sent at all
            raise too_many_bytes(len(content), limits)
        job = ImageJob(content=content, settings=settings, limits=limits, cpu_seconds=self._cpu_seconds)
        reply = self.exchange(pickle.dumps(job, pickle.HIGHEST_PROTOCOL))
        if isinstance(reply, int):
            raise InputError.about(
                "image",
                f"cannot be decoded within limits: {end_reason(reply, self._cpu_seconds)}. Give another one.",
                code="invalid_image",
            )
        if reply[:1] == REFUSED:
            message, code = json.loads(reply[1:])
            raise InputError.about("image", message.removeprefix("image "), code=code)
        return _patches(memoryview(reply), settings)


def _patches(reply: memoryview, settings: ImageSettings) -> ImagePatches:
    """Checked: the worker ran on a stranger's bytes."""
    rows, columns, num_tokens, digest = HEAD.unpack_from(reply, len(PATCHES))
    pixels = reply[len(PATCHES) + HEAD.size :]
    num_patches = num_tokens * settings.pooling**2
    num_bytes = num_patches * settings.patch_size**2 * 3
    is_possible = rows * columns == num_patches and len(pixels) == num_bytes
    if reply[:1] != PATCHES or not is_possible or not 0 < num_tokens <= settings.max_tokens:
        raise RuntimeError("the process that decodes images replied what it cannot have found")
    return ImagePatches(
        rows=rows, columns=columns, pixels=bytes(pixels), num_tokens=num_tokens, digest=digest
    )


IMAGES = ImageProcess()
atexit.register(IMAGES.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=IMAGES.forget)
