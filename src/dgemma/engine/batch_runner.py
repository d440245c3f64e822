"""Runs a computation for a batch so that only the request at fault fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from dgemma.engine.sequence import SequenceState
from dgemma.errors import RankError

# Steps without a shortage of memory after which larger batches are tried again.
_CALM_STEPS = 64

Fault = Callable[[str, Sequence[int]], None]
"""A hook for tests: called with request ids before (`point`) and after (`point_done`) what may fail."""

Result = TypeVar("Result")


class BatchRunner:
    """`fail` is called with a sequence and the error of its computation. `max_rows`: of one forward."""

    def __init__(self, max_rows: int, fail: Callable[[SequenceState, Exception], None], fault: Fault) -> None:
        self.max_rows = max_rows  # lower for a while after memory ran out
        self.num_out_of_memory = 0
        self._most_rows = max_rows
        self._calm_steps = 0  # since memory ran out
        self._fail = fail
        self._fault = fault

    def run(
        self,
        point: str,
        items: Sequence[tuple[SequenceState, *tuple[Any, ...]]],
        compute: Callable[[Any], Sequence[Result]],
    ) -> list[tuple[Any, Result]]:
        """Run `compute` for the batch; if that fails, for each item alone, so that only the faulty one fails.

        So `compute` may be repeated: it changes nothing that it reads. The caller writes its results, for
        each request alone.
        """
        request_ids = [item[0].request_id for item in items]
        try:
            self._fault(point, request_ids)
            found = list(zip(items, compute(items), strict=True))
            self._fault(f"{point}_done", request_ids)
            return found
        except RankError:
            raise
        except Exception as error:
            if len(items) == 1:
                self._fail(items[0][0], error)
                return []
            size = 1
            if is_out_of_memory(error):  # nobody's fault: a smaller batch needs less
                size = self.max_rows = max(1, len(items) // 2)
                self._calm_steps = 0
                self.num_out_of_memory += 1
        parts = [items[begin : begin + size] for begin in range(0, len(items), size)]
        return [pair for part in parts for pair in self.run(point, part, compute)]

    def end_step(self) -> None:
        """Double the rows of a forward again, once memory has sufficed for a while."""
        self._calm_steps += 1
        if self._calm_steps >= _CALM_STEPS and self.max_rows < self._most_rows:
            self.max_rows = min(2 * self.max_rows, self._most_rows)
            self._calm_steps = 0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed. torch on a CPU raises a RuntimeError that only its text tells."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
