"""Requests and responses of POST /v1/decisions and POST /v1/systemone.

OpenAI's shape: an input, and a list of questions about it. Mercury's shape: a state, and named questions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from dgemma.errors import InputError
from dgemma.server.http.errors import invalid
from dgemma.server.protocol import (
    CanvasLenField,
    CommonFields,
    InputTokensDetails,
    OutputTokensDetails,
    RequestModel,
    ResponseModel,
    TracedResponse,
)
from dgemma.server.validation import NO_STREAM, Unsupported, read_fields
from dgemma.tasks.decide import MAX_CHOICES, MAX_QUESTIONS, NO, YES, Choice, Kind, Question

MAX_ITEMS = 10_000
_CACHE_MODES: tuple[dict[str, str], ...] = (
    {}, {"mode": "implicit"}, {"ttl": "30m"}, {"mode": "implicit", "ttl": "30m"},
)  # fmt: skip
UNSUPPORTED_IN_DECISIONS: dict[str, Unsupported] = {
    "prompt_cache_options": Unsupported("the prefix cache keeps prompts as memory allows", _CACHE_MODES),
    "stream": NO_STREAM,
}

# OpenAI's requests: parts of a text


class CacheBreakpoint(RequestModel):
    """Without effect: the prefix cache keeps prompts as memory allows."""

    mode: Literal["explicit"]


class InputText(RequestModel):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class InputJson(RequestModel):
    type: Literal["input_json"]
    data: dict[str, Any] | list[Any]


class InputImage(BaseModel):
    """Parsed only to be refused by its name."""

    model_config = ConfigDict(extra="allow")
    type: Literal["input_image"]


class OutputText(RequestModel):
    type: Literal["output_text"]
    text: str


class Refusal(RequestModel):
    type: Literal["refusal"]
    refusal: str


Part = Annotated[InputText | InputJson | InputImage | OutputText | Refusal, Field(discriminator="type")]
Content = str | list[Part]

# Items of a conversation

_Status = Literal["in_progress", "completed", "incomplete"]


class ConversationMessage(RequestModel):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: Literal["commentary", "final_answer"] | None = None


class _CallItem(RequestModel):
    call_id: str
    id: str | None = None
    status: _Status | None = None


class FunctionCallItem(_CallItem):
    type: Literal["function_call"]
    name: str
    arguments: str
    namespace: str | None = None


class CustomToolCall(_CallItem):
    type: Literal["custom_tool_call"]
    name: str
    input: str
    namespace: str | None = None


class FunctionCallOutput(_CallItem):
    type: Literal["function_call_output"]
    output: Content


class CustomToolCallOutput(_CallItem):
    type: Literal["custom_tool_call_output"]
    output: Content


def _kind(item: Any) -> str | None:
    """The type of an item; a message may leave it out."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


ConversationItem = Annotated[
    Annotated[ConversationMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomToolCall, Tag("custom_tool_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[CustomToolCallOutput, Tag("custom_tool_call_output")],
    Discriminator(_kind),
]

# Questions


class _QuestionFields(RequestModel):
    instructions: Content
    name: str | None = None


class ChoiceParam(RequestModel):
    value: str | bool
    description: str | None = None


class LevelParam(RequestModel):
    label: str
    description: str | None = None


class PredicateParam(_QuestionFields):
    type: Literal["predicate"]


class ChoiceQuestionParam(_QuestionFields):
    type: Literal["choice"]
    choices: list[ChoiceParam] = Field(min_length=2, max_length=MAX_CHOICES)


class ScoreParam(_QuestionFields):
    type: Literal["score"]
    levels: list[LevelParam] = Field(min_length=2, max_length=MAX_CHOICES)


QuestionParam = Annotated[PredicateParam | ChoiceQuestionParam | ScoreParam, Field(discriminator="type")]


class DecisionRequest(CommonFields):
    input: str | Annotated[list[ConversationItem], Field(min_length=1, max_length=MAX_ITEMS)] = Field(
        examples=["The parcel came late, and the box was torn."]
    )
    questions: list[QuestionParam] = Field(
        min_length=1,
        max_length=MAX_QUESTIONS,
        examples=[[{"type": "predicate", "instructions": "Is the customer unhappy?"}]],
    )
    canvas_len: CanvasLenField | None = Field(
        None, description="Tokens of a canvas; auto: no more than needed."
    )

    def to_questions(self) -> list[Question]:
        return [_question(param, f"questions.{number}") for number, param in enumerate(self.questions)]


def read_decision_request(body: Mapping[str, Any]) -> DecisionRequest:
    return read_fields(DecisionRequest, body, UNSUPPORTED_IN_DECISIONS)


def text_of(content: str | Sequence[Part], where: str) -> str:
    """The texts of all parts, on lines of their own."""
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{where}.{number}") for number, part in enumerate(content))


def made_question(
    kind: Kind, instructions: str, choices: tuple[Choice, ...], name: str | None, where: str
) -> Question:
    try:
        return Question(kind=kind, instructions=instructions, choices=choices, name=name)
    except InputError as error:
        raise invalid(f"{where}: {error}", where) from None


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
    raise invalid(
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


# Mercury's requests

StateContent = str | dict[str, Any] | list[Any]
_IMAGES = ("image_url", "input_image")


class NoulCriteria(RequestModel):
    true: StateContent | None = None
    false: StateContent | None = None


class NoulParam(RequestModel):
    type: Literal["noul"]
    instructions: StateContent | None = None
    criteria: NoulCriteria | None = None


class NamedChoiceParam(RequestModel):
    type: Literal["choice"]
    instructions: StateContent | None = None
    criteria: dict[str, StateContent | None] = Field(min_length=1, max_length=MAX_CHOICES)


class NamedScoreParam(RequestModel):
    type: Literal["score"]
    instructions: StateContent | None = None
    criteria: list[StateContent] = Field(min_length=2, max_length=MAX_CHOICES)


NamedParam = Annotated[NoulParam | NamedChoiceParam | NamedScoreParam, Field(discriminator="type")]


class StateRequest(CommonFields):
    state: StateContent = Field(examples=[{"review": "The parcel came late."}])
    questions: dict[str, NamedParam] = Field(
        min_length=1,
        max_length=MAX_QUESTIONS,
        examples=[{"unhappy": {"type": "noul", "instructions": "Is the customer unhappy?"}}],
    )

    @property
    def text(self) -> str:
        return _state_text(self.state, "state")

    def to_questions(self) -> dict[str, Question | None]:
        """By name; None where there is nothing to decide, because there is only one option."""
        return {name: _named_question(name, param) for name, param in self.questions.items()}


def read_state_request(body: Mapping[str, Any]) -> StateRequest:
    return read_fields(StateRequest, body, UNSUPPORTED_IN_DECISIONS)


def _named_question(name: str, param: NamedParam) -> Question | None:
    where = f"questions.{name[:60]}"
    instructions = _state_text(param.instructions, f"{where}.instructions") or name
    match param:
        case NoulParam():
            criteria = param.criteria or NoulCriteria()
            yes, no = (_state_text(text, f"{where}.criteria") for text in (criteria.true, criteria.false))
            answers = (Choice(value=YES.value, description=yes), Choice(value=NO.value, description=no))
            return made_question("predicate", instructions, answers, name, where)
        case NamedChoiceParam():
            if len(param.criteria) == 1:
                return None
            options = tuple(
                Choice(value=label, description=_state_text(text, f"{where}.criteria"))
                for label, text in param.criteria.items()
            )
            return made_question("choice", instructions, options, name, f"{where}.criteria")
    # Levels are distinguished by their numbers: their texts may be long, or begin alike.
    levels = tuple(
        Choice(value=str(number), description=_state_text(text, f"{where}.criteria"))
        for number, text in enumerate(param.criteria)
    )
    return made_question("score", instructions, levels, name, f"{where}.criteria")


def _state_text(content: StateContent | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    _refuse_images(content, where)
    return as_json(content)


def _refuse_images(value: Any, where: str) -> None:
    """Chat-style parts may stand anywhere. The depth of values was limited when the body was read."""
    if isinstance(value, list):
        for item in value:
            _refuse_images(item, where)
    elif isinstance(value, dict):
        if value.get("type") in _IMAGES and value.keys() & {"image_url"}:
            raise invalid(
                f"{where} holds an image, which is not supported: this model reads text only. Leave it out.",
                where,
                "unsupported_parameter",
            )
        for item in value.values():
            _refuse_images(item, where)


# Responses


class PredicateAnswer(ResponseModel):
    type: Literal["predicate"]
    name: str | None
    probability: float


class ChoiceProbability(ResponseModel):
    value: str | bool
    probability: float


class ChoiceAnswer(ResponseModel):
    type: Literal["choice"]
    name: str | None
    choice: str | bool
    confidence: float = Field(description="The probability of the choice.")
    probabilities: list[ChoiceProbability]


class LevelProbability(ResponseModel):
    value: int = Field(description="The number of the level, the lowest being 0.")
    label: str
    probability: float


class ScoreAnswer(ResponseModel):
    type: Literal["score"]
    name: str | None
    score: float = Field(description="The mean level.")
    confidence: float
    probabilities: list[LevelProbability]


class DecisionUsage(ResponseModel):
    input_tokens: int = Field(description="Of the input and all questions.")
    input_tokens_details: InputTokensDetails
    output_tokens: int = Field(description="Always 0: nothing is generated.")
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class DecisionResponse(TracedResponse):
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    model: str
    usage: DecisionUsage


# Mercury's decisions


class NoulAnswer(ResponseModel):
    type: Literal["noul"]
    noul: float


class NamedChoiceAnswer(ResponseModel):
    type: Literal["choice"]
    choice: str
    confidence: float
    probabilities: dict[str, float]


class NamedScoreAnswer(ResponseModel):
    type: Literal["score"]
    score: float
    confidence: float
    legend: dict[str, Any] = Field(description="The criterion of each level.")
    probabilities: dict[str, float]


class NamedDecisionUsage(ResponseModel):
    input_tokens: int
    output_tokens: int


class NamedDecisionResponse(TracedResponse):
    answers: dict[str, NoulAnswer | NamedChoiceAnswer | NamedScoreAnswer]
    model: str
    usage: NamedDecisionUsage
