"""Structured output: the request fields that constrain an answer.

OpenAI's field, dgemma's own, and those of vLLM and llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from dgemma.errors import InputError
from dgemma.server.http.errors import invalid
from dgemma.server.pins import PinFields
from dgemma.server.protocol import RequestModel
from dgemma.structured_output.response_format import (
    MAX_CHOICES,
    JsonFormat,
    RegexFormat,
    ResponseFormat,
    TextFormat,
    choice_format,
    schema_text,
)

_Schema = dict[str, Any] | bool
_SchemaOrText = dict[str, Any] | bool | str
_Options = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]


class TextResponseFormat(RequestModel):
    type: Literal["text"]


class JsonObjectResponseFormat(RequestModel):
    type: Literal["json_object"]


class JsonSchemaField(RequestModel):
    name: str | None = Field(None, max_length=200, description="Without effect.")
    description: str | None = Field(None, description="Without effect.")
    schema_: _Schema = Field(alias="schema")
    strict: bool | None = Field(None, description="The answer satisfies the schema, whatever the value.")


class JsonSchemaResponseFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: JsonSchemaField


ResponseFormatField = Annotated[
    TextResponseFormat | JsonObjectResponseFormat | JsonSchemaResponseFormat, Field(discriminator="type")
]


class StructuredOutputsParams(RequestModel):
    """vLLM's object; one of its fields."""

    json_: _SchemaOrText | None = Field(None, alias="json")
    regex: str | None = None
    choice: _Options | None = None
    json_object: bool | None = None


class ResponseFormatFields(PinFields):
    """The fields that constrain an answer; a request has at most one."""

    response_format: ResponseFormatField | None = None
    regex: str | None = Field(None, description="The whole text matches.")
    choice: _Options | None = Field(None, description="The text is one of these.")
    json_schema: _SchemaOrText | None = Field(None, description="The text is JSON of this schema.")
    json_object: bool | None = Field(None, description="The text is a JSON object.")

    structured_outputs: StructuredOutputsParams | None = Field(None, description="vLLM's field.")
    guided_json: _SchemaOrText | None = Field(None, description="vLLM's older name of json_schema.")
    guided_regex: str | None = Field(None, description="vLLM's older name of regex.")
    guided_choice: _Options | None = Field(None, description="vLLM's older name of choice.")


@dataclass(frozen=True, kw_only=True)
class RequestedFormat:
    """The response format of a request, and the field that sets it."""

    response_format: ResponseFormat
    field: str
    thinking: bool = False  # a thought may come before it


def requested_text_format(request: ResponseFormatFields) -> tuple[str, TextFormat] | None:
    """The field that constrains the text, and the format it asks for; None where no field does."""
    requested = [entry for entry in _format_fields(request) if entry[2] is not None]
    if not requested:
        return None
    (name, kind, value), *others = requested
    if others:
        raise invalid(
            f"{name} and {others[0][0]} are both given; an answer has one form. Give one of them.",
            others[0][0].partition(".")[0],
        )
    field = name.partition(".")[0]
    try:
        return field, _text_format(kind, value, name)
    except InputError as error:
        raise invalid(str(error), field) from None


def _format_fields(request: ResponseFormatFields) -> list[tuple[str, str, Any]]:
    """Each field that may constrain the text: its path, its kind, and its value (None: absent)."""
    outputs = request.structured_outputs or StructuredOutputsParams.model_validate({})
    format_ = request.response_format
    return [
        ("response_format", "json_object", isinstance(format_, JsonObjectResponseFormat) or None),
        (
            "response_format.json_schema.schema",
            "json_schema",
            format_.json_schema.schema_ if isinstance(format_, JsonSchemaResponseFormat) else None,
        ),
        ("regex", "regex", request.regex),
        ("choice", "choice", request.choice),
        ("json_schema", "json_schema", request.json_schema),
        ("json_object", "json_object", request.json_object or None),
        ("structured_outputs.json", "json_schema", outputs.json_),
        ("structured_outputs.regex", "regex", outputs.regex),
        ("structured_outputs.choice", "choice", outputs.choice),
        ("structured_outputs.json_object", "json_object", outputs.json_object or None),
        ("guided_json", "json_schema", request.guided_json),
        ("guided_regex", "regex", request.guided_regex),
        ("guided_choice", "choice", request.guided_choice),
    ]


def _text_format(kind: str, value: Any, name: str) -> TextFormat:
    match kind:
        case "regex":
            return RegexFormat(value)
        case "choice":
            return choice_format(value, name)
        case "json_schema":
            return JsonFormat(schema_text(value, name))
    return JsonFormat()
