"""Training records of made messages: the prompt in a user turn, the record in the model's.

Left to right the record is compact JSON; a canvas has it as a form.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import count as numbers
from pathlib import Path
from typing import Any, overload

from dgemma.text.tokenizer import Tokenizer
from recipes.forms.layout import CANVAS, ROOMY_ITEMS, form_text
from recipes.forms.messages import Message, Split, make_message

START = Path("runs/forms/start")


class Forms(Sequence[dict[str, Any]]):
    """Record n for any n: a function of (split, seed, n) alone, so that a run can resume from a number.

    large_orders: every so many-th record is an order of three items. Of the others one in fifty is.
    """

    def __init__(
        self, split: Split, *, count: int, seed: int = 0, model: Path = START, large_orders: int = 0
    ) -> None:
        self._split, self._count, self._seed, self._model = split, count, seed, model
        self._large_orders = large_orders

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_directory(self._model)

    def _num_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

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
        while True:
            message = self._message(index)
            # One token of a canvas is the turn's end.
            canvas = form_text(message.expected, self._num_tokens, limit=CANVAS - 1)
            if self._num_tokens(canvas) < CANVAS:
                return {"prompt": message.prompt, "response": message.answer, "canvas": canvas}
            index += self._count  # one record in 50,000 has more; another in its place

    def _message(self, index: int) -> Message:
        if not self._large_orders or index % self._large_orders:
            return make_message(self._split, index, seed=self._seed)
        orders = (
            make_message(self._split, number, seed=self._seed, type_="order")
            for number in numbers(index, self._count)
        )
        return next(order for order in orders if len(order.record["items"] or ()) > ROOMY_ITEMS)
