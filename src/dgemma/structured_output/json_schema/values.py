"""Validation of given values: which values of `enum` and `const` the other keywords allow."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from fractions import Fraction
from typing import Any

from dgemma.errors import InputError
from dgemma.structured_output.json_schema.keywords import (
    NOT_EQUAL,
    NOT_MULTIPLE_OF,
    NOT_PATTERN,
    count,
    entries,
    items,
    kinds_of,
    names_by_name,
    text,
)
from dgemma.structured_output.json_schema.numbers import bounds_of, divisor_of
from dgemma.structured_output.json_schema.source import Schema, SchemaSource
from dgemma.structured_output.json_schema.strings import StringKeywords


def frozen(value: Any) -> Hashable:
    """A hashable key of a JSON value: equal for equal values. 1 equals 1.0 and differs from true."""
    if isinstance(value, bool | None):
        return (value,)
    if isinstance(value, list):
        return ("array", *map(frozen, value))
    if isinstance(value, dict):
        return frozenset((key, frozen(item)) for key, item in value.items())
    scalar: Hashable = value
    return scalar


def json_equal(a: Any, b: Any) -> bool:
    return frozen(a) == frozen(b)


def kind_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value == int(value) else "fraction"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


Verdict = bool | None
"""None: validators may differ."""

_MAX_DEPTH = 100


def _all(verdicts: Iterable[Verdict]) -> Verdict:
    found: Verdict = True
    for verdict in verdicts:
        if verdict is False:
            return False
        found = found and verdict
    return found


def _any(verdicts: Iterable[Verdict]) -> Verdict:
    return _not(_all(map(_not, verdicts)))


def _not(verdict: Verdict) -> Verdict:
    return None if verdict is None else not verdict


def _is_multiple(value: float, of: float) -> Verdict:
    """None where exact and floating-point arithmetic differ."""
    exact = (Fraction(repr(value)) / Fraction(repr(of))).denominator == 1
    try:
        quotient = value / of
        return exact if exact == (quotient == int(quotient)) else None
    except OverflowError:
        return None


class ValueValidator:
    """Three-valued validation: valid, invalid, or depending on the validator."""

    def __init__(self, source: SchemaSource, strings: StringKeywords) -> None:
        self._source = source
        self._strings = strings
        self._depth = 0
        self._known: dict[int, frozenset[Hashable]] = {}

    def valid(self, schema: Schema, value: Any) -> Verdict:
        """Whether `value` satisfies `schema` and its references."""
        schema = self._source.checked(schema, self._source.where(schema))
        if isinstance(schema, bool):
            return schema
        self._depth += 1
        where = self._source.where(schema)
        if self._depth > _MAX_DEPTH:
            raise InputError(f"the JSON schema at {where} refers to itself without a value in between.")
        found = _all(self._verdicts(schema, value, where))
        self._depth -= 1
        return found

    def _verdicts(self, schema: dict[str, Any], value: Any, where: str) -> Iterator[Verdict]:
        kind = kind_of(value)
        yield kind in kinds_of(schema, where)
        if "const" in schema:
            yield json_equal(schema["const"], value)
        if "enum" in schema:
            yield frozen(value) in self._frozen(items(schema, "enum", where))
        if NOT_EQUAL in schema:
            yield frozen(value) not in self._frozen(schema[NOT_EQUAL])
        if "$ref" in schema:
            yield self.valid(self._source.target(schema, schema["$ref"]), value)
        yield from (self.valid(part, value) for part in items(schema, "allOf", where))
        if "anyOf" in schema:
            yield _any(self.valid(part, value) for part in items(schema, "anyOf", where))
        if "oneOf" in schema:
            verdicts = [self.valid(part, value) for part in items(schema, "oneOf", where)]
            certain = verdicts.count(True)
            yield False if certain > 1 else None if None in verdicts else certain == 1
        if "not" in schema:
            yield _not(self.valid(schema["not"], value))
        if "if" in schema:
            condition = self.valid(schema["if"], value)
            yield _any([_not(condition), self.valid(schema.get("then", True), value)])
            yield _any([condition, self.valid(schema.get("else", True), value)])
        if kind in ("integer", "fraction"):
            yield from self._of_number(schema, value, where)
        elif kind == "string":
            yield from self._of_string(schema, value, where)
        elif kind == "array":
            yield from self._of_array(schema, value, where)
        elif kind == "object":
            yield from self._of_object(schema, value, where)

    def _frozen(self, values: list[Any]) -> frozenset[Hashable]:
        if id(values) not in self._known:
            self._known[id(values)] = frozenset(map(frozen, values))
        return self._known[id(values)]

    def _of_number(self, schema: dict[str, Any], value: float, where: str) -> Iterator[Verdict]:
        yield bounds_of([schema], self._source).hold(value)
        if (divisor := divisor_of(schema, where)) is not None:
            yield _is_multiple(value, divisor)
        if (divisor := divisor_of(schema, where, NOT_MULTIPLE_OF)) is not None:
            yield _not(_is_multiple(value, divisor))

    def _of_string(self, schema: dict[str, Any], value: str, where: str) -> Iterator[Verdict]:
        yield (count(schema, "minLength", where) or 0) <= len(value)
        if (max_count := count(schema, "maxLength", where)) is not None:
            yield len(value) <= max_count
        if (pattern := text(schema, "pattern", where)) is not None:
            yield self._strings.matches(pattern, value, where)
        if (pattern := text(schema, NOT_PATTERN, where)) is not None:
            yield _not(self._strings.matches(pattern, value, where))
        if (name := text(schema, "format", where)) is not None:
            yield self._strings.has_format(name, value)

    def _of_array(self, schema: dict[str, Any], value: list[Any], where: str) -> Iterator[Verdict]:
        yield (count(schema, "minItems", where) or 0) <= len(value)
        if (max_count := count(schema, "maxItems", where)) is not None:
            yield len(value) <= max_count
        prefix = items(schema, "prefixItems", where)
        yield from (self.valid(part, item) for part, item in zip(prefix, value, strict=False))
        yield from (self.valid(schema.get("items", True), item) for item in value[len(prefix) :])
        if "unevaluatedItems" in schema:
            yield self._unevaluated(schema["unevaluatedItems"], value[len(prefix) :])
        if "contains" in schema:
            yield self._contained(schema, value, where)
        if schema.get("uniqueItems") is True:
            yield len(set(map(frozen, value))) == len(value)

    def _unevaluated(self, schema: Schema, others: list[Any]) -> Verdict:
        """`unevaluated...`: another schema may evaluate these, so an invalid one is undecided."""
        return True if all(self.valid(schema, item) is True for item in others) else None

    def _contained(self, schema: dict[str, Any], value: list[Any], where: str) -> Verdict:
        verdicts = [self.valid(schema["contains"], item) for item in value]
        certain, possible = verdicts.count(True), verdicts.count(True) + verdicts.count(None)
        min_count = count(schema, "minContains", where)
        min_count = 1 if min_count is None else min_count
        max_count = count(schema, "maxContains", where)
        if possible < min_count or (max_count is not None and certain > max_count):
            return False
        return True if certain >= min_count and (max_count is None or possible <= max_count) else None

    def _of_object(self, schema: dict[str, Any], value: dict[str, Any], where: str) -> Iterator[Verdict]:
        yield (count(schema, "minProperties", where) or 0) <= len(value)
        if (max_count := count(schema, "maxProperties", where)) is not None:
            yield len(value) <= max_count
        yield all(name in value for name in items(schema, "required", where, of=str))
        for name, others in names_by_name(schema, "dependentRequired", where).items():
            yield name not in value or all(other in value for other in others)
        for name, part in entries(schema, "dependentSchemas", where).items():
            yield name not in value or self.valid(part, value)
        properties = entries(schema, "properties", where)
        if "unevaluatedProperties" in schema:
            others = [item for key, item in value.items() if key not in properties]
            yield self._unevaluated(schema["unevaluatedProperties"], others)
        for key, item in value.items():
            if "propertyNames" in schema:
                yield self.valid(schema["propertyNames"], key)
            verdicts = [self.valid(properties[key], item)] if key in properties else []
            is_named: Verdict = key in properties
            for pattern, part in entries(schema, "patternProperties", where).items():
                matches = self._strings.matches(pattern, key, where, "patternProperties")
                is_named = _any([is_named, matches])
                verdicts.append(_any([_not(matches), self.valid(part, item)]))
            verdicts.append(_any([is_named, self.valid(schema.get("additionalProperties", True), item)]))
            yield from verdicts
