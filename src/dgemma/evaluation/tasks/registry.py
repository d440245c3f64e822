"""Which task a word on the command line means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dgemma.errors import InputError, suggestion
from dgemma.evaluation.task import Task
from dgemma.evaluation.tasks.jsonl import JsonlTask
from dgemma.evaluation.tasks.python_file import open_python_task
from dgemma.evaluation.tasks.reasoning import ReasoningTask
from dgemma.evaluation.tasks.sudoku import SudokuTask

# A task's name, and what makes it from the words behind a colon ("" if there are none).
NAMED: dict[str, Callable[[str], Task[Any]]] = {
    "reasoning-gym": ReasoningTask,
    "sudoku": SudokuTask,
}
# What a task is asked of where no model is named.
BUNDLED_MODELS = {"sudoku": "bundled:sudoku"}


def open_task(spec: str) -> Task[Any]:
    """The task called `spec`: NAME or NAME:DETAIL of a known one, FILE.py:CLASS, or a file of JSON lines."""
    name, _, detail = spec.partition(":")
    if name in NAMED:
        return NAMED[name](detail)
    if spec.endswith(".py") or ".py:" in spec:
        return open_python_task(spec)
    if spec.endswith(".jsonl") or Path(spec).is_file():
        return JsonlTask(spec)
    raise InputError(
        f"task {spec!r} is not known{suggestion(name, NAMED)} Known: {', '.join(NAMED)}; or give a file of "
        "JSON lines that exists, or FILE.py:CLASS."
    )
