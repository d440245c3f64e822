"""The bundled forms model behind the chat endpoint: a record for every message, read by OpenAI's client."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from dgemma.forms.record_types import RECORD_TYPES, any_schema, make_prompt
from server.real_server import RealServer, serving

TODAY = datetime.date(2026, 11, 18)


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with serving("bundled:forms") as server:
        yield server


def ask(server: RealServer, type_: str | None, message: str, schema: Any) -> Any:
    with OpenAI(base_url=f"{server.address}/v1", api_key="any", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": make_prompt(type_, message, TODAY)}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "record", "schema": schema, "strict": True},
            },
            seed=0,
        )
    return json.loads(answer.choices[0].message.content or "")


@pytest.mark.parametrize("type_", RECORD_TYPES)
def test_every_answer_is_a_record_of_its_type(server: RealServer, type_: str) -> None:
    schema = RECORD_TYPES[type_]
    jsonschema.validate(ask(server, type_, "no idea what this is", schema), schema)


def test_the_type_can_be_left_to_the_model(server: RealServer) -> None:
    found = ask(server, None, "ERROR auth 404: token expired", any_schema())
    jsonschema.validate(found, any_schema())
    assert found["type"] == "log"
