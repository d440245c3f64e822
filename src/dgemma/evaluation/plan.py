"""How a task is run: one frozen, checked set of choices. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dgemma.errors import InputError
from dgemma.params import PRESETS, GenerationParams


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a task is run.

    limit: only the first so many examples. batch: examples answered together.
    options: generation options, and `preset`; they override the task's own.
    seed: each example's seed follows from it and the example's number; None draws one.
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
                raise InputError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        if "seed" in self.options:
            raise InputError("options holds a seed; give it as seed, each example's own is derived from it.")
        GenerationParams(seed=self.seed)  # checked as everywhere
        GenerationParams.make(**self.options)

    def params(
        self, defaults: GenerationParams, own: Mapping[str, Any], *, task_name: str
    ) -> GenerationParams:
        """The checkpoint's `defaults`, changed by the task's `own`, changed by the caller's `options`."""
        try:
            GenerationParams.make(**own)
        except InputError as error:
            raise InputError(f"options() of task {task_name!r}: {error}") from None
        return GenerationParams.make(defaults, **{**_spread(own), **_spread(self.options)})


def _spread(options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if name != "preset"}
    return {**PRESETS[options.get("preset") or "balanced"], **given}
