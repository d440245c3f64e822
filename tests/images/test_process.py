"""Images of strangers are decoded in a process that bounds memory and time, and comes back after its end."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from dgemma.errors import InputError
from dgemma.images import process as module
from dgemma.images.decode import FORMATS, ImageLimits, decode_image
from dgemma.images.preprocess import ImageSettings, cut_patches
from dgemma.images.process import ImageProcess
from dgemma.images.worker import HEAD, PATCHES
from images.hostile import encoded, hostile_files, picture, slow_jpeg
from sizes import cases

LIMITS = ImageLimits(max_pixels=1 << 20)
SETTINGS = ImageSettings(max_tokens=70)
SMALL = cut_patches(decode_image(Image.new("RGB", (3, 2))), SETTINGS)
# In a process of its own, without the test's modules: what the largest refused file took.
MEASURE = """
import json, pathlib, resource, sys
from dgemma.errors import InputError
from dgemma.images.decode import ImageLimits, decode_image
from dgemma.images.preprocess import ImageSettings
from dgemma.images.process import ImageProcess
limits, settings, process = ImageLimits(max_pixels=1 << 20), ImageSettings(), ImageProcess(cpu_seconds=60)
process.max_seconds = 600
decode = lambda content: process.patches(content, settings, limits)
if sys.argv[2] == "here":
    decode = lambda content: decode_image(content, limits=limits)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
refused = 0
for file in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    try:
        decode(file.read_bytes())
        print("decoded", file.name, file=sys.stderr)
    except InputError:
        refused += 1
process.end()
own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([refused, own - before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))
"""


@pytest.fixture
def process() -> Iterator[ImageProcess]:
    made = ImageProcess(cpu_seconds=60.0)
    made.max_seconds = 600.0
    yield made
    made.end()


def pid_of(process: ImageProcess) -> int:
    assert process._process is not None
    return process._process.pid


@pytest.mark.parametrize("where", ["process", "here"])
def test_hostile_files_are_refused_in_bounded_memory(where: str, tmp_path: Path) -> None:
    count = cases(2000, 200)
    for name, content in hostile_files(count):
        (tmp_path / name.replace(",", "")).write_bytes(content)
    command = [sys.executable, "-c", MEASURE, str(tmp_path), where]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    refused, more_kib, worker_kib = json.loads(done.stdout)
    assert (done.stderr, refused) == ("", count)
    assert more_kib < 64 << 10
    assert worker_kib < 96 << 10


@pytest.mark.parametrize("kind", FORMATS)
def test_the_process_decodes_as_this_one_does(kind: str, process: ImageProcess) -> None:
    for seed in range(3):
        content = encoded(picture(random.Random(seed)), kind)
        assert process.patches(content, SETTINGS) == cut_patches(decode_image(content), SETTINGS)


def test_refusals_are_those_of_this_process(process: ImageProcess) -> None:
    for name, content in hostile_files(20, seed=1):
        with pytest.raises(InputError) as here:
            decode_image(content, limits=LIMITS)
        with pytest.raises(InputError) as there:
            process.patches(content, SETTINGS, LIMITS)
        assert str(here.value) == str(there.value), name
        assert (there.value.field, there.value.code) == ("image", here.value.code)
        assert str(there.value.with_field("messages")).startswith("messages ")


def test_a_file_that_is_too_large_is_not_sent(process: ImageProcess) -> None:
    with pytest.raises(InputError, match="image has 11 bytes; at most 10 are taken"):
        process.patches(b"\x89PNG\r\n\x1a\n" + bytes(3), SETTINGS, ImageLimits(max_bytes=10))
    assert process._process is None


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on processor time")
def test_an_image_that_takes_too_long_is_refused_and_the_next_is_decoded() -> None:
    process = ImageProcess(cpu_seconds=0.5)
    try:
        with pytest.raises(InputError, match=r"within limits: more than 0\.5 seconds of processor") as raised:
            process.patches(slow_jpeg(), SETTINGS)
        assert raised.value.code == "invalid_image"
        small = encoded(Image.new("RGB", (3, 2)), "PNG")
        process._cpu_seconds = 60.0
        assert process.patches(small, SETTINGS) == SMALL
    finally:
        process.end()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits memory")
def test_want_of_memory_is_an_error_of_the_image(
    process: ImageProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = encoded(Image.new("RGB", (9000, 9000)), "PNG", compress_level=1)
    code = "import dgemma.images.worker as w; w._BYTES_PER_PIXEL = 0; w._MORE_BYTES = 32 << 20; w.main()"
    stuck = [sys.executable, "-c", code]
    monkeypatch.setattr(
        process, "_start", lambda: subprocess.Popen(stuck, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    )
    with pytest.raises(InputError, match="needs more memory than there is; give a smaller one"):
        process.patches(content, SETTINGS, ImageLimits(max_pixels=1 << 30))


def test_a_crash_is_an_error_of_one_image(process: ImageProcess) -> None:
    small = encoded(Image.new("RGB", (3, 2)), "PNG")
    process.patches(small, SETTINGS)
    first, send = pid_of(process), process._send

    def crashes(*args: object) -> None:
        assert process._process is not None
        os.kill(first, 11)
        process._process.wait()

    process._send = crashes  # type: ignore[assignment, method-assign]
    with pytest.raises(InputError, match="its process ended with code -11"):
        process.patches(small, SETTINGS)
    process._send = send  # type: ignore[method-assign]
    assert process.patches(small, SETTINGS) == SMALL
    assert pid_of(process) != first


def test_a_reply_that_cannot_be_is_no_image(process: ImageProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that was taken over may write anything."""
    fine = PATCHES + HEAD.pack(SMALL.rows, SMALL.columns, SMALL.num_tokens, SMALL.digest) + SMALL.pixels
    monkeypatch.setattr(process, "exchange", lambda request: fine)
    assert process.patches(b"BM", SETTINGS) == SMALL
    many = HEAD.pack(SMALL.rows * 2, SMALL.columns, SMALL.num_tokens * 2, SMALL.digest) + 2 * SMALL.pixels
    for reply in (b"x" + fine[1:], fine[:-1], PATCHES + many, PATCHES + HEAD.pack(0, 0, 0, bytes(32))):
        monkeypatch.setattr(process, "exchange", lambda request, reply=reply: reply)
        with pytest.raises(RuntimeError, match="replied what it cannot have found"):
            process.patches(b"BM", SETTINGS)


def test_threads_get_their_own_images(process: ImageProcess) -> None:
    images = [picture(random.Random(number)) for number in range(30)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda image: process.patches(encoded(image, "PNG"), SETTINGS), images))
    assert found == [cut_patches(decode_image(image), SETTINGS) for image in images]


def test_the_worker_imports_no_torch(process: ImageProcess) -> None:
    process.patches(encoded(Image.new("RGB", (3, 2)), "PNG"), SETTINGS)
    with open(f"/proc/{pid_of(process)}/maps") as maps:
        assert "torch" not in maps.read()


def test_the_shared_process_is_ready() -> None:
    assert module.IMAGES.patches(encoded(Image.new("RGB", (3, 2)), "GIF"), SETTINGS) == SMALL
    module.IMAGES.end()
