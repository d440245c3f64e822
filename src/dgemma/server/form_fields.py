"""What a request may ask its text to be: OpenAI's field, dgemma's, and what vLLM and llama.cpp call them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from dgemma.constraint.forms import MAX_CHOICES, Form, Json, Regex, TextForm, choice_of, schema_text
from dgemma.errors import InputError
from dgemma.server.api_error import refused
from dgemma.server.request_fields import Fields, GenerationFields

_Schema = dict[str, Any] | bool
_SchemaOrText = dict[str, Any] | bool | str
_Options = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]


class TextFormat(Fields):
    type: Literal["text"]


class JsonObjectFormat(Fields):
    type: Literal["json_object"]


class JsonSchema(Fields):
    name: str | None = Field(None, max_length=200, description="Without effect.")
    description: str | None = Field(None, description="Without effect.")
    schema_: _Schema = Field(alias="schema")
    strict: bool | None = Field(None, description="The answer keeps to the schema, whatever is said here.")


class JsonSchemaFormat(Fields):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Fields):
    """vLLM's; one of them."""

    json_: _SchemaOrText | None = Field(None, alias="json")
    regex: str | None = None
    choice: _Options | None = None
    json_object: bool | None = None


class FormFields(GenerationFields):
    """Of these a request has one."""

    response_format: ResponseFormat | None = None
    regex: str | None = Field(None, description="The whole text matches.")
    choice: _Options | None = Field(None, description="The text is one of these.")
    json_schema: _SchemaOrText | None = Field(None, description="The text is JSON that this describes.")
    json_object: bool | None = Field(None, description="The text is a JSON object.")

    structured_outputs: StructuredOutputs | None = Field(None, description="As vLLM has it.")
    guided_json: _SchemaOrText | None = Field(None, description="As vLLM had it: json_schema.")
    guided_regex: str | None = Field(None, description="As vLLM had it: regex.")
    guided_choice: _Options | None = Field(None, description="As vLLM had it: choice.")


@dataclass(frozen=True, kw_only=True)
class AskedForm:
    """What an answer is asked to be, and by which field."""

    form: Form
    field: str
    thinks: bool = False  # a thought may come before it


def text_form(request: FormFields) -> tuple[str, TextForm] | None:
    """The field that says what the text shall be, and what it says."""
    given = [(name, kind, value) for name, kind, value in _said(request) if value is not None]
    if not given:
        return None
    (name, kind, value), *others = given
    if others:
        raise refused(
            f"{name} and {others[0][0]} are both given; an answer has one form. Give one of them.",
            others[0][0].partition(".")[0],
        )
    try:
        return name.partition(".")[0], _form(kind, value, name)
    except InputError as error:
        raise refused(str(error), name.partition(".")[0]) from None


def _said(request: FormFields) -> list[tuple[str, str, Any]]:
    """Where something is said, of which kind, and what."""
    outputs = request.structured_outputs or StructuredOutputs.model_validate({})
    form = request.response_format
    return [
        ("response_format", "json_object", isinstance(form, JsonObjectFormat) or None),
        (
            "response_format.json_schema.schema",
            "json_schema",
            form.json_schema.schema_ if isinstance(form, JsonSchemaFormat) else None,
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


def _form(kind: str, value: Any, name: str) -> TextForm:
    match kind:
        case "regex":
            return Regex(value)
        case "choice":
            return choice_of(value, name)
        case "json_schema":
            return Json(schema_text(value, name))
    return Json()
