"""What POST /v1/decisions takes in OpenAI's shape: an input, and a list of questions about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from dgemma.canvas.decide import MAX_CHOICES, MAX_QUESTIONS, Choice, Kind, Question
from dgemma.errors import InputError
from dgemma.server.api_error import refused
from dgemma.server.fields import UNSUPPORTED_IN_DECISIONS
from dgemma.server.request_fields import CommonFields, Fields, read_fields

MAX_ITEMS = 10_000

# Parts of a text


class CacheBreakpoint(Fields):
    """Neutral: what was read is kept as memory allows."""

    mode: Literal["explicit"]


class InputText(Fields):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class InputJson(Fields):
    type: Literal["input_json"]
    data: dict[str, Any] | list[Any]


class InputImage(BaseModel):
    """Known, so that it can be refused by its name."""

    model_config = ConfigDict(extra="allow")
    type: Literal["input_image"]


class OutputText(Fields):
    type: Literal["output_text"]
    text: str


class Refusal(Fields):
    type: Literal["refusal"]
    refusal: str


Part = Annotated[InputText | InputJson | InputImage | OutputText | Refusal, Field(discriminator="type")]
Content = str | list[Part]

# Items of a conversation

_Status = Literal["in_progress", "completed", "incomplete"]


class Message(Fields):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: Literal["commentary", "final_answer"] | None = None


class _Called(Fields):
    call_id: str
    id: str | None = None
    status: _Status | None = None


class FunctionCallItem(_Called):
    type: Literal["function_call"]
    name: str
    arguments: str
    namespace: str | None = None


class CustomToolCall(_Called):
    type: Literal["custom_tool_call"]
    name: str
    input: str
    namespace: str | None = None


class FunctionCallOutput(_Called):
    type: Literal["function_call_output"]
    output: Content


class CustomToolCallOutput(_Called):
    type: Literal["custom_tool_call_output"]
    output: Content


def _kind(item: Any) -> str | None:
    """A message need not say that it is one."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomToolCall, Tag("custom_tool_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[CustomToolCallOutput, Tag("custom_tool_call_output")],
    Discriminator(_kind),
]

# Questions


class _Asked(Fields):
    instructions: Content
    name: str | None = None


class ChoiceParam(Fields):
    value: str | bool
    description: str | None = None


class LevelParam(Fields):
    label: str
    description: str | None = None


class PredicateParam(_Asked):
    type: Literal["predicate"]


class ChoiceQuestionParam(_Asked):
    type: Literal["choice"]
    choices: list[ChoiceParam] = Field(min_length=2, max_length=MAX_CHOICES)


class ScoreParam(_Asked):
    type: Literal["score"]
    levels: list[LevelParam] = Field(min_length=2, max_length=MAX_CHOICES)


QuestionParam = Annotated[PredicateParam | ChoiceQuestionParam | ScoreParam, Field(discriminator="type")]


class DecisionRequest(CommonFields):
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS)] = Field(
        examples=["The parcel came late, and the box was torn."]
    )
    questions: list[QuestionParam] = Field(
        min_length=1,
        max_length=MAX_QUESTIONS,
        examples=[[{"type": "predicate", "instructions": "Is the customer unhappy?"}]],
    )

    def to_questions(self) -> list[Question]:
        return [_question(param, f"questions.{number}") for number, param in enumerate(self.questions)]


def read_decision_request(body: Mapping[str, Any]) -> DecisionRequest:
    return read_fields(DecisionRequest, body, UNSUPPORTED_IN_DECISIONS)


def text_of(content: str | Sequence[Part], where: str) -> str:
    """Parts of a text, one after another."""
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{where}.{number}") for number, part in enumerate(content))


def made_question(
    kind: Kind, instructions: str, choices: tuple[Choice, ...], name: str | None, where: str
) -> Question:
    try:
        return Question(kind=kind, instructions=instructions, choices=choices, name=name)
    except InputError as error:
        raise refused(f"{where}: {error}", where) from None


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _part(part: Part, where: str) -> str:
    match part:
        case InputText() | OutputText():
            return part.text
        case InputJson():
            return as_json(part.data)
        case Refusal():
            return part.refusal
    raise refused(
        f"{where} is an image, which is not supported: this model reads text only. Leave it out.",
        where,
        "unsupported_parameter",
    )


def _question(param: QuestionParam, where: str) -> Question:
    instructions = text_of(param.instructions, f"{where}.instructions")
    match param:
        case ChoiceQuestionParam():
            choices = tuple(Choice(value=c.value, description=c.description or "") for c in param.choices)
            return made_question("choice", instructions, choices, param.name, f"{where}.choices")
        case ScoreParam():
            levels = tuple(Choice(value=c.label, description=c.description or "") for c in param.levels)
            return made_question("score", instructions, levels, param.name, f"{where}.levels")
    return Question(kind="predicate", instructions=instructions, name=param.name)
