"""The seam between server and engine: torch-free, and what it promises of lengths."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dgemma
from dgemma.engine.service import BusyError, EngineService, ServedModel
from dgemma.errors import DgemmaError
from dgemma.server.text import CheckpointText, TextService
from server.fake_engine import FakeEngine, FakeText
from text.bundled import TOKENIZER

SOURCE = Path(dgemma.__file__).parent


@pytest.mark.parametrize("room", ["server", "engine/service.py"])
def test_no_file_of_the_server_imports_tensors(room: str) -> None:
    path = SOURCE / room
    for file in [path] if path.is_file() else path.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "torch" not in ast.dump(node), file


def test_fakes_and_the_real_text_fit_the_protocols() -> None:
    engine: EngineService = FakeEngine()
    texts: list[TextService] = [FakeText(), CheckpointText(TOKENIZER, None)]
    assert engine.stats().slots_total == 8
    assert all(text.encode_prompt("a") for text in texts)


@pytest.mark.parametrize(
    ("prompt_len", "room"), [(0, 96), (4, 96), (5, 64), (36, 64), (37, 32), (69, 0), (1000, 0)]
)
def test_only_whole_canvases_fit_after_a_prompt(prompt_len: int, room: int) -> None:
    model = ServedModel(max_positions=100, canvas_len=32, vocab_size=9)
    assert model.max_new_tokens(prompt_len) == room


def test_a_busy_engine_says_when_to_come_back() -> None:
    error = BusyError("full", retry_after_s=1.5)
    assert isinstance(error, DgemmaError)
    assert (str(error), error.retry_after_s) == ("full", 1.5)
