"""The fields that all generating requests share, and how a body becomes one of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from dgemma.engine.service import MAX_LOGIT_BIAS, MAX_LOGIT_BIASES
from dgemma.params import MAX_STEPS, MAX_STOP_STRING_LEN, MAX_STOP_STRINGS, MAX_TOP_K, PRESETS
from dgemma.server.api_error import ApiError, refused, shown
from dgemma.server.fields import Unsupported, flattened, unknown_field, without_unsupported

# Every whole number stays within what a signed 64-bit reader takes, unless a rule says otherwise.
MAX_INT = (1 << 63) - 1
MAX_END_TOKENS = 64
# Numbers without an upper bound of their own: above this none of them makes a difference.
MAX_REAL = 1e9

# Checked where it is used, with a better sentence than a union of types gives.
_NULL = {"type": "null"}
# What pydantic's sentences begin with; ours begin with the name of the field.
_SUBJECT = re.compile(r"^(Input|Value|List|Dictionary|String) (?=\w)")
_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_LEN}
Stop = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                _STOP_STRING,
                {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOP_STRINGS},
                _NULL,
            ]
        }
    ),
]
LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]],
    Field(max_length=MAX_LOGIT_BIASES),
]
_Preset = Annotated[str, WithJsonSchema({"type": "string", "enum": list(PRESETS)})]
_Decode = Annotated[str, WithJsonSchema({"type": "string", "enum": ["diffuse", "causal", "auto"]})]
_Acceptance = Annotated[
    str, WithJsonSchema({"type": "string", "enum": ["entropy_bound", "confidence", "fixed"]})
]


class Fields(BaseModel):
    """Strict: no field beyond these, no number in a string, no infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class CommonFields(Fields):
    """What may be asked of everything a model does."""

    model: str = Field(max_length=200)
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 64) - 1)
    deadline_s: float | None = Field(None, ge=0, le=MAX_REAL)

    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class SamplingFields(CommonFields):
    """How words are chosen. dgemma's own options have the names of `GenerationParams`."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=1, le=MAX_TOP_K)

    preset: _Preset | None = None
    acceptance: _Acceptance | None = None
    max_denoising_steps: int | None = Field(None, ge=1, le=MAX_STEPS)
    t_min: float | None = Field(None, ge=0, le=100)
    t_max: float | None = Field(None, ge=0, le=100)
    entropy_bound: float | None = Field(None, ge=0, le=MAX_REAL)
    min_confidence: float | None = Field(None, ge=0, le=1)
    accept_per_step: int | None = Field(None, ge=1, le=MAX_INT)
    stability_threshold: int | None = Field(None, ge=0, le=MAX_INT)
    confidence_threshold: float | None = Field(None, ge=0, le=MAX_REAL)


class GenerationFields(SamplingFields):
    """What may be asked of any answer."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    diffusing: bool | None = Field(None, description="With stream: also send drafts of the running canvas.")
    n: int | None = Field(None, ge=1, le=MAX_INT)
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    stop: Stop = None
    logit_bias: LogitBias | None = None
    decode: _Decode | None = None
    end_tokens: list[Annotated[int, Field(ge=0, le=MAX_INT)]] | None = Field(None, max_length=MAX_END_TOKENS)
    ignore_end: bool | None = None


Request = TypeVar("Request", bound=Fields)


def read_fields(
    kind: type[Request], body: Mapping[str, Any], unsupported: Mapping[str, Unsupported]
) -> Request:
    """A checked request, or the first thing that is wrong with it."""
    body = flattened(body)
    # Misspelt names first: a wrong value may be the consequence of one.
    for name in body:
        if name not in kind.model_fields and name not in unsupported:
            raise unknown_field(name, (*kind.model_fields, *unsupported))
    try:
        return kind.model_validate(without_unsupported(body, unsupported))
    except ValidationError as error:
        raise _refusal(error, kind, body) from None


def _refusal(error: ValidationError, kind: type[BaseModel], body: Mapping[str, Any]) -> Exception:
    errors = error.errors(include_url=False, include_context=False)
    # Of what is wrong with one field in every form it may have, the innermost is of the form that was meant.
    of_one = [found for found in errors if found["loc"][:1] == errors[0]["loc"][:1]]
    tried = [(_place(found["loc"], body, is_missing=found["type"] == "missing"), found) for found in of_one]
    place, first = max(tried, key=lambda one: (len(one[0]), not one[1]["type"].endswith("_type")))
    path = ".".join(place)
    match first["type"]:
        case "missing":
            return ApiError(f"{path} is missing; give it.", param=path, code="missing_required_parameter")
        case "union_tag_not_found" if not isinstance(first["input"], dict):
            return refused(f"{path} is {shown(first['input'])}; it should be an object.", path)
        case "union_tag_not_found":
            path = f"{path}.type"
            return ApiError(f"{path} is missing; give it.", param=path, code="missing_required_parameter")
        case "union_tag_invalid":
            known = first["msg"].partition("expected tags: ")[2]
            given = first["input"].get("type")
            return refused(f"{path}.type is {shown(given)}; it must be one of {known}.", f"{path}.type")
        case "extra_forbidden":
            inner = kind.model_fields[place[0]].annotation
            models = [part for part in getattr(inner, "__args__", ()) if _is_model(part)]
            return unknown_field(path, models[0].model_fields if models else ())
    rule = _SUBJECT.sub("", first["msg"])
    return refused(f"{path} is {shown(first['input'])}; it {rule[:1].lower()}{rule[1:]}.", path)


def _place(where: Sequence[str | int], body: Any, *, is_missing: bool) -> list[str]:
    """The names that lead to a value. pydantic adds which of several forms of a value it has tried."""
    place: list[str] = []
    for number, part in enumerate(where, start=1):
        is_there = isinstance(body, dict) and part in body
        is_there |= isinstance(body, list) and isinstance(part, int) and part < len(body)
        if is_there:
            body = body[part]
        elif not is_missing or number < len(where):
            continue
        place.append(str(part)[:100])
    return place


def _is_model(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
