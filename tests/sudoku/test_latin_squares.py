"""Latin squares keep rows and columns, never all boxes, and are the same for the same number."""

from __future__ import annotations

import numpy as np
import pytest

from dgemma.sudoku.latin_squares import LatinSquares, random_latin_square
from dgemma.sudoku.tokens import PROMPT_LEN, VOCABULARY, answered_cells


@pytest.mark.parametrize("seed", range(20))
def test_rows_and_columns_have_every_digit_once(seed: int) -> None:
    square = random_latin_square(np.random.default_rng(seed)).reshape(9, 9)
    for line in (*square, *square.T):
        assert sorted(line) == list(range(1, 10))


def test_a_record_is_a_square_and_some_of_its_cells() -> None:
    records = LatinSquares(count=1000, fewest=30, most=60)
    seen = set()
    for number in range(30):
        tokens = records[number]["tokens"]
        text = "".join(VOCABULARY[token] for token in tokens[1:-1])
        clues, square = answered_cells(text[: PROMPT_LEN - 1]), answered_cells(text[PROMPT_LEN - 1 :])
        assert all(clue in (".", cell) for clue, cell in zip(clues, square, strict=True))
        assert 30 <= 81 - clues.count(".") <= 60
        seen.add(square)
    assert len(seen) == 30
    assert records[3] == LatinSquares(count=10)[3]
    assert records[3] != LatinSquares(count=10, seed=1)[3]
    assert records[3:5] == [records[3], records[4]]


def test_there_is_no_record_after_the_last() -> None:
    with pytest.raises(IndexError):
        LatinSquares(count=3)[3]
