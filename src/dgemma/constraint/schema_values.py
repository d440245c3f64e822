"""Whether a given value is valid: how the values of `enum` and `const` are sorted out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

from dgemma.constraint.numerals import Bounds
from dgemma.constraint.schema_keywords import count, entries, items, kinds_of, number, refused, text
from dgemma.constraint.schema_source import Schema, SchemaSource
from dgemma.constraint.schema_strings import Strings
from dgemma.errors import InputError

Verdict = bool | None
"""None: readers of the schema may differ."""

_MAX_DEPTH = 100


def same(a: Any, b: Any) -> bool:
    """Equal as JSON: 1 is 1.0 and is not true."""
    if isinstance(a, bool) or isinstance(b, bool) or type(a) is not type(b):
        numbers = not isinstance(a, bool) and not isinstance(b, bool)
        is_number = isinstance(a, int | float) and isinstance(b, int | float)
        return a == b if numbers and is_number else a is b
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


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


def bounds_of(schemas: Iterable[dict[str, Any]], source: SchemaSource) -> Bounds:
    """The narrowest of the bounds that these schemas give a number."""
    low: tuple[int | float, bool] | None = None
    high: tuple[int | float, bool] | None = None
    for schema in schemas:
        where = source.where(schema)
        for keyword, excluded in (("minimum", False), ("exclusiveMinimum", True)):
            value = number(schema, keyword, where)
            if value is not None and (low is None or (value, excluded) > low):
                low = (value, excluded)
        for keyword, excluded in (("maximum", False), ("exclusiveMaximum", True)):
            value = number(schema, keyword, where)
            if value is not None and (high is None or (value, not excluded) < (high[0], not high[1])):
                high = (value, excluded)
    return Bounds(
        None if low is None else low[0],
        None if high is None else high[0],
        low is not None and low[1],
        high is not None and high[1],
    )


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


class Values:
    def __init__(self, source: SchemaSource, strings: Strings) -> None:
        self._source = source
        self._strings = strings
        self._depth = 0

    def valid(self, schema: Schema, value: Any) -> Verdict:
        """Whether `value` satisfies `schema`, with all it refers to."""
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
            yield same(schema["const"], value)
        if "enum" in schema:
            yield any(same(item, value) for item in items(schema, "enum", where))
        if "$ref" in schema:
            yield self.valid(self._source.target(schema, schema["$ref"]), value)
        yield from (self.valid(part, value) for part in items(schema, "allOf", where))
        if "anyOf" in schema:
            yield _any(self.valid(part, value) for part in items(schema, "anyOf", where))
        if "oneOf" in schema:
            verdicts = [self.valid(part, value) for part in items(schema, "oneOf", where)]
            certain = verdicts.count(True)
            yield False if certain > 1 else None if None in verdicts else certain == 1
        if kind in ("integer", "fraction"):
            yield from self._of_number(schema, value, where)
        elif kind == "string":
            yield from self._of_string(schema, value, where)
        elif kind == "array":
            yield from self._of_array(schema, value, where)
        elif kind == "object":
            yield from self._of_object(schema, value, where)

    def _of_number(self, schema: dict[str, Any], value: float, where: str) -> Iterator[Verdict]:
        yield bounds_of([schema], self._source).hold(value)
        if (divisor := divisor_of(schema, where)) is not None:
            exact = (Fraction(repr(value)) / Fraction(repr(divisor))).denominator == 1
            quotient = value / divisor
            yield exact if exact == (quotient == int(quotient)) else None

    def _of_string(self, schema: dict[str, Any], value: str, where: str) -> Iterator[Verdict]:
        yield (count(schema, "minLength", where) or 0) <= len(value)
        if (most := count(schema, "maxLength", where)) is not None:
            yield len(value) <= most
        if (pattern := text(schema, "pattern", where)) is not None:
            yield self._strings.matches(pattern, value, where)
        if (name := text(schema, "format", where)) is not None:
            yield self._strings.has_format(name, value)

    def _of_array(self, schema: dict[str, Any], value: list[Any], where: str) -> Iterator[Verdict]:
        yield (count(schema, "minItems", where) or 0) <= len(value)
        if (most := count(schema, "maxItems", where)) is not None:
            yield len(value) <= most
        prefix = items(schema, "prefixItems", where)
        yield from (self.valid(part, item) for part, item in zip(prefix, value, strict=False))
        yield from (self.valid(schema.get("items", True), item) for item in value[len(prefix) :])
        if schema.get("uniqueItems") is True:
            yield not any(same(value[i], value[j]) for i in range(len(value)) for j in range(i))

    def _of_object(self, schema: dict[str, Any], value: dict[str, Any], where: str) -> Iterator[Verdict]:
        yield (count(schema, "minProperties", where) or 0) <= len(value)
        if (most := count(schema, "maxProperties", where)) is not None:
            yield len(value) <= most
        yield all(name in value for name in items(schema, "required", where, of=str))
        properties = entries(schema, "properties", where)
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


def divisor_of(schema: dict[str, Any], where: str) -> int | float | None:
    divisor = number(schema, "multipleOf", where)
    if divisor is not None and divisor <= 0:
        raise refused(where, "multipleOf", f"is {divisor}; give a number above 0")
    return divisor
