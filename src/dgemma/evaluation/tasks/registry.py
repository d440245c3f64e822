"""Open a task by the name or file of the command line."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dgemma.errors import InputError, suggestion
from dgemma.evaluation.task import CheckedTask, Task
from dgemma.evaluation.tasks.jsonl import JsonlTask
from dgemma.evaluation.tasks.reasoning import ReasoningTask
from dgemma.evaluation.tasks.sudoku import SudokuTask

# Task constructors by name. The argument is the text after the colon, or "".
NAMED: dict[str, Callable[[str], Task[Any]]] = {
    "reasoning-gym": ReasoningTask,
    "sudoku": SudokuTask,
}
# The default model of a task.
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
        "JSON lines that exists, or FILE.py:CLASS.",
        field="task",
    )


def open_python_task(spec: str) -> Task[Any]:
    """The task at `FILE.py:NAME`: a class without constructor arguments, or an object."""
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise InputError(
            f"the task is {spec!r}; name a class in the file, as in task.py:TaskClass.", field="task"
        )
    module = _load(Path(file))
    if not hasattr(module, name):
        known = [known for known, value in vars(module).items() if isinstance(value, type)]
        raise InputError(
            f"{file} has no {name!r}{suggestion(name, known)} Its classes: {', '.join(known) or 'none'}.",
            field="task",
        )
    task = getattr(module, name)
    if isinstance(task, type):
        try:
            task = task()
        except Exception as error:  # the user's code
            raise InputError(f"{spec}: {name}() raised {_one_line(error)}", field="task") from error
    CheckedTask(task)
    return task  # type: ignore[no-any-return]


def _load(file: Path) -> ModuleType:
    if not file.is_file():
        raise InputError(
            f"{file} does not exist; give the file of a task, as in task.py:TaskClass.", field="task"
        )
    name = f"dgemma_task_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InputError(f"{file} cannot be loaded: {_one_line(error)}", field="task") from error
    return module


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200] + "."
