"""Ranks that are threads of this process: the same sums and gathers without a process group."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import Tensor

from dgemma.model.ranks import Ranks

Result = TypeVar("Result")


class ThreadRanks(Ranks):
    """slots, barrier: of all ranks together."""

    def __init__(self, rank: int, slots: list[Any], barrier: Barrier) -> None:
        self.rank = rank
        self.size = len(slots)
        self._slots = slots
        self._barrier = barrier

    def sum(self, x: Tensor) -> Tensor:
        first, *others = self.gather(x)
        for other in others:
            first = first + other
        return first

    def gather(self, x: Tensor) -> list[Tensor]:
        self._slots[self.rank] = x
        self._barrier.wait()
        found: list[Tensor] = list(self._slots)
        assert {part.shape for part in found} == {x.shape}
        self._barrier.wait()
        return found

    def share(self, message: Any) -> Any:
        """Through pickle, as between processes."""
        if self.leads:
            self._slots[0] = pickle.dumps(message)
        self._barrier.wait()
        found = pickle.loads(self._slots[0])
        self._barrier.wait()
        return found


def on_ranks(size: int, run: Callable[[Ranks], Result]) -> list[Result]:
    """`run` on each of `size` ranks at once -> their results. The first error ends all, and is raised."""
    slots: list[Any] = [None] * size
    barrier = Barrier(size, timeout=120)
    errors: list[BaseException] = []

    def run_one(rank: int) -> Result:
        try:
            with torch.inference_mode():
                return run(ThreadRanks(rank, slots, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(run_one, rank) for rank in range(size)]
    if errors:
        raise errors[0]
    return [each.result() for each in running]
