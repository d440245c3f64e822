"""One temperature: found again where it is known, applied without changing a choice, kept in a file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dgemma.errors import InputError
from dgemma.tasks.calibration import Calibration, Labelled, expected_calibration_error, fit

# True shares in tenths, so that examples in their proportion have no noise at all.
TRUE_TENTHS = [(6, 3, 1), (8, 1, 1), (5, 5), (9, 1), (7, 2, 1), (4, 3, 3), (7, 3)]
shares = st.lists(st.floats(0, 1), min_size=2, max_size=6).filter(sum).map(lambda p: [x / sum(p) for x in p])
heats = st.floats(0.01, 100)


def softened(probabilities: list[float], heat: float) -> tuple[float, ...]:
    powers = [p ** (1 / heat) for p in probabilities]
    return tuple(power / sum(powers) for power in powers)


def examples_with(heat: float) -> list[Labelled]:
    """What a model says whose probabilities must be softened by `heat` to come true."""
    found: list[Labelled] = []
    for tenths in TRUE_TENTHS:
        said = softened([count / 10 for count in tenths], 1 / heat)
        found += [(said, right) for right, count in enumerate(tenths) for _ in range(count)]
    return found


@settings(max_examples=25)
@given(st.floats(0.25, 6.0))
@example(1.0)
@example(2.5)
def test_fit_finds_the_temperature_that_was_put_in(heat: float) -> None:
    found = fit(examples_with(heat))
    assert found.temperature == pytest.approx(heat, rel=0.05)
    assert found.examples == 10 * len(TRUE_TENTHS)


def test_fit_tells_the_error_before_and_after() -> None:
    examples = examples_with(3.0)
    found = fit(examples)
    assert found.error_before == expected_calibration_error(examples)
    after = [(found.apply(p), right) for p, right in examples]
    assert found.error_after == expected_calibration_error(after)
    assert found.error_before is not None
    assert found.error_after is not None
    assert found.error_after < found.error_before / 4


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_examples_are_refused(count: int) -> None:
    with pytest.raises(
        InputError, match=f"there are {count} labelled examples; a calibration needs at least"
    ):
        fit([((0.5, 0.5), 0)] * count)


def test_always_right_and_always_wrong_stay_within_the_bounds_of_a_file(tmp_path: Path) -> None:
    for right in (0, 1):
        found = fit([((0.9, 0.1), right)] * 5)
        found.save(tmp_path / "c.json")
        assert Calibration.load(tmp_path / "c.json") == found
    assert fit([((0.9, 0.1), 0)] * 5).temperature < 0.02
    assert fit([((0.9, 0.1), 1)] * 5).temperature > 50


def test_the_error_is_the_one_computed_by_hand() -> None:
    """In bins of 0.25: sure of 0.6 and 0.7, one of two right: 0.65 against 0.5. Sure of 0.9, 0.8 and 1.0, two
    of three right: 0.9 against 0.667. Sure of 0.4, right: 0.4 against 1."""
    examples: list[Labelled] = [
        ((0.6, 0.4), 0),
        ((0.3, 0.7), 0),
        ((0.9, 0.1), 0),
        ([0.2, 0.8], 0),
        ((1.0, 0.0), 0),
        ((0.3, 0.3, 0.4), 2),
    ]
    by_hand = (2 * abs(0.65 - 0.5) + 3 * abs(0.9 - 2 / 3) + 1 * abs(0.4 - 1)) / 6
    assert expected_calibration_error(examples, bins=4) == pytest.approx(by_hand, abs=1e-12)


def test_no_examples_have_no_error() -> None:
    assert expected_calibration_error([]) == 0


@given(shares, heats)
@example([1.0, 0.0], 1.0)
@example([1.0, 0.0, 0.0], 0.01)
@example([0.0, 1.0], 100.0)
def test_apply_keeps_the_choice_and_sums_to_one(probabilities: list[float], heat: float) -> None:
    found = Calibration(temperature=heat).apply(probabilities)
    assert sum(found) == pytest.approx(1.0, abs=1e-9)
    assert all(0 <= p <= 1 for p in found)
    top = probabilities.index(max(probabilities))
    assert found[top] == max(found)
    for one, other in zip(probabilities, found, strict=True):
        if one == probabilities[top]:
            assert other == found[top], "equal ones stay equal"


@given(shares.filter(lambda p: min(p) > 1e-3), st.floats(0.2, 10))
def test_apply_is_the_textbooks_temperature(probabilities: list[float], heat: float) -> None:
    found = Calibration(temperature=heat).apply(probabilities)
    assert found == pytest.approx(softened(probabilities, heat), rel=1e-9, abs=1e-12)


def test_the_order_of_choices_changes_no_bit() -> None:
    warm = Calibration(temperature=1.7)
    assert warm.apply((0.2, 0.1, 0.4, 0.3))[::-1] == warm.apply((0.3, 0.4, 0.1, 0.2))


# Files


@given(heats, st.integers(0, 1000), st.none() | st.floats(0, 1))
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, heat: float, count: int, error: float | None
) -> None:
    file = tmp_path_factory.getbasetemp() / "calibration.json"
    made = Calibration(temperature=heat, examples=count, error_before=error, error_after=error)
    made.save(file)
    assert Calibration.load(file) == made
    made.save(str(file))
    assert Calibration.load(str(file)) == made


GOOD = {"kind": "dgemma calibration", "version": 1, "temperature": 1.5}
BROKEN: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "cannot be read as a calibration"),
    "nested": ("[" * 100_000, "cannot be read as a calibration"),
    "no UTF-8": (b"\xff\xfe", "cannot be read as a calibration"),
    "nothing": ("", "cannot be read as a calibration"),
    "a list": ([GOOD], "is not a calibration of version 1"),
    "another kind": ({**GOOD, "kind": "dgemma report"}, "is not a calibration of version 1"),
    "another version": ({**GOOD, "version": 2}, "is not a calibration of version 1"),
    "no version": ({"kind": GOOD["kind"], "temperature": 1.0}, "is not a calibration of version 1"),
    "no temperature": ({"kind": GOOD["kind"], "version": 1}, "temperature is None"),
    "a text": ({**GOOD, "temperature": "1.5"}, "temperature is '1.5'"),
    "a truth": ({**GOOD, "temperature": True}, "temperature is True"),
    "zero": ({**GOOD, "temperature": 0}, "temperature is 0"),
    "below zero": ({**GOOD, "temperature": -1.5}, "temperature is -1.5"),
    "too hot": ({**GOOD, "temperature": 101}, "temperature is 101"),
    "no number": ({**GOOD, "temperature": math.nan}, "temperature is nan"),
    "endless": ({**GOOD, "temperature": math.inf}, "temperature is inf"),
}


def write(file: Path, content: Any) -> None:
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "broken.json"
    write(file, content)
    with pytest.raises(InputError, match=r"broken\.json") as refused:
        Calibration.load(file)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("examples", "many"),
        ("examples", [3]),
        ("examples", True),
        ("examples", math.nan),
        ("examples", math.inf),
        pytest.param("examples", 10**400, id="endless whole number"),
        ("error_before", "small"),
        ("error_after", {}),
    ],
)
def test_a_file_with_a_broken_account_is_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    file = tmp_path / "broken.json"
    write(file, {**GOOD, name: value})
    with pytest.raises(InputError, match=rf"broken\.json: {name} is "):
        Calibration.load(file)


def test_a_file_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the calibration cannot be written to"):
        Calibration().save(tmp_path / "missing" / "c.json")


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    for file in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(InputError, match="cannot be read as a calibration"):
            Calibration.load(file)


def test_a_file_needs_nothing_but_its_temperature(tmp_path: Path) -> None:
    write(tmp_path / "c.json", GOOD)
    assert Calibration.load(tmp_path / "c.json") == Calibration(temperature=1.5)
