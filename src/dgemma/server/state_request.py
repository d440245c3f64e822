"""What POST /v1/decisions takes in Mercury's shape: a state, and named questions about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from dgemma.canvas.decide import MAX_CHOICES, MAX_QUESTIONS, NO, YES, Choice, Question
from dgemma.server.api_error import refused
from dgemma.server.decision_request import as_json, made_question
from dgemma.server.fields import UNSUPPORTED_IN_DECISIONS
from dgemma.server.request_fields import CommonFields, Fields, read_fields

Content = str | dict[str, Any] | list[Any]
_IMAGES = ("image_url", "input_image")


class NoulCriteria(Fields):
    true: Content | None = None
    false: Content | None = None


class NoulParam(Fields):
    type: Literal["noul"]
    instructions: Content | None = None
    criteria: NoulCriteria | None = None


class NamedChoiceParam(Fields):
    type: Literal["choice"]
    instructions: Content | None = None
    criteria: dict[str, Content | None] = Field(min_length=1, max_length=MAX_CHOICES)


class NamedScoreParam(Fields):
    type: Literal["score"]
    instructions: Content | None = None
    criteria: list[Content] = Field(min_length=2, max_length=MAX_CHOICES)


NamedParam = Annotated[NoulParam | NamedChoiceParam | NamedScoreParam, Field(discriminator="type")]


class StateRequest(CommonFields):
    state: Content = Field(examples=[{"review": "The parcel came late."}])
    questions: dict[str, NamedParam] = Field(
        min_length=1,
        max_length=MAX_QUESTIONS,
        examples=[{"unhappy": {"type": "noul", "instructions": "Is the customer unhappy?"}}],
    )

    @property
    def text(self) -> str:
        return _text(self.state, "state")

    def to_questions(self) -> dict[str, Question | None]:
        """By name; None where there is nothing to decide, because there is one option only."""
        return {name: _question(name, param) for name, param in self.questions.items()}


def read_state_request(body: Mapping[str, Any]) -> StateRequest:
    return read_fields(StateRequest, body, UNSUPPORTED_IN_DECISIONS)


def _question(name: str, param: NamedParam) -> Question | None:
    where = f"questions.{name[:60]}"
    instructions = _text(param.instructions, f"{where}.instructions") or name
    match param:
        case NoulParam():
            criteria = param.criteria or NoulCriteria()
            yes, no = (_text(text, f"{where}.criteria") for text in (criteria.true, criteria.false))
            answers = (Choice(value=YES.value, description=yes), Choice(value=NO.value, description=no))
            return made_question("predicate", instructions, answers, name, where)
        case NamedChoiceParam():
            if len(param.criteria) == 1:
                return None
            options = tuple(
                Choice(value=label, description=_text(text, f"{where}.criteria"))
                for label, text in param.criteria.items()
            )
            return made_question("choice", instructions, options, name, f"{where}.criteria")
    # Levels are told apart by their numbers: their texts may be long, or alike in their beginnings.
    levels = tuple(
        Choice(value=str(number), description=_text(text, f"{where}.criteria"))
        for number, text in enumerate(param.criteria)
    )
    return made_question("score", instructions, levels, name, f"{where}.criteria")


def _text(content: Content | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    _refuse_images(content, where)
    return as_json(content)


def _refuse_images(value: Any, where: str) -> None:
    """Chat-style parts may stand anywhere. How deep values go was looked at when the body was read."""
    if isinstance(value, list):
        for item in value:
            _refuse_images(item, where)
    elif isinstance(value, dict):
        if value.get("type") in _IMAGES and value.keys() & {"image_url"}:
            raise refused(
                f"{where} holds an image, which is not supported: this model reads text only. Leave it out.",
                where,
                "unsupported_parameter",
            )
        for item in value.values():
            _refuse_images(item, where)
