"""The strings that a branch of a schema admits, and whether a given string is one of them."""

from __future__ import annotations

from typing import Literal

from dgemma.constraint.automaton import Automaton, build
from dgemma.constraint.clock import Clock
from dgemma.constraint.json_text import FREE_CHARACTER, FREE_CONTENT, Style
from dgemma.constraint.pattern import ANY_CHARACTER, Either, Node, Repeat, literal, parse_search
from dgemma.constraint.product import both, minus
from dgemma.constraint.schema_keywords import NOT_FOUND, UNLIKE, least_and_most, refused, text
from dgemma.constraint.schema_source import Branch, SchemaSource
from dgemma.constraint.string_formats import FORMATS, WITHOUT_MEANING, format_pattern
from dgemma.errors import InputError, suggestion

LONGEST = 2000  # characters of a string; a larger `maxLength` allows strings that are not written


class Strings:
    """Contents of strings, spelled in a style."""

    def __init__(self, source: SchemaSource, style: Style, clock: Clock) -> None:
        self._source = source
        self._style = style
        self._clock = clock
        self._machines: dict[tuple[str, str], Automaton] = {}

    def content(self, branch: Branch) -> Node | None:
        """What stands between the quotes; None when no string is valid."""
        least, most = least_and_most(branch, "Length", self._source.where)
        languages: list[Node] = []
        excluded: list[Node] = []
        for schema in branch:
            where = self._source.where(schema)
            if (pattern := text(schema, "pattern", where)) is not None:
                languages.append(self.searched(pattern, "surely", where, "pattern"))
            if (name := text(schema, "format", where)) is not None and name not in WITHOUT_MEANING:
                if name not in FORMATS:
                    near = suggestion(name, FORMATS, otherwise=f"; known are {', '.join(sorted(FORMATS))}.")
                    raise InputError(f"the JSON schema's 'format' at {where} is {name[:40]!r}{near}")
                languages.append(format_pattern(name))
            if (pattern := text(schema, NOT_FOUND, where)) is not None:
                excluded.append(self.searched(pattern, "possibly", where, "pattern"))
            excluded += [literal(value) for value in schema.get(UNLIKE, []) if isinstance(value, str)]
        if most is not None and most < least:
            return None
        if least or most is not None or not languages:
            character = ANY_CHARACTER if languages else FREE_CHARACTER
            shortened = None if most is None else min(most, max(LONGEST, least))
            languages.append(Repeat(character, least, shortened))
        spelled = [self._style.spelled(language) for language in languages]
        found: Node | None = spelled[0]
        for other in spelled[1:]:
            found = both(found, other, self._clock) if found is not None else None
        if excluded and found is not None:
            found = minus(found, self._style.spelled(Either(tuple(excluded))), self._clock)
        return found

    def matches(self, pattern: str, value: str, where: str, keyword: str = "pattern") -> bool | None:
        """Whether a pattern is found in a string; None where readings of patterns differ."""
        if self._machine(pattern, "surely", where, keyword).matches(value):
            return True
        return None if self._machine(pattern, "possibly", where, keyword).matches(value) else False

    def has_format(self, name: str, value: str) -> bool | None:
        if name in WITHOUT_MEANING:
            return True
        if name not in FORMATS:
            return None
        if (name, "format") not in self._machines:
            self._machines[name, "format"] = build(format_pattern(name), self._clock)
        return self._machines[name, "format"].matches(value) or None

    def _machine(
        self, pattern: str, reading: Literal["surely", "possibly"], where: str, keyword: str
    ) -> Automaton:
        if (pattern, reading) not in self._machines:
            self._machines[pattern, reading] = build(
                self.searched(pattern, reading, where, keyword), self._clock
            )
        return self._machines[pattern, reading]

    def searched(
        self, pattern: str, reading: Literal["surely", "possibly"], where: str, keyword: str
    ) -> Node:
        around = FREE_CONTENT if reading == "surely" else Repeat(ANY_CHARACTER, 0, None)
        try:
            return parse_search(pattern, reading, around)
        except InputError as error:
            raise refused(where, keyword, f"is not taken: {str(error).rstrip('.')}") from None
