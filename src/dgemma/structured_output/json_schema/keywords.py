"""The keywords of JSON Schema: supported, without effect, refused; and typed access to their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    {
        "$dynamicRef", "$ref", "allOf", "anyOf", "dependentRequired", "dependentSchemas", "else", "if", "not",
        "oneOf", "then", "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
ASSERTIONS = frozenset(
    {
        "additionalProperties", "const", "contains", "enum", "exclusiveMaximum", "exclusiveMinimum",
        "format", "items", "maxContains", "maxItems", "maxLength", "maxProperties", "maximum", "minContains",
        "minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern", "patternProperties",
        "prefixItems", "properties", "propertyNames", "required", "type", "uniqueItems",
    }
)  # fmt: skip
_REFUSED = {
    "$recursiveRef": "depends on the referring schema; use '$ref'",
    "additionalItems": "belongs to older drafts; use 'prefixItems' and 'items'",
    "dependencies": "belongs to older drafts; use 'dependentRequired' or 'dependentSchemas'",
    "nullable": "belongs to OpenAPI; use a list of types with 'null' in it",
}
SPAN_OF = "x-spanOf"
"""Our own: a string is a run of words of this text, a number one that it says. Validators ignore `x-...`."""
# Keywords of derived schemas (`negation.py`). A caller's schema may not contain them.
KIND_IN = "\0kinds"  # the value has one of these kinds
NOT_EQUAL = "\0unlike"  # the value equals none of these
NOT_PATTERN = "\0not found"  # the string does not match this pattern
NOT_MULTIPLE_OF = "\0no multiple"  # the number is no multiple of this
DERIVED = "\0made"  # does not close an object whose properties it names
DERIVED_KEYWORDS = frozenset({KIND_IN, NOT_EQUAL, NOT_PATTERN, NOT_MULTIPLE_OF, DERIVED})
_KNOWN = ASSERTIONS | ANNOTATIONS | IN_PLACE | DERIVED_KEYWORDS
KINDS = ("null", "boolean", "integer", "fraction", "string", "array", "object")
"""Types of values; a number is an integer or a fraction."""

_TYPES = {kind: frozenset({kind}) for kind in KINDS if kind != "fraction"} | {
    "number": frozenset({"integer", "fraction"})
}


def refused(where: str, keyword: str, why: str) -> InputError:
    return InputError(f"the JSON schema's {keyword!r} at {where} {why}.")


def check_keywords(schema: dict[str, Any], where: str) -> None:
    for keyword in schema:
        if keyword in _KNOWN or keyword.startswith("x-"):
            continue
        if keyword in _REFUSED:
            raise refused(where, keyword, f"is not supported: it {_REFUSED[keyword]}")
        near = suggestion(keyword, _KNOWN, otherwise="; remove it.")
        raise InputError(
            f"the JSON schema's {keyword[:60]!r} at {where} is not a keyword that is supported{near}"
        )


def kinds_of(schema: dict[str, Any], where: str) -> frozenset[str]:
    """The kinds that the `type` of a schema allows."""
    if KIND_IN in schema:
        return frozenset(schema[KIND_IN])
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
    """A non-negative integer."""
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


def names_by_name(schema: dict[str, Any], keyword: str, where: str) -> dict[str, list[str]]:
    """A mapping of names to lists of names."""
    value = entries(schema, keyword, where)
    for names in value.values():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise refused(where, keyword, f"has {str(names)[:40]!r} in it; give lists of strings")
    return value


def min_and_max_count(
    branch: Iterable[dict[str, Any]], what: str, where: Callable[[object], str]
) -> tuple[int, int | None]:
    """The largest `min...` and the smallest `max...` of a branch."""
    min_count, max_count = 0, None
    for schema in branch:
        min_count = max(min_count, count(schema, f"min{what}", where(schema)) or 0)
        limit = count(schema, f"max{what}", where(schema))
        max_count = limit if max_count is None or (limit is not None and limit < max_count) else max_count
    return min_count, max_count
