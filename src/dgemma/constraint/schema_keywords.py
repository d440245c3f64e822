"""The words a JSON schema may use: those that are taken, those that say nothing, those that are refused."""

from __future__ import annotations

from typing import Any

from dgemma.errors import InputError, suggestion

ANNOTATIONS = frozenset(
    {
        "$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$schema", "$vocabulary", "contentEncoding",
        "contentMediaType", "contentSchema", "default", "definitions", "deprecated", "description",
        "discriminator", "example", "examples", "externalDocs", "readOnly", "title", "writeOnly",
    }
)  # fmt: skip
IN_PLACE = frozenset(
    {"$ref", "allOf", "anyOf", "oneOf"}
)  # fmt: skip
ASSERTIONS = frozenset(
    {
        "additionalProperties", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "items",
        "maxItems", "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minProperties",
        "minimum", "multipleOf", "pattern", "patternProperties", "prefixItems", "properties",
        "propertyNames", "required", "type", "uniqueItems",
    }
)  # fmt: skip
_REFUSED = {
    "$dynamicRef": "depends on who refers to it; use '$ref'",
    "$recursiveRef": "depends on who refers to it; use '$ref'",
    "additionalItems": "belongs to older drafts; use 'prefixItems' and 'items'",
    "dependencies": "belongs to older drafts; use 'dependentRequired'",
    "nullable": "belongs to OpenAPI; use a list of types with 'null' in it",
}
KINDS = ("null", "boolean", "integer", "fraction", "string", "array", "object")
"""Types of values, where a number is an integer or not: a fraction."""

_TYPES = {kind: frozenset({kind}) for kind in KINDS if kind != "fraction"} | {
    "number": frozenset({"integer", "fraction"})
}


def refused(where: str, keyword: str, why: str) -> InputError:
    return InputError(f"the JSON schema's {keyword!r} at {where} {why}.")


def check_keywords(schema: dict[str, Any], where: str) -> None:
    for keyword in schema:
        if keyword in ASSERTIONS or keyword in ANNOTATIONS or keyword in IN_PLACE or keyword.startswith("x-"):
            continue
        if keyword in _REFUSED:
            raise refused(where, keyword, f"is not supported: it {_REFUSED[keyword]}")
        near = suggestion(keyword, ASSERTIONS | ANNOTATIONS | IN_PLACE, otherwise="; remove it.")
        raise InputError(
            f"the JSON schema's {keyword[:60]!r} at {where} is not a keyword that is supported{near}"
        )


def kinds_of(schema: dict[str, Any], where: str) -> frozenset[str]:
    """The kinds that `type` of a schema admits."""
    if "type" not in schema:
        return frozenset(KINDS)
    given = schema["type"]
    names = given if isinstance(given, list) else [given]
    for name in names:
        if not isinstance(name, str) or name not in _TYPES:
            near = suggestion(str(name), _TYPES, otherwise=f"; known are {', '.join(_TYPES)}.")
            raise InputError(f"the JSON schema's 'type' at {where} is {str(name)[:40]!r}{near}")
    return frozenset().union(*(_TYPES[name] for name in names))


def count(schema: dict[str, Any], keyword: str, where: str) -> int | None:
    """A number of things: an integer from 0."""
    value = schema.get(keyword)
    if value is None and keyword not in schema:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise refused(where, keyword, f"is {str(value)[:40]!r}; give an integer from 0")
    return int(value)


def number(schema: dict[str, Any], keyword: str, where: str) -> int | float | None:
    value = schema.get(keyword)
    if value is None and keyword not in schema:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refused(where, keyword, f"is {str(value)[:40]!r}; give a number")
    return value


def text(schema: dict[str, Any], keyword: str, where: str) -> str | None:
    value = schema.get(keyword)
    if value is None and keyword not in schema:
        return None
    if not isinstance(value, str):
        raise refused(where, keyword, f"is {str(value)[:40]!r}; give a string")
    return value


def entries(schema: dict[str, Any], keyword: str, where: str) -> dict[str, Any]:
    value = schema.get(keyword, {})
    if not isinstance(value, dict):
        raise refused(where, keyword, f"is {str(value)[:40]!r}; give an object")
    return value


def items(schema: dict[str, Any], keyword: str, where: str, *, of: type | None = None) -> list[Any]:
    value = schema.get(keyword, [])
    if not isinstance(value, list) or (of is not None and not all(isinstance(item, of) for item in value)):
        kind = "a list" if of is None else "a list of strings"
        raise refused(where, keyword, f"is {str(value)[:40]!r}; give {kind}")
    return value
