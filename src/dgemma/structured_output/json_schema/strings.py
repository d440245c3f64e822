"""Strings: `pattern`, `format`, `x-spanOf` and lengths of a branch as a grammar of contents.

Each `format` is a pattern that all validators accept: a subset of what the format allows.
"""

from __future__ import annotations

from functools import cache

from dgemma.errors import InputError, suggestion
from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.dfa import DFA, build_dfa, difference, intersection
from dgemma.structured_output.json_schema.keywords import (
    NOT_EQUAL,
    NOT_PATTERN,
    SPAN_OF,
    min_and_max_count,
    refused,
    text,
)
from dgemma.structured_output.json_schema.source import Branch, SchemaSource
from dgemma.structured_output.json_schema.spans import SpanTokens, SpliceError, span_grammar
from dgemma.structured_output.json_schema.syntax import FREE_CHARACTER, FREE_CONTENT, ValueSyntax
from dgemma.structured_output.regex import (
    ANY_CHARACTER,
    Alternation,
    DFANode,
    MatchMode,
    Node,
    Repeat,
    literal,
    parse,
    parse_search,
)

MAX_STRING_CHARS = 2000  # of a string with `maxLength`; longer strings are valid but not generated

_YEAR = "[12][0-9]{3}"
_LEAP_YEAR = "([12][0-9](0[48]|[2468][048]|[13579][26])|(12|16|20|24|28)00)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOUR_MINUTE})"
_N = "[0-9]{1,4}"
_DAYS = f"({_N}Y({_N}M({_N}D)?)?|{_N}M({_N}D)?|{_N}D)"
_HOURS = f"T({_N}H({_N}M({_N}S)?)?|{_N}M({_N}S)?|{_N}S)"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_GROUP = "(0|[1-9a-f][0-9a-f]{0,3})"
_IPV6 = "|".join(
    [f"{_GROUP}(:{_GROUP}){{7}}"]
    + [
        (f"{_GROUP}(:{_GROUP}){{{left - 1}}}" if left else "")
        + "::"
        + f"({_GROUP}(:{_GROUP}){{0,{6 - left}}})?"
        for left in range(7)
    ]
)
_LABEL = "[a-z0-9]{1,15}(-[a-z0-9]{1,15}){0,2}"
_LAST_LABEL = "[a-z]{2,15}"
_HOST = rf"({_LABEL}\.){{0,3}}{_LAST_LABEL}"
_NAME = "[A-Za-z0-9_+-]{1,20}"
_PATH = "(/([A-Za-z0-9._~-]|%[0-9A-F]{2})*)*"
_QUERY = r"(\?([A-Za-z0-9._~=&+-]|%[0-9A-F]{2})*)?(#[A-Za-z0-9._~-]*)?"
_URI = rf"(https?|ftp)://{_HOST}(:[1-9][0-9]{{0,3}})?{_PATH}{_QUERY}"
_POINTER = "(/([A-Za-z0-9_ .-]|~[01])*)*"
_VARIABLE = r"\{[+#./;?&]?[a-z][a-z0-9_]{0,15}(,[a-z][a-z0-9_]{0,15}){0,3}\}"
_PATTERNS = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_DAYS}({_HOURS})?|{_HOURS}|{_N}W)",
    "email": rf"{_NAME}(\.{_NAME}){{0,2}}@({_LABEL}\.){{1,3}}{_LAST_LABEL}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"([0-9]|[1-9]{{2}})(#|{_POINTER})",
    "time": _TIME,
    "uri": _URI,
    "uri-reference": rf"{_URI}|{_PATH}{_QUERY}",
    "uri-template": rf"(https?://{_HOST})?(/([A-Za-z0-9._~-]|{_VARIABLE})*)*",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
_ALIASES = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri", "iri-reference": "uri-reference"}
FORMATS = frozenset(_PATTERNS) | frozenset(_ALIASES)
# Formats of OpenAPI that do not constrain strings.
IGNORED_FORMATS = frozenset({"binary", "double", "float", "int32", "int64", "password"})


@cache
def format_grammar(name: str) -> Node:
    return parse(_PATTERNS[_ALIASES.get(name, name)])


class StringKeywords:
    """Reads the string keywords of a branch; contents are escaped as the syntax writes them."""

    def __init__(self, source: SchemaSource, syntax: ValueSyntax, budget: TimeBudget) -> None:
        self._source = source
        self._syntax = syntax
        self._budget = budget
        self._dfas: dict[tuple[str, str], DFA] = {}
        self._spans: dict[str, DFANode | None] = {}

    def content(self, branch: Branch) -> Node | None:
        """The text between the quotes; None if no string is valid."""
        min_count, max_count = min_and_max_count(branch, "Length", self._source.where)
        languages: list[Node] = []
        excluded: list[Node] = []
        spans: list[Node] = []  # escaped already
        for schema in branch:
            where = self._source.where(schema)
            if (source := text(schema, SPAN_OF, where)) is not None:
                if (span := self._span(source)) is None:
                    return None
                spans.append(span)
            if (pattern := text(schema, "pattern", where)) is not None:
                languages.append(self.searched(pattern, "certain", where, "pattern"))
            if (name := text(schema, "format", where)) is not None and name not in IGNORED_FORMATS:
                if name not in FORMATS:
                    near = suggestion(name, FORMATS, otherwise=f"; known are {', '.join(sorted(FORMATS))}.")
                    raise InputError(f"the JSON schema's 'format' at {where} is {name[:40]!r}{near}")
                languages.append(format_grammar(name))
            if (pattern := text(schema, NOT_PATTERN, where)) is not None:
                excluded.append(self.searched(pattern, "possible", where, "pattern"))
            excluded += [literal(value) for value in schema.get(NOT_EQUAL, []) if isinstance(value, str)]
        if max_count is not None and max_count < min_count:
            return None
        if isinstance(self._syntax, SpanTokens) and spans:
            if languages or excluded or len(spans) > 1 or min_count or max_count is not None:
                raise SpliceError
            return spans[0]
        if min_count or max_count is not None or not (languages or spans):
            character = ANY_CHARACTER if languages else FREE_CHARACTER
            shortened = None if max_count is None else min(max_count, max(MAX_STRING_CHARS, min_count))
            languages.append(Repeat(character, min_count, shortened))
        escaped = [*spans, *map(self._syntax.escaped, languages)]
        found: Node | None = escaped[0]
        for other in escaped[1:]:
            found = intersection(found, other, self._budget) if found is not None else None
        if excluded and found is not None:
            found = difference(found, self._syntax.escaped(Alternation(tuple(excluded))), self._budget)
        return found

    def _span(self, source: str) -> Node | None:
        if isinstance(self._syntax, SpanTokens):
            return self._syntax.span(source)
        if source not in self._spans:
            self._spans[source] = span_grammar(source, self._syntax, self._budget)
        return self._spans[source]

    def matches(self, pattern: str, value: str, where: str, keyword: str = "pattern") -> bool | None:
        """Whether a string matches a pattern; None where dialects of regular expressions differ."""
        if self._pattern_dfa(pattern, "certain", where, keyword).matches(value):
            return True
        return None if self._pattern_dfa(pattern, "possible", where, keyword).matches(value) else False

    def has_format(self, name: str, value: str) -> bool | None:
        if name in IGNORED_FORMATS:
            return True
        if name not in FORMATS:
            return None
        if (name, "format") not in self._dfas:
            self._dfas[name, "format"] = build_dfa(format_grammar(name), self._budget)
        return self._dfas[name, "format"].matches(value) or None

    def _pattern_dfa(self, pattern: str, mode: MatchMode, where: str, keyword: str) -> DFA:
        if (pattern, mode) not in self._dfas:
            self._dfas[pattern, mode] = build_dfa(self.searched(pattern, mode, where, keyword), self._budget)
        return self._dfas[pattern, mode]

    def searched(self, pattern: str, mode: MatchMode, where: str, keyword: str) -> Node:
        around = FREE_CONTENT if mode == "certain" else Repeat(ANY_CHARACTER, 0, None)
        try:
            return parse_search(pattern, mode, around)
        except InputError as error:
            raise refused(where, keyword, f"is not taken: {str(error).rstrip('.')}") from None
