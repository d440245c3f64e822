"""docs/images.md with a tiny random model in the place of yours: its Python, its commands, its request."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from PIL import Image

import dgemma
from image_checkpoint import write_image_checkpoint
from random_image import random_image
from server.real_server import serving
from sizes import IS_FULL
from test_documented_commands import run

PAGE = (Path(__file__).parent.parent / "docs" / "images.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^(dgemma .*MODEL.*)$", PAGE, re.MULTILINE)
LIMITS = "--max-tokens 8 --max-denoising-steps 1 --seed 1"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and the pictures of the page."""
    directory = tmp_path_factory.mktemp("images")
    write_image_checkpoint(directory)
    picture = Image.frombytes("RGB", (90, 60), random_image(1, 90, 60).pixels)
    for name in ("photo.jpg", "cat.jpg", "before.png", "after.png"):
        picture.save(directory / name)
    return directory


def test_the_python_of_the_page_answers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    names = {"lm": dgemma.load("model", dtype="float32")}
    (in_process,) = [block for block in PYTHON if "lm.chat" in block]
    short = in_process.replace("}])", "}], max_tokens=8, seed=1, max_denoising_steps=1)")
    exec(short.replace('.jpg"])', '.jpg"], max_tokens=8, seed=1, max_denoising_steps=1)'), names)  # noqa: S102
    assert short != in_process


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_of_the_page_answer(line: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    asked = "printf 'What is it?\n/quit\n' | " if line.startswith("dgemma chat") else ""
    printed, status = run(f"{asked}{line.replace('MODEL', 'model')} {LIMITS}", monkeypatch)
    assert status == 0, printed


@pytest.mark.skipif(not IS_FULL, reason="make test-full")
def test_the_request_of_the_page_is_answered(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (over_http,) = [block for block in PYTHON if "OpenAI(" in block]
    with serving("model", "--served-model-name", "dgemma", directory=place) as server:
        here = over_http.replace("http://127.0.0.1:8000", server.address)
        assert here != over_http
        here = here.replace('model="dgemma",', 'model="dgemma", max_tokens=8, seed=1,')
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(here, {})  # noqa: S102
    assert printed.getvalue()


def test_all_commands_of_the_page_are_run() -> None:
    assert len(COMMANDS) == 3
    assert len(PYTHON) == 2
