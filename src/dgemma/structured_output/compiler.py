"""The grammar compiler: a response format to a token DFA of one vocabulary, cached and bounded.

Response format -> regular expression tree -> NFA -> minimal DFA on bytes -> DFA on tokens.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

from dgemma.errors import InputError, error_field
from dgemma.structured_output.budget import DEFAULT_SECONDS, TimeBudget
from dgemma.structured_output.constraint import Constraint, ConstraintSource
from dgemma.structured_output.dfa import DFA, build_dfa
from dgemma.structured_output.json_schema.grammar import json_object_grammar, schema_grammar
from dgemma.structured_output.json_schema.keywords import SPAN_OF
from dgemma.structured_output.json_schema.spans import (
    SpanRequest,
    SpanTokens,
    SpliceError,
    number_span_grammar,
    span_grammar,
    splice,
    without_texts,
)
from dgemma.structured_output.json_schema.syntax import JsonSyntax, ToolCallSyntax
from dgemma.structured_output.regex import (
    ANY_TEXT,
    Alternation,
    Concat,
    Node,
    Repeat,
    SpecialToken,
    literal,
    parse,
)
from dgemma.structured_output.response_format import (
    ChoiceFormat,
    JsonFormat,
    RegexFormat,
    ResponseFormat,
    Tool,
    ToolCallFormat,
)
from dgemma.structured_output.token_dfa import TokenDFA, TokenTrie, build_token_dfa
from dgemma.text.tokenizer import Tokenizer
from dgemma.text.tool_call import NAME, QUOTE

# Of all cached token DFAs; the least recently used one is dropped first.
_MAX_CACHE_BYTES = 256 << 20
_MAX_SKELETONS = 64

# The option that a compile error is about. A tool's schema sets "tools" itself.
_FIELDS: dict[type, str] = {RegexFormat: "regex", ChoiceFormat: "choice", JsonFormat: "json_schema"}

_Grammar = Callable[[TimeBudget], DFA]


class GrammarCompiler:
    """Compiles for one vocabulary and keeps an LRU cache of token DFAs.

    Thread-safe: a cached DFA is returned without waiting for compilations in other threads.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._restore(None, tokenizer.controls, tuple(end_tokens))

    def __reduce__(self) -> Any:
        """A copy in another process has the vocabulary, and no tokenizer and no cache."""
        return _copied, (self._vocabulary(), dict(self._controls), self._end_tokens)

    def _restore(
        self, trie: TokenTrie | None, controls: Mapping[str, int], end_tokens: tuple[int, ...]
    ) -> None:
        self._trie = trie  # made at its first use
        self._trie_lock = Lock()
        self._controls = controls
        self._end_tokens = end_tokens
        self._cache: OrderedDict[Hashable, TokenDFA] = OrderedDict()
        # Of schemas with x-spanOf, without texts; and the tokens that stand for what is asked of these.
        self._skeletons: OrderedDict[Hashable, tuple[DFA, dict[SpanRequest, int]]] = OrderedDict()
        self._cache_lock = Lock()

    def cached(self, response_format: ResponseFormat, *, allow_thought: bool = False) -> Constraint | None:
        """What `compile` would return, if it is in the cache."""
        token_dfa = self._lookup((response_format, allow_thought))
        return None if token_dfa is None else self._constraint(response_format, token_dfa, allow_thought)

    def store(
        self, response_format: ResponseFormat, token_dfa: TokenDFA, *, allow_thought: bool = False
    ) -> Constraint:
        """What `compile` would return, if a copy of this compiler has compiled the token DFA."""
        stored = self._store((response_format, allow_thought), token_dfa)
        return self._constraint(response_format, stored, allow_thought)

    def compile(
        self,
        response_format: ResponseFormat,
        *,
        allow_thought: bool = False,
        on_check: Callable[[], None] = lambda: None,
    ) -> Constraint:
        """Constrain a whole answer: a text of the format, then end tokens.

        allow_thought: the model's thought (reasoning content) may come before it. on_check: see TimeBudget.
        """
        if not self._end_tokens:
            raise InputError("this model has no end token, so a constrained text could not end.")
        formats = [response_format]
        if isinstance(response_format, ToolCallFormat) and response_format.relaxed() != response_format:
            formats.append(response_format.relaxed())
        grammars = [partial(self._answer_dfa, one, allow_thought) for one in formats]
        with _error_field(response_format):
            token_dfa = self._token_dfa((response_format, allow_thought), *grammars, on_check=on_check)
        return self._constraint(response_format, token_dfa, allow_thought)

    def compile_infill(
        self, response_format: ResponseFormat, prefix: str, suffix: str, *, begin: int, end: int
    ) -> Constraint:
        """Constrain positions `begin` to `end` of an answer to `prefix`, a text of the format, `suffix`."""

        def grammar(budget: TimeBudget) -> DFA:
            inside = self._grammar(response_format, budget)
            return build_dfa(Concat((literal(prefix), inside, literal(suffix))), budget)

        with _error_field(response_format):
            token_dfa = self._token_dfa((response_format, prefix, suffix), grammar)
        source = ConstraintSource(response_format=response_format, around=(prefix, suffix))
        return Constraint(token_dfa=token_dfa, begin=begin, end=end, source=source)

    def compile_source(self, source: ConstraintSource, *, begin: int, end: int | None) -> Constraint:
        """The constraint that came from `source`."""
        if source.around is None or end is None:
            return self.compile(source.response_format, allow_thought=source.allow_thought)
        prefix, suffix = source.around
        return self.compile_infill(source.response_format, prefix, suffix, begin=begin, end=end)

    def _constraint(
        self, response_format: ResponseFormat, token_dfa: TokenDFA, allow_thought: bool
    ) -> Constraint:
        source = ConstraintSource(response_format=response_format, allow_thought=allow_thought)
        constraint = Constraint(token_dfa=token_dfa, end_tokens=self._end_tokens, source=source)
        if isinstance(response_format, ToolCallFormat) and response_format.allow_text:
            # Any text satisfies this format, also one that max_tokens truncated; only a call is complete.
            return replace(constraint, complete_after=(self._controls["<tool_call|>"],))
        return constraint

    def _token_dfa(
        self, key: Hashable, *grammars: _Grammar, on_check: Callable[[], None] = lambda: None
    ) -> TokenDFA:
        """Of the first grammar that compiles. The grammars share the time budget equally."""
        if (found := self._lookup(key)) is not None:
            return found
        seconds = DEFAULT_SECONDS / len(grammars)
        for grammar in grammars[:-1]:
            with suppress(InputError):
                return self._store(key, self._built(grammar, seconds, on_check))
        return self._store(key, self._built(grammars[-1], seconds, on_check))

    def _built(self, grammar: _Grammar, seconds: float, on_check: Callable[[], None]) -> TokenDFA:
        trie = self._vocabulary()
        budget = TimeBudget(seconds, on_check)
        return build_token_dfa(grammar(budget), trie, budget)

    def _vocabulary(self) -> TokenTrie:
        with self._trie_lock:
            if self._trie is None:
                self._trie = TokenTrie.of_tokenizer(self._tokenizer, self._vocab_size)
            return self._trie

    def _store(self, key: Hashable, built: TokenDFA) -> TokenDFA:
        with self._cache_lock:  # another thread may have built an equal one: keep the first
            found = self._cache[key] = self._cache.pop(key, built)
            while len(self._cache) > 1 and sum(dfa.nbytes for dfa in self._cache.values()) > _MAX_CACHE_BYTES:
                self._cache.popitem(last=False)
            return found

    def _lookup(self, key: Hashable) -> TokenDFA | None:
        with self._cache_lock:
            if key in self._cache:
                self._cache.move_to_end(key)
            return self._cache.get(key)

    def _answer_dfa(self, response_format: ResponseFormat, allow_thought: bool, budget: TimeBudget) -> DFA:
        if isinstance(response_format, JsonFormat) and SPAN_OF in (response_format.schema or ""):
            with suppress(SpliceError):
                return self._spliced(response_format, allow_thought, budget)
        return build_dfa(self._answer_grammar(response_format, allow_thought, budget), budget)

    def _spliced(self, json_format: JsonFormat, allow_thought: bool, budget: TimeBudget) -> DFA:
        """The schema's DFA, made once, with those of the texts in it."""
        assert json_format.schema is not None
        schema, texts = without_texts(json.loads(json_format.schema))
        key = (json.dumps(schema), allow_thought)
        with self._cache_lock:
            skeleton = self._skeletons.get(key)
        if skeleton is None:
            syntax = SpanTokens()
            grammar = self._framed(schema_grammar(schema, syntax, budget=budget), allow_thought)
            skeleton = build_dfa(grammar, budget), syntax.token_of
            with self._cache_lock:
                self._skeletons[key] = skeleton
                while len(self._skeletons) > _MAX_SKELETONS:
                    self._skeletons.popitem(last=False)
        dfa, token_of = skeleton
        spans = {}
        for (number, taken), token in token_of.items():
            if taken is None:
                span: Node | None = span_grammar(texts[number], JsonSyntax(), budget)
            else:
                span = number_span_grammar(texts[number], taken)
            if span is None:
                raise SpliceError
            spans[token] = build_dfa(span, budget)
        return splice(dfa, spans)

    def _answer_grammar(
        self, response_format: ResponseFormat, allow_thought: bool, budget: TimeBudget
    ) -> Node:
        return self._framed(self._grammar(response_format, budget), allow_thought)

    def _framed(self, text: Node, allow_thought: bool) -> Node:
        """A whole answer: a thought, if there may be one, the text, and end tokens."""
        ends = Repeat(Alternation(tuple(map(SpecialToken, self._end_tokens))), 0, None)
        parts = [text, ends]
        opens, closes = (self._controls.get(name) for name in ("<|channel>", "<channel|>"))
        if allow_thought and opens is not None and closes is not None:
            parts.insert(0, Repeat(Concat((SpecialToken(opens), ANY_TEXT, SpecialToken(closes))), 0, 1))
        return Concat(tuple(parts))

    def _grammar(self, response_format: ResponseFormat, budget: TimeBudget) -> Node:
        match response_format:
            case RegexFormat():
                return parse(response_format.pattern)
            case ChoiceFormat():
                return Alternation(tuple(map(literal, response_format.options)))
            case JsonFormat(schema=None):
                return json_object_grammar(JsonSyntax())
            case JsonFormat(schema=str(schema)):
                return schema_grammar(json.loads(schema), JsonSyntax(), budget=budget)
            case ToolCallFormat():
                return self._tool_call_grammar(response_format, budget)
        raise TypeError(f"{type(response_format).__name__} is not a response format")

    def _tool_call_grammar(self, calls: ToolCallFormat, budget: TimeBudget) -> Node:
        names = ("<|tool_call>", "<tool_call|>", QUOTE)
        if missing := [name for name in names if name not in self._controls]:
            raise InputError(
                f"this model's vocabulary has no {missing[0]}: it does not know tool calls.", field="tools"
            )
        opens, closes, quote = (self._controls[name] for name in names)

        syntax = ToolCallSyntax(quote)
        # Tools with equal argument schemas share one grammar, which keeps the DFA small.
        tools_of_schema: dict[str | None, list[Node]] = {}
        for tool in calls.tools:
            if not NAME.fullmatch(tool.name):
                raise InputError(
                    f"tool {tool.name!r}: a name has no spaces, brackets or commas; rename it.", field="tools"
                )
            tools_of_schema.setdefault(tool.schema, []).append(literal(f"call:{tool.name}"))
        alternatives = [
            Concat((Alternation(tuple(tools)), self._arguments_grammar(calls.tools, schema, syntax, budget)))
            for schema, tools in tools_of_schema.items()
        ]
        call = Concat((SpecialToken(opens), Alternation(tuple(alternatives)), SpecialToken(closes)))
        repeated = Repeat(call, 0 if calls.allow_text else 1, None if calls.parallel else 1)
        if calls.text_format is not None:
            return Alternation((self._grammar(calls.text_format, budget), repeated))
        return Concat((ANY_TEXT, repeated)) if calls.allow_text else repeated

    def _arguments_grammar(
        self, tools: Sequence[Tool], schema: str | None, syntax: ToolCallSyntax, budget: TimeBudget
    ) -> Node:
        if schema is None:
            return json_object_grammar(syntax)
        parsed = json.loads(schema)
        if isinstance(parsed, dict):  # arguments are an object, also where the schema names no type
            parsed = {**parsed, "type": "object"}
        try:
            return schema_grammar(parsed, syntax, budget=budget)
        except InputError as error:
            tool = next(tool for tool in tools if tool.schema == schema)
            raise InputError(f"tool {tool.name!r}: {error}", field="tools") from None


def _copied(trie: TokenTrie, controls: Mapping[str, int], end_tokens: tuple[int, ...]) -> GrammarCompiler:
    compiler = GrammarCompiler.__new__(GrammarCompiler)
    compiler._restore(trie, controls, end_tokens)
    return compiler


def _error_field(response_format: ResponseFormat) -> AbstractContextManager[None]:
    """Errors about the budget of time and states name the option of the response format."""
    field = _FIELDS.get(type(response_format))
    return nullcontext() if field is None else error_field(field)
