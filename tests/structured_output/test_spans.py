"""`x-spanOf`: exactly the runs of words of the text, and the numbers it says, however they are written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dgemma
from dgemma.errors import InputError
from dgemma.structured_output import compiler as compiler_module
from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.compiler import GrammarCompiler
from dgemma.structured_output.dfa import DFA, build_dfa
from dgemma.structured_output.json_schema.grammar import schema_grammar
from dgemma.structured_output.json_schema.spans import SpliceError, numbers_said, span_grammar
from dgemma.structured_output.json_schema.syntax import JsonSyntax, ToolCallSyntax
from dgemma.structured_output.response_format import JsonFormat
from dgemma.structured_output.token_dfa import TokenDFA, build_token_dfa
from dgemma.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_directory(Path(dgemma.__file__).parent / "data" / "models" / "forms")
TEXTS = st.text(alphabet='aAbs eE.-_"\\\nÄß1', max_size=12)


def compiled(schema: Any) -> DFA:
    return build_dfa(schema_grammar(schema, JsonSyntax()))


def runs(text: str) -> set[str]:
    """By enumeration, as the docs say it."""
    found = set()
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            before, after = text[:start], text[end:]
            begins = is_word(text[start]) and not (before and is_word(before[-1]))
            begins |= not text[start].isspace() and (not before or before[-1].isspace())
            whole = is_end(text, end) or any(
                after.startswith(plural)
                and len(re.split(r"[\W_]", text[:end])[-1]) >= 3
                and not is_word(after[len(plural) :][:1])
                for plural in ("s", "es")
            )
            if begins and whole:
                found |= {text[start:end], text[start].lower() + text[start + 1 : end]}
    return found


def is_word(char: str) -> bool:
    return bool(re.fullmatch(r"[^\W_]", char))


def is_end(text: str, end: int) -> bool:
    after_word = is_word(text[end - 1]) and not (text[end:] and is_word(text[end]))
    return after_word or (not text[end - 1].isspace() and (not text[end:] or text[end].isspace()))


@given(TEXTS)
@example("Buses stop. The bus!")
@example("")
def test_the_language_is_the_runs_of_words(text: str) -> None:
    expected = runs(text)
    node = span_grammar(text, JsonSyntax(), TimeBudget())
    if node is None:
        assert not expected
        return
    dfa = build_dfa(node)
    found: set[str] = set()
    pending = [(b"", 0)]
    symbols = {int(symbol): byte for byte, symbol in enumerate(dfa.symbol_of_byte) if symbol >= 0}
    while pending:
        data, state = pending.pop()
        if dfa.accepts[state]:
            found.add(json.loads(f'"{data.decode()}"'))
        for symbol, to in enumerate(dfa.transitions[state]):
            if to >= 0:
                pending.append((data + bytes([symbols[symbol]]), int(to)))
    assert found == expected


@given(st.text(alphabet="ab ", max_size=200))
def test_states_grow_with_the_length_of_the_text(text: str) -> None:
    node = span_grammar(text, ToolCallSyntax(9), TimeBudget())
    assert node is None or len(node.transitions) <= 2 * len(text) + 2


def test_in_a_schema_with_other_keywords() -> None:
    dfa = compiled({"type": ["string", "null"], "x-spanOf": "Send two Lamps to Ann.", "maxLength": 8})
    for text in ('"two Lamp"', '"Ann."', '"Ann"', '"send two"', "null"):
        assert dfa.matches(text), text
    for text in ('"two Lamps"', '"lamp"', '"wo"', '""', '"Lamps an"'):
        assert dfa.matches(text) == (text == '"lamp"'), text


NUMBERS = {
    "Send two lamps at €24.09": {1, 2, 24.09, 24, 9},
    "12 boxes, 1,234.50 in all": {1, 12, 1234.5, 234, 50},
    "1.234,5 or 1,234": {1, 1234.5, 1234, 1.234, 234, 5},
    "A dozen, twenty-five or -3.50 C": {1, 12, 25, 20, 5, -3.5, -3, 3, 50},
    "sensor A-5 on 2026-11-18, 0.0 V": {1, 5, 2026, 11, 18, 0},
    "nothing": {1},
    "12345678901234567 007": {1, 7},
}


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_of_a_text_in_digits_and_words(text: str) -> None:
    assert set(numbers_said(text).values()) == NUMBERS[text]
    for written, value in numbers_said(text).items():
        assert json.loads(written) == value


@given(st.text(alphabet="0123456789.,- ax", max_size=20))
def test_every_number_said_is_json(text: str) -> None:
    for written, value in numbers_said(text).items():
        assert json.loads(written) == value
        assert compiled({"type": "number", "x-spanOf": text}).matches(written)


def test_numbers_in_a_schema_with_other_keywords() -> None:
    dfa = compiled({"type": ["integer", "string"], "x-spanOf": "20 or thirty lamps", "minimum": 25})
    for text in ("30", '"20"', '"lamp"'):
        assert dfa.matches(text), text
    for text in ("20", "1", "25", '"30"', "30.0"):
        assert not dfa.matches(text), text
    assert compiled({"type": "integer", "x-spanOf": "4 or six", "multipleOf": 3}).matches("6")
    assert not compiled({"type": "integer", "x-spanOf": "4 or six", "multipleOf": 3}).matches("3")
    with pytest.raises(InputError, match="nothing that can be written"):
        compiled({"type": "integer", "x-spanOf": "4 or 6", "minimum": 7})


def test_a_text_without_words_leaves_no_string() -> None:
    assert compiled({"type": ["string", "null"], "x-spanOf": " "}).matches("null")
    with pytest.raises(InputError, match="nothing that can be written"):
        compiled({"type": "string", "x-spanOf": " "})


def test_a_source_that_is_no_text_is_refused() -> None:
    with pytest.raises(InputError, match="'x-spanOf' at #/items is '3'; give a string"):
        compiled({"type": "array", "items": {"type": "string", "x-spanOf": 3}})


def token_dfa(schema: Any, *, splices: bool) -> TokenDFA:
    compiler = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, (1, 106))
    if splices:
        found = compiler._spliced(JsonFormat(json.dumps(schema)), False, TimeBudget())
    else:
        found = build_dfa(
            compiler._answer_grammar(JsonFormat(json.dumps(schema)), False, TimeBudget()), TimeBudget()
        )
    return build_token_dfa(found, compiler._vocabulary(), TimeBudget())


def assert_same_language(a: TokenDFA, b: TokenDFA) -> None:
    """No state of either is dead, so two states that are reached together must be alike."""
    classes = np.unique(np.stack([a.class_of_token, b.class_of_token]), axis=1).T.tolist()
    pairs, seen = [(0, 0)], {(0, 0)}
    for at_a, at_b in pairs:
        assert a.accepts[at_a] == b.accepts[at_b]
        for class_a, class_b in classes:
            to = int(a.transitions[class_a, at_a]), int(b.transitions[class_b, at_b])
            assert (to[0] < 0) == (to[1] < 0)
            if to[0] >= 0 and to not in seen:
                seen.add(to)
                pairs.append(to)


def order(text: str, other: str) -> Any:
    span = {"type": "string", "x-spanOf": text}
    return {
        "type": "object",
        "properties": {
            "who": {"anyOf": [span, {"type": "null"}]},
            "items": {"type": "array", "items": span, "maxItems": 3},
            "note": {"type": "string", "x-spanOf": other},
            "count": {"type": "integer", "x-spanOf": text},
            "price": {"type": ["number", "null"], "x-spanOf": text, "minimum": 0},
            "size": {"type": "integer"},
        },
        "required": ["who", "items", "note"],
        "additionalProperties": False,
    }


@given(TEXTS.filter(runs), TEXTS.filter(runs))
@settings(max_examples=25, deadline=None)
@example("Send two Lamps to Ann.", 'Say "no" to it.')
def test_texts_spliced_into_a_schema_are_the_same_language(text: str, other: str) -> None:
    schema = order(text, other)
    assert_same_language(token_dfa(schema, splices=True), token_dfa(schema, splices=False))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "x-spanOf": "two lamps", "maxLength": 4},
        {"anyOf": [{"type": "string", "x-spanOf": "two lamps"}, {"enum": ["lamps", "other"]}]},
        {"allOf": [{"type": "string", "x-spanOf": "two lamps"}, {"pattern": "^l"}]},
        {"type": ["string", "null"], "x-spanOf": " "},
        {"type": "integer", "x-spanOf": "two or 4 lamps", "multipleOf": 2},
        {"type": "integer", "x-spanOf": "two or 4 lamps", "not": {"const": 1}},
        {"allOf": [{"type": "integer", "x-spanOf": "2 or 4"}, {"x-spanOf": "4 or 6"}]},
        {"type": ["integer", "null"], "x-spanOf": "two lamps", "minimum": 5},
        {"const": {"x-spanOf": "two lamps"}},
        {"enum": [["a"], [{"x-spanOf": "two lamps"}]]},
        {"type": "object", "properties": {"const": {"type": "string", "x-spanOf": "two lamps"}}},
    ],
)
def test_what_cannot_be_spliced_is_compiled_as_a_whole(schema: Any) -> None:
    with pytest.raises(SpliceError):
        token_dfa(schema, splices=True)
    compiler = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, (1, 106))
    found = compiler.compile(JsonFormat(json.dumps(schema))).token_dfa
    assert_same_language(found, token_dfa(schema, splices=False))


@pytest.mark.parametrize("depth", [160, 490])
def test_a_deep_schema_with_a_text_is_refused(depth: int) -> None:
    schema: Any = {"type": "string", "x-spanOf": "two lamps"}
    for _ in range(depth):
        schema = [schema]
    compiler = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, (1, 106))
    with pytest.raises(InputError, match="nested deeper than 150 levels"):
        compiler.compile(JsonFormat(json.dumps({"enum": schema})))


def test_a_schema_is_compiled_once_for_all_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, (1, 106))
    count = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return schema_grammar(*args, **options)

    monkeypatch.setattr(compiler_module, "schema_grammar", counted)
    for text in ("two lamps", "three chairs", "no table at all"):
        compiler.compile(JsonFormat(json.dumps(order(text, text))))
    assert count == 1


def test_a_long_text_does_not_shorten_lists() -> None:
    words = " ".join(f"word{number}" for number in range(150))
    item = {"type": "string", "x-spanOf": words}
    dfa = compiled({"type": "array", "items": item, "maxItems": 5})
    assert dfa.matches(json.dumps(["word1 word2"] * 5, separators=(",", ":")))
    assert not dfa.matches(json.dumps(["word1 word3"], separators=(",", ":")))
