"""An InputError carries its field and code; a caller can respell the field."""

from __future__ import annotations

import pytest

from dgemma.errors import InputError, error_field
from dgemma.params import GenerationParams


def test_an_error_about_a_field_is_respelled_with_its_message() -> None:
    error = InputError.about("max_tokens", "is 9; it must be at most 8.", code="too_long")
    assert (str(error), error.field, error.code) == (
        "max_tokens is 9; it must be at most 8.", "max_tokens", "too_long",
    )  # fmt: skip
    renamed = error.with_field("n_predict")
    assert (str(renamed), renamed.field, renamed.code) == (
        "n_predict is 9; it must be at most 8.", "n_predict", "too_long",
    )  # fmt: skip
    assert str(renamed.with_field("max_tokens")) == str(error)


def test_a_message_that_does_not_begin_with_its_field_stays() -> None:
    renamed = InputError("two texts; give one.", field="prompt").with_field("messages")
    assert (str(renamed), renamed.field) == ("two texts; give one.", "messages")


def test_a_block_names_the_field_of_errors_that_name_none() -> None:
    with pytest.raises(InputError) as caught, error_field("tools"):
        raise InputError("wrong.")
    assert caught.value.field == "tools"
    with pytest.raises(InputError) as caught, error_field("tools"):
        raise InputError("wrong.", field="messages")
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"t_min": 0.9, "t_max": 0.1}, "t_min"),
        ({"decode": "x"}, "decode"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"end_tokens": (-1,)}, "end_tokens"),
        ({"preset": "x"}, "preset"),
    ],
)
def test_generation_options_are_refused_under_their_names(options: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as caught:
        GenerationParams.make(**options)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert str(caught.value).startswith(field)
