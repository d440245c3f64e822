"""A user's own task: `task.py:TaskClass`. Loading it runs the file's code."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from dgemma.errors import InputError, suggestion
from dgemma.evaluation.task import CheckedTask, Task


def open_python_task(spec: str) -> Task[Any]:
    """The task that `FILE.py:NAME` names: a class that is made without arguments, or an object."""
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise InputError(f"the task is {spec!r}; name a class in the file, as in task.py:TaskClass.")
    module = _load(Path(file))
    if not hasattr(module, name):
        known = [known for known, value in vars(module).items() if isinstance(value, type)]
        raise InputError(
            f"{file} has no {name!r}{suggestion(name, known)} Its classes: {', '.join(known) or 'none'}."
        )
    task = getattr(module, name)
    if isinstance(task, type):
        try:
            task = task()
        except Exception as error:  # the user's code
            raise InputError(f"{spec}: {name}() raised {_one_line(error)}") from error
    CheckedTask(task)
    return task  # type: ignore[no-any-return]


def _load(file: Path) -> ModuleType:
    if not file.is_file():
        raise InputError(f"{file} does not exist; give the file of a task, as in task.py:TaskClass.")
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
        raise InputError(f"{file} cannot be loaded: {_one_line(error)}") from error
    return module


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200] + "."
