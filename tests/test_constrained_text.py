"""The bundled text model with response formats, through the Python API."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import dgemma
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.errors import InputError
from dgemma.language_model import LanguageModel
from text.bundled import RICH_TEMPLATE

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"enum": ["S", "M", "L"]}},
    "required": ["name", "size"],
}


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return dgemma.load("bundled:text", dtype="float32")


def test_generate_keeps_to_a_response_format(lm: LanguageModel) -> None:
    options = {"max_tokens": 90, "max_denoising_steps": 4, "seed": 3}
    assert re.fullmatch(r"\d{3}-\d{4}", lm.generate("Call ", regex=r"\d{3}-\d{4}", **options).text)
    assert lm.generate("Is it?", choice=["yes", "no"], **options).text in ("yes", "no")
    assert isinstance(json.loads(lm.generate("Data: ", json_object=True, **options).text), dict)
    found = json.loads(lm.generate("Shirt: ", json_schema=SCHEMA, **options).text)
    assert found["size"] in ("S", "M", "L")


def test_a_stream_commits_prefixes_of_the_text(lm: LanguageModel) -> None:
    events = lm.stream("Shirt: ", json_schema=json.dumps(SCHEMA), max_tokens=130, max_denoising_steps=2)
    text = "".join(event.text for event in events if isinstance(event, dgemma.Commit))
    assert json.loads(text)["size"] in ("S", "M", "L")


def test_infill_is_a_text_of_the_format(lm: LanguageModel) -> None:
    found = lm.fill("width = ", " * height\n", regex=r"\d{1,4}", max_tokens=5, max_denoising_steps=4)
    assert re.fullmatch(r"\d{1,4}", found.text)
    assert all(re.fullmatch(r"\d{1,4}", one.text) for one in found.candidates)
    words = ["hello world", "good bye"]
    assert lm.fill('print("', '")\n', choice=words, max_tokens=8, max_denoising_steps=4).text in words


def test_infill_too_short_for_the_format_is_refused(lm: LanguageModel) -> None:
    with pytest.raises(InputError, match="no text of the response format has at most 4 tokens"):
        lm.fill("a", "b", regex=r"(?:[A-Z]\d){20}", max_tokens=4)


def test_too_few_tokens_are_refused_before_running(lm: LanguageModel) -> None:
    with pytest.raises(InputError, match="max_tokens is 1; the shortest text"):
        lm.generate("a", regex=r"[A-Z]\d[A-Z]\d[A-Z]\d", max_tokens=1)


def test_strict_tools_are_called_as_their_schema_says(tmp_path: Path) -> None:
    write_random(tmp_path / "tiny", PRESETS["tiny"].config, dtype="F32", seed=1)
    (tmp_path / "tiny" / "chat_template.jinja").write_text(RICH_TEMPLATE)
    lm = dgemma.load(tmp_path / "tiny")
    function = {"name": "order", "strict": True, "parameters": SCHEMA}
    tools = [{"type": "function", "function": function}]
    for seed in range(3):
        options = {"max_tokens": 200, "max_denoising_steps": 2, "seed": seed, "end_tokens": (1, 106)}
        answer = lm.chat("A shirt, please.", tools=tools, tool_choice="required", **options)
        assert answer.tool_calls
        for call in answer.tool_calls:
            assert call.error is None
            assert Draft202012Validator(SCHEMA).is_valid(call.arguments)
    with pytest.raises(InputError, match="tool_choice is 'must'") as told:
        lm.chat("A shirt?", tools=tools, tool_choice="must")
    assert told.value.field == "tool_choice"
    with pytest.raises(InputError, match="json_schema is a str; give a mapping"):
        lm.extract("A shirt, please.", json_schema="{}")  # type: ignore[arg-type]
