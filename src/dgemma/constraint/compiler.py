"""From what an answer is asked to be to a machine on the words of a vocabulary: made once, kept, bounded."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Lock

from dgemma.constraint.automaton import DEFAULT_SECONDS, build
from dgemma.constraint.clock import Clock
from dgemma.constraint.constraint import Constraint
from dgemma.constraint.forms import Calls, Choice, Form, Json, Regex, Tool
from dgemma.constraint.json_schema import json_object_pattern, schema_pattern
from dgemma.constraint.json_text import CallStyle, JsonStyle
from dgemma.constraint.pattern import ANYTHING, Control, Either, Node, Repeat, literal, parse
from dgemma.constraint.pattern import Sequence as Series
from dgemma.constraint.token_automaton import TokenAutomaton, meet
from dgemma.constraint.word_trie import WordTrie
from dgemma.errors import InputError
from dgemma.text.tokenizer import Tokenizer
from dgemma.text.tool_call import NAME, QUOTE

# Of all machines that are kept; the one that was used longest ago goes first.
_MOST_KEPT_BYTES = 256 << 20

_Pattern = Callable[[Clock], Node]


class Compiler:
    """For one vocabulary. May be called from several threads: what is kept never waits for what is made."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = tuple(end_tokens)
        self._trie: WordTrie | None = None
        self._kept: OrderedDict[Hashable, TokenAutomaton] = OrderedDict()
        self._lock = Lock()  # of what is kept
        self._trie_lock = Lock()

    def known(self, form: Form, *, thinks: bool = False) -> Constraint | None:
        """What `compile` would give, if it was made before and is still kept."""
        automaton = self._find((form, thinks))
        return None if automaton is None else self._whole(form, automaton)

    def compile(self, form: Form, *, thinks: bool = False) -> Constraint:
        """An answer that is a text of `form`, with its end. thinks: a thought may come before it."""
        if not self._end_tokens:
            raise InputError("this model has no end token, so nothing could end a text that is whole.")
        loose = form.loose() if isinstance(form, Calls) else form
        tries = [form] if form == loose else [form, loose]
        patterns = [partial(self._answer, one, thinks) for one in tries]
        return self._whole(form, self._automaton((form, thinks), *patterns))

    def _whole(self, form: Form, automaton: TokenAutomaton) -> Constraint:
        whole = Constraint(automaton=automaton, end_tokens=self._end_tokens)
        if isinstance(form, Calls) and form.may_speak:  # all speech is of the form, also what is cut off
            return replace(whole, whole_after=(self._tokenizer.controls["<tool_call|>"],))
        return whole

    def gap(self, form: Form, before: str, behind: str, *, begin: int, end: int) -> Constraint:
        """Positions `begin` to `end` of an answer hold `before`, a text of `form`, and `behind`."""
        automaton = self._automaton(
            (form, before, behind),
            lambda clock: Series((literal(before), self._pattern(form, clock), literal(behind))),
        )
        return Constraint(automaton=automaton, begin=begin, end=end)

    def _automaton(self, key: Hashable, *patterns: _Pattern) -> TokenAutomaton:
        """Of the first pattern that can be compiled. They share the time there is."""
        if (found := self._find(key)) is not None:
            return found
        seconds = DEFAULT_SECONDS / len(patterns)
        for pattern in patterns[:-1]:
            with suppress(InputError):
                return self._keep(key, self._made(pattern, seconds))
        return self._keep(key, self._made(patterns[-1], seconds))

    def _made(self, pattern: _Pattern, seconds: float) -> TokenAutomaton:
        with self._trie_lock:
            if self._trie is None:
                self._trie = WordTrie.of_tokenizer(self._tokenizer, self._vocab_size)
        clock = Clock(seconds)
        return meet(build(pattern(clock), clock), self._trie, clock)

    def _keep(self, key: Hashable, made: TokenAutomaton) -> TokenAutomaton:
        with self._lock:  # another thread may have made the same: they are alike
            found = self._kept[key] = self._kept.pop(key, made)
            while len(self._kept) > 1 and sum(a.nbytes for a in self._kept.values()) > _MOST_KEPT_BYTES:
                self._kept.popitem(last=False)
            return found

    def _find(self, key: Hashable) -> TokenAutomaton | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _answer(self, form: Form, thinks: bool, clock: Clock) -> Node:
        ends = Repeat(Either(tuple(map(Control, self._end_tokens))), 0, None)
        parts = [self._pattern(form, clock), ends]
        opens, closes = (self._tokenizer.controls.get(name) for name in ("<|channel>", "<channel|>"))
        if thinks and opens is not None and closes is not None:
            parts.insert(0, Repeat(Series((Control(opens), ANYTHING, Control(closes))), 0, 1))
        return Series(tuple(parts))

    def _pattern(self, form: Form, clock: Clock) -> Node:
        if isinstance(form, Regex):
            return parse(form.pattern)
        if isinstance(form, Choice):
            return Either(tuple(map(literal, form.options)))
        if isinstance(form, Json):
            if form.schema is None:
                return json_object_pattern(JsonStyle())
            return schema_pattern(json.loads(form.schema), JsonStyle(), clock=clock)
        return self._calls(form, clock)

    def _calls(self, form: Calls, clock: Clock) -> Node:
        marks = ("<|tool_call>", "<tool_call|>", QUOTE)
        if missing := [mark for mark in marks if mark not in self._tokenizer.controls]:
            raise InputError(f"this model's vocabulary has no {missing[0]}: it does not know tool calls.")
        opens, closes, quote = (self._tokenizer.controls[mark] for mark in marks)

        style = CallStyle(quote)
        # Tools whose arguments are alike share them: the machine is made faster.
        names: dict[str | None, list[Node]] = {}
        for tool in form.tools:
            if not NAME.fullmatch(tool.name):
                raise InputError(f"tool {tool.name!r}: a name has no spaces, brackets or commas; rename it.")
            names.setdefault(tool.schema, []).append(literal(f"call:{tool.name}"))
        ways = [
            Series((Either(tuple(some)), self._arguments(form.tools, schema, style, clock)))
            for schema, some in names.items()
        ]
        call = Series((Control(opens), Either(tuple(ways)), Control(closes)))
        calls = Repeat(call, 0 if form.may_speak else 1, None if form.several else 1)
        if form.instead is not None:
            return Either((self._pattern(form.instead, clock), calls))
        return Series((ANYTHING, calls)) if form.may_speak else calls

    def _arguments(self, tools: Sequence[Tool], schema: str | None, style: CallStyle, clock: Clock) -> Node:
        if schema is None:
            return json_object_pattern(style)
        found = json.loads(schema)
        if isinstance(found, dict):  # arguments are an object, whatever else is said of them
            found = {**found, "type": "object"}
        try:
            return schema_pattern(found, style, clock=clock)
        except InputError as error:
            tool = next(tool for tool in tools if tool.schema == schema)
            raise InputError(f"tool {tool.name!r}: {error}") from None
