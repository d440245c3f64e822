"""A task (examples, prompts, scores), the plan of an evaluation, and prompts as token ids. No torch."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dgemma.errors import DgemmaError, InputError
from dgemma.events import Answer
from dgemma.params import PRESETS, GenerationParams

if TYPE_CHECKING:
    from dgemma.language_model import LanguageModel


Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
ExampleT = TypeVar("ExampleT")
_REQUIRED = ("examples", "prompt", "score")


class Task(Protocol[ExampleT]):
    """The interface of a task. Any object with these attributes is one; it need not inherit from this class.

    A task may also have
    - `options() -> Mapping`: generation options (`max_tokens`, ...); the caller's options override them,
    - `groups(example) -> Iterable[str]`: the groups an example belongs to; scores are reported for each,
    - `raw = True`: a text prompt is continued without the chat template, not put into a user turn.
    """

    @property
    def name(self) -> str: ...

    def examples(self) -> Iterable[ExampleT]:
        """The held-out examples, in the same order at every call."""
        ...

    def prompt(self, example: ExampleT) -> Prompt:
        """Text (one user turn, if the model has a chat template), messages, or token ids."""
        ...

    def score(self, example: ExampleT, answer: Answer) -> Mapping[str, float]:
        """Named scores: 0 or 1 for right and wrong, a share, or any finite number with a meaningful mean.

        An example that fails counts 0 in all of them.
        """
        ...


class CheckedTask:
    """Wraps a user's task. Its errors are raised as an `InputError` that names the call."""

    def __init__(self, task: object) -> None:
        missing = [name for name in _REQUIRED if not callable(getattr(task, name, None))]
        if missing:
            raise InputError(
                f"the task is a {type(task).__name__} without {', '.join(missing)}; a task has name, "
                "examples(), prompt(example) and score(example, answer).",
                field="task",
            )
        name = getattr(task, "name", None)
        if not isinstance(name, str) or not name.strip():
            raise InputError(
                f"the task's name is {name!r}; it must be a string that is not empty.", field="task"
            )
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
        """The examples, and their number if it is known in advance."""
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


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """How a task is run.

    limit: run only the first `limit` examples. batch: examples per batch.
    options: generation options, and `preset`; they override the task's own.
    seed: each example's seed is derived from it and the example's number; None draws one.
    raw, system, thinking: see `PromptReader`.
    """

    limit: int | None = None
    batch: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    raw: bool = False
    system: str | None = None
    thinking: bool = False

    def __post_init__(self) -> None:
        for name in ("limit", "batch"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not whole and not (name == "limit" and value is None):
                raise InputError.about(name, f"is {value!r}; it must be a whole number of at least 1.")
        if "seed" in self.options:
            raise InputError.about(
                "options", "holds a seed; give it as seed, each example's own is derived from it."
            )
        GenerationParams(seed=self.seed)  # raises if the seed is not valid
        GenerationParams.make(**self.options)

    def params(
        self, defaults: GenerationParams, task_options: Mapping[str, Any], *, task_name: str
    ) -> GenerationParams:
        """The checkpoint's `defaults`, updated by the task's options, updated by the caller's `options`."""
        try:
            GenerationParams.make(**task_options)
        except InputError as error:
            raise InputError(f"options() of task {task_name!r}: {error}") from None
        return GenerationParams.make(
            defaults, **{**_expand_preset(task_options), **_expand_preset(self.options)}
        )


def _expand_preset(options: Mapping[str, Any]) -> dict[str, Any]:
    explicit = {name: value for name, value in options.items() if name != "preset"}
    return {**PRESETS[options.get("preset") or "balanced"], **explicit}


@dataclass(frozen=True, kw_only=True)
class PromptReader:
    """Converts prompts to token ids.

    Text becomes one user turn, if the model has a chat template. Messages are rendered. Ids are unchanged.

    raw: continue text without the chat template. system: replaces the system message of a conversation.
    thinking: enable thinking in the chat template.
    """

    lm: LanguageModel
    raw: bool = False
    system: str | None = None
    thinking: bool = False

    def __post_init__(self) -> None:
        for name in ("system", "thinking"):
            if not getattr(self, name):
                continue
            if self.raw or not self.lm.has_chat_template:
                why = "raw leaves it out" if self.raw else "this model has none"
                raise InputError.about(name, f"needs the chat template, and {why}. Drop {name}.")
            self._render([{"role": "user", "content": "?"}])  # the template may not support it

    def ids(self, prompt: Any) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.lm.has_chat_template and not self.raw:
                return self._render([{"role": "user", "content": prompt}])
            bos = self.lm.tokenizer.bos_id
            return (*(() if bos is None else (bos,)), *self.lm.tokenizer.encode(prompt))
        if isinstance(prompt, Sequence) and prompt:
            if all(isinstance(item, Mapping) for item in prompt):
                if self.raw:
                    raise InputError(
                        "the prompt is messages, and raw leaves the chat template out. Drop raw.", field="raw"
                    )
                return self._render(prompt)
            if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
                if self.system or self.thinking:
                    raise InputError(
                        "the prompt is token ids, which take no system text and no thinking.", field="prompt"
                    )
                return tuple(prompt)
        raise InputError(
            f"the prompt is {prompt!r:.60}; give text, a list of messages, or token ids.", field="prompt"
        )

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        if self.system:
            own = messages[0].get("role") in ("system", "developer")
            messages = [{"role": "system", "content": self.system}, *messages[1 if own else 0 :]]
        return tuple(self.lm.chat_template.render(list(messages), enable_thinking=self.thinking))
