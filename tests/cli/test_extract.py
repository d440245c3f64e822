"""`dgemma extract`: a record out of a text, a file or lines; misuse in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dgemma.cli.extract import _messages
from dgemma.cli.main import main
from dgemma.forms.record_types import RECORD_TYPES, any_schema

MESSAGE = "Lunch with Ann Hill tomorrow at noon, in Rome."
TODAY = ("--today", "2026-11-18")


def extract(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, list[dict[str, Any]], str]:
    status = main(["extract", *args])
    captured = capsys.readouterr()
    return status, [json.loads(line) for line in captured.out.splitlines()], captured.err


def test_a_text_becomes_a_record_of_its_type(capsys: pytest.CaptureFixture[str]) -> None:
    status, (record,), err = extract(capsys, MESSAGE, "--type", "appointment", *TODAY)
    assert (status, err) == (0, "")
    jsonschema.validate(record, RECORD_TYPES["appointment"])
    assert extract(capsys, MESSAGE, "--type", "appointment", *TODAY)[1] == [record], "a fixed seed"


def test_the_type_is_found_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    (record,) = extract(capsys, MESSAGE, *TODAY)[1]
    assert record == {
        "type": "appointment",
        "title": "lunch",
        "date": "2026-11-19",
        "time": "12:00",
        "minutes": None,
        "place": "Rome",
        "people": ["Ann Hill"],
    }
    jsonschema.validate(record, any_schema())
    (found,) = extract(capsys, MESSAGE, *TODAY, "--json")[1]
    assert {"type": found["type"], **found["record"]} == record
    assert found["steps"] >= 1


def test_files_and_lines_are_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mail.txt"
    file.write_text(MESSAGE + "\n")
    expected = extract(capsys, MESSAGE, "--type", "appointment", *TODAY)[1]
    for given in (str(file), f"@{file}"):
        assert extract(capsys, given, "--type", "appointment", *TODAY)[1] == expected
    file.write_text(f"{MESSAGE}\n\nERROR auth 404: token expired\n")
    records = extract(capsys, str(file), "--lines", *TODAY)[1]
    assert [record["type"] for record in records] == ["appointment", "log"]


def test_only_a_newline_ends_a_line() -> None:
    """As everywhere: else a form feed in a log would shift all records after it."""
    assert _messages("a\x0cb\u2028c", is_lines=True) == ["a\x0cb\u2028c"]
    assert _messages("a\r\n\n b\n", is_lines=True) == ["a", " b"]


def test_a_schema_of_ones_own_is_kept_and_the_guess_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    status, (record,), err = extract(capsys, "A red car.", "--json-schema", json.dumps(schema))
    assert status == 0
    jsonschema.validate(record, schema)
    assert "was not trained on this schema" in err
    known = json.dumps(RECORD_TYPES["appointment"])
    assert not extract(capsys, MESSAGE, "--json-schema", known)[2]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["x", "--type", "apointment"], "appointment"),
        ([" "], "some text"),
        (["x", "--today", "18.11.2026"], "2026-11-18"),
        (["@no-such-file"], "no-such-file"),
        (["mial.txt"], "'mial.txt' looks like a file"),
        (["mails/one"], "'mails/one' looks like a file"),
        (["x", "--json-schema", '{"type": "nothing"}'], "--json-schema"),
        (["no/model", "x", "--seed", str(1 << 64)], "seed is 1844"),
        (["x", "--type", "log", "--json-schema", "{}"], "not allowed with"),
        ([], "no INPUT"),
    ],
)
def test_misuse_is_one_line(capsys: pytest.CaptureFixture[str], args: list[str], said: str) -> None:
    try:
        status = main(["extract", *args])
    except SystemExit as error:
        status = int(str(error.code))
    assert status in (1, 2)
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err
