"""From a JSON body to a validated request: unsupported and unknown fields are refused by name.

No field is silently ignored: each is a field of the request's model, or listed as unsupported with the values
that ask for the default behaviour, or unknown and refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from dgemma.errors import suggestion
from dgemma.server.http.errors import ApiError, invalid, missing_field, shown
from dgemma.server.protocol import RequestModel

# Accepted, checked for their type, and without any effect on the answer.
NEUTRAL = ("user", "metadata", "safety_identifier", "prompt_cache_key")
# What pydantic's messages begin with; ours begin with the name of the field.
_SUBJECT = re.compile(r"^(Input|Value|List|Dictionary|String) (?=\w)")

Request = TypeVar("Request", bound=RequestModel)


@dataclass(frozen=True)
class Unsupported:
    """A field of other servers that this one does not implement."""

    why: str
    usual: tuple[Any, ...] = ()  # values that ask for what happens anyway
    code: str = "unsupported_parameter"


PENALTY = Unsupported("all tokens of a canvas are written at once, so none comes before another", (0,))
# SGLang's own fields. Its router writes them into every request, with what it takes for their defaults.
_SGLANG = {
    "continue_final_message": Unsupported("a chat is encoded for the reply to it", (False,)),
    "ignore_eos": Unsupported("see ignore_end", (False,)),
    "no_stop_trim": Unsupported("a stop string is not part of the text", (False,)),
    "return_hidden_states": Unsupported("hidden states stay in the engine", (False,)),
    "separate_reasoning": Unsupported("reasoning is in reasoning_content", (True,)),
    "skip_special_tokens": Unsupported("control tokens are not part of the text", (True,)),
    "stream_reasoning": Unsupported("a stream has the reasoning too", (True,)),
}
UNSUPPORTED_BY_ALL: dict[str, Unsupported] = {
    "frequency_penalty": PENALTY,
    "presence_penalty": PENALTY,
    **_SGLANG,
}
GRAMMAR = Unsupported("grammars are not read; regex, choice, json_schema and json_object are", ("",))
UNSUPPORTED_GRAMMARS = dict.fromkeys(("grammar", "guided_grammar"), GRAMMAR)
NO_STREAM = Unsupported("the answer comes whole", (False,))


def flattened(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with the fields of `extra_body`, the object in which Mercury's client sends `extra_params`."""
    extra = body.get("extra_body", {})
    if not isinstance(extra, dict):
        raise invalid(f"extra_body is {shown(extra)}; it must be an object of more fields.", "extra_body")
    twice = sorted(extra.keys() & body.keys())
    if twice:
        raise invalid(f"{twice[0]} is given in the body and in extra_body; give it once.", twice[0])
    fields = {name: value for name, value in body.items() if name != "extra_body"}
    return {**fields, **{name: value for name, value in extra.items() if value is not None}}


def read_fields(
    kind: type[Request], body: Mapping[str, Any], unsupported: Mapping[str, Unsupported]
) -> Request:
    """The validated request; raises an ApiError for the first thing that is wrong with the body.

    body: as `flattened` returns it.
    """
    # Unknown names first: a wrong value may follow from a misspelt name.
    for name in body:
        if name not in kind.model_fields and name not in unsupported:
            raise _unknown_field(name, (*kind.model_fields, *unsupported))
    try:
        return kind.model_validate(_without_unsupported(body, unsupported))
    except ValidationError as error:
        raise _validation_error(error, kind, body) from None


def _validation_error(error: ValidationError, kind: type[BaseModel], body: Mapping[str, Any]) -> ApiError:
    errors = error.errors(include_url=False)
    # A union field has errors of each alternative; the innermost error is of the one that was meant.
    of_field = [found for found in errors if found["loc"][:1] == errors[0]["loc"][:1]]
    tried = [(_place(found["loc"], body, is_missing=found["type"] == "missing"), found) for found in of_field]
    place, first = max(tried, key=lambda entry: (len(entry[0]), not entry[1]["type"].endswith("_type")))
    path = ".".join(place)
    match first["type"]:
        case "missing":
            return missing_field(path)
        case "union_tag_not_found" if not isinstance(first["input"], dict):
            return invalid(f"{path} is {shown(first['input'])}; it should be an object.", path)
        case "union_tag_not_found":
            return missing_field(f"{path}.type")
        case "union_tag_invalid":
            known = first["ctx"]["expected_tags"]
            tag = first["input"].get("type")
            return invalid(f"{path}.type is {shown(tag)}; it must be one of {known}.", f"{path}.type")
        case "extra_forbidden":
            inner = kind.model_fields[place[0]].annotation
            models = [part for part in getattr(inner, "__args__", ()) if _is_model(part)]
            return _unknown_field(path, models[0].model_fields if models else ())
    rule = _SUBJECT.sub("", first["msg"])
    return invalid(f"{path} is {shown(first['input'])}; it {rule[:1].lower()}{rule[1:]}.", path)


def _place(where: Sequence[str | int], body: Any, *, is_missing: bool) -> list[str]:
    """The names that lead to a value; pydantic's location also names the alternative of a union."""
    place: list[str] = []
    tagged: Any = None
    for number, part in enumerate(where, start=1):
        # The alternative has the name of the value's type: {"type": "text", "text": ...} holds that name too.
        if isinstance(body, dict) and body.get("type") == part and body is not tagged:
            tagged = body
            continue
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


def _without_unsupported(body: Mapping[str, Any], unsupported: Mapping[str, Unsupported]) -> dict[str, Any]:
    """The body without unsupported fields at their usual value; another value is refused by name."""
    kept: dict[str, Any] = {}
    for name, value in body.items():
        rule = unsupported.get(name)
        if rule is None:
            kept[name] = value
        elif not any(_same(value, usual) for usual in rule.usual):
            alternative = f", or give {' or '.join(map(json.dumps, rule.usual))}" if rule.usual else ""
            raise invalid(
                f"{name} is {shown(value)}, which is not supported: {rule.why}. "
                f"Leave {name} out{alternative}.",
                name,
                rule.code,
            )
    return kept


def _unknown_field(path: str, known: Iterable[str]) -> ApiError:
    """The error for an unknown field; `path` is its name with those of the objects around it."""
    name = path.rpartition(".")[2]
    hint = suggestion(name, known) if len(name) <= 60 else "."
    return invalid(f"unknown field {shown(path)}{hint}", path[:100], "unknown_parameter")


def _same(value: object, usual: object) -> bool:
    """Equal as JSON: 0 and 0.0 are, 0 and false are not."""
    return isinstance(value, bool) == isinstance(usual, bool) and value == usual
