"""The budget of a compilation is its own processor time: waiting for others spends nothing of it."""

from __future__ import annotations

import time

import pytest

from dgemma.errors import InputError
from dgemma.structured_output.budget import TimeBudget


def test_waiting_spends_nothing() -> None:
    budget = TimeBudget(0.05)
    time.sleep(0.06)
    budget.check()


def test_computing_spends_the_budget() -> None:
    budget = TimeBudget(0.02)

    def compute() -> None:
        while True:
            budget.check()

    with pytest.raises(InputError, match=r"takes more than 0\.02 seconds to compile; simplify it"):
        compute()
