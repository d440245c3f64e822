"""Training records of made messages: the prompt in a user turn, the record in the model's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from recipes.forms.messages import Split, make_message


class Forms(Sequence[dict[str, Any]]):
    """Record n for any n: a function of (split, seed, n) alone, so that a run can resume from a number."""

    def __init__(self, split: Split, *, count: int, seed: int = 0) -> None:
        self._split, self._count, self._seed = split, count, seed

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Sequence[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(index)
        message = make_message(self._split, index, seed=self._seed)
        return {"prompt": message.prompt, "response": message.answer}
