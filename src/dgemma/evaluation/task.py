"""A task: examples, how each is asked, and how an answer is scored. No torch."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dgemma.errors import DgemmaError, InputError
from dgemma.events import Answer

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
Example = TypeVar("Example")
_REQUIRED = ("examples", "prompt", "score")


class Task(Protocol[Example]):
    """What an evaluation asks of a task. Any object with these names will do; nothing is inherited.

    A task may also have
    - `options() -> Mapping`: generation options (`max_tokens`, ...) that the caller's own override,
    - `groups(example) -> Iterable[str]`: the groups an example belongs to; scores are reported for each,
    - `raw = True`: a prompt of text is continued as it is, not put into a user turn.
    """

    @property
    def name(self) -> str: ...

    def examples(self) -> Iterable[Example]:
        """The held-out examples, in the same order at every call."""
        ...

    def prompt(self, example: Example) -> Prompt:
        """Text (one user turn, if the model has a chat template), messages, or token ids."""
        ...

    def score(self, example: Example, answer: Answer) -> Mapping[str, float]:
        """Named scores: 0 or 1 for right and wrong, a share, or any finite number whose mean says something.

        An example that fails counts 0 in all of them.
        """
        ...


class CheckedTask:
    """A user's task, whose mistakes come back as an `InputError` that names the call."""

    def __init__(self, task: object) -> None:
        missing = [name for name in _REQUIRED if not callable(getattr(task, name, None))]
        if missing:
            raise InputError(
                f"the task is a {type(task).__name__} without {', '.join(missing)}; a task has name, "
                "examples(), prompt(example) and score(example, answer)."
            )
        name = getattr(task, "name", None)
        if not isinstance(name, str) or not name.strip():
            raise InputError(f"the task's name is {name!r}; it must be a string that is not empty.")
        self.name = name
        self.raw = bool(getattr(task, "raw", False))
        self._task = task

    def options(self) -> dict[str, Any]:
        options = self._optional("options") or {}
        if not isinstance(options, Mapping):
            raise InputError(f"options() of task {self.name!r} gave {options!r:.80}; it must give a mapping.")
        if "seed" in options:
            raise InputError(
                f"options() of task {self.name!r} gives a seed; each example has its own, derived from the "
                "run's seed. Leave it out."
            )
        return dict(options)

    def examples(self) -> tuple[Iterator[Any], int | None]:
        """The examples, and how many there are if that can be told before."""
        found = self._call("examples")
        if not isinstance(found, Iterable):
            raise InputError(
                f"examples() of task {self.name!r} gave {found!r:.80}; it must give a list or an iterator."
            )
        total = self._guarded("examples", lambda: len(found)) if isinstance(found, Sized) else None
        return self._iterate(found), total

    def prompt(self, example: Any) -> Any:
        return self._call("prompt", example)

    def groups(self, example: Any) -> tuple[str, ...]:
        found = self._optional("groups", example) or ()
        groups = () if isinstance(found, str) or not isinstance(found, Iterable) else tuple(found)
        if (found and not groups) or not all(isinstance(group, str) for group in groups):
            raise InputError(
                f"groups() of task {self.name!r} gave {found!r:.80}; it must give a list of strings."
            )
        return groups

    def score(self, example: Any, answer: Answer) -> dict[str, float]:
        scores = self._call("score", example, answer)
        if not isinstance(scores, Mapping) or not scores:
            raise InputError(
                f"score() of task {self.name!r} gave {scores!r:.80}; it must give a mapping from names to "
                "numbers, with at least one."
            )
        for name, value in scores.items():
            if not isinstance(name, str) or not isinstance(value, Real) or not math.isfinite(value):
                raise InputError(
                    f"score() of task {self.name!r} gave {name!r:.40} = {value!r:.40}; names are strings, "
                    "scores are finite numbers."
                )
        return {name: float(value) for name, value in scores.items()}

    def _optional(self, name: str, *args: Any) -> Any:
        return self._call(name, *args) if callable(getattr(self._task, name, None)) else None

    def _call(self, name: str, *args: Any) -> Any:
        return self._guarded(name, lambda: getattr(self._task, name)(*args))

    def _iterate(self, examples: Iterable[Any]) -> Iterator[Any]:
        iterator = self._guarded("examples", lambda: iter(examples))
        ended = object()
        while (example := self._guarded("examples", lambda: next(iterator, ended))) is not ended:
            yield example

    def _guarded(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except DgemmaError as error:
            raise InputError(f"{name}() of task {self.name!r}: {error}") from error
        except Exception as error:  # a task is the user's code, which can raise anything
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}, line {frame.lineno}"
            what = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(f"{name}() of task {self.name!r} raised {what:.200} ({where}).") from error
