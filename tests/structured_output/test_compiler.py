"""Response formats compile to token DFAs of the right texts, once, with thoughts, tool calls and infill."""

from __future__ import annotations

import json
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

import dgemma.structured_output.compiler as compiler_module
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.errors import InputError
from dgemma.structured_output.compiler import GrammarCompiler
from dgemma.structured_output.constraint import Constraint
from dgemma.structured_output.response_format import (
    ChoiceFormat,
    JsonFormat,
    RegexFormat,
    ResponseFormat,
    Tool,
    ToolCallFormat,
)
from dgemma.structured_output.token_dfa import TokenTrie
from dgemma.text.tokenizer import Tokenizer

END, TURN_END = 1, 106
VOCAB = PRESETS["tiny"].config.vocab_size


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_random(path, PRESETS["tiny"].config, dtype="F32", seed=1)
    return Tokenizer.from_directory(Path(path))


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB, (END, TURN_END))


def takes(constraint: Constraint, tokens: list[int]) -> bool:
    state = constraint.token_dfa.run(tokens)
    return state >= 0 and bool(constraint.token_dfa.accepts[state])


@pytest.mark.parametrize(
    ("response_format", "good", "bad"),
    [
        (RegexFormat(r"\d+"), ["7", "2026"], ["", "a", "1a"]),
        (ChoiceFormat(("yes", "no")), ["yes", "no"], ["", "y", "yesno"]),
        (JsonFormat(), ['{"a": [1, true]}', "{}"], ["[]", "{", ""]),
        (JsonFormat('{"type": "integer"}'), ["3", "-12"], ["3.5", '"3"']),
    ],
)
def test_a_format_accepts_its_texts_and_end_tokens_after_them(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    response_format: ResponseFormat,
    good: list[str],
    bad: list[str],
) -> None:
    constraint = compiler.compile(response_format)
    for text in good:
        ids = list(tokenizer.encode(text))
        assert takes(constraint, ids)
        assert takes(constraint, [*ids, TURN_END, END, END])
    for text in bad:
        assert not takes(constraint, list(tokenizer.encode(text)))


def test_a_thought_comes_before_the_answer(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    opens, closes = tokenizer.controls["<|channel>"], tokenizer.controls["<channel|>"]
    thought = [opens, *tokenizer.encode("thought\nIs it? 7 or {"), closes]
    thinks, plain = (
        compiler.compile(RegexFormat("yes"), allow_thought=True),
        compiler.compile(RegexFormat("yes")),
    )
    answer = list(tokenizer.encode("yes"))
    assert takes(thinks, [*thought, *answer, END])
    assert takes(thinks, answer)
    assert not takes(plain, [*thought, *answer])
    assert not takes(thinks, [*thought, *thought, *answer])


def test_calls_are_written_as_the_model_writes_them(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    quote, opens, closes = (tokenizer.controls[name] for name in ('<|"|>', "<|tool_call>", "<tool_call|>"))
    schema = '{"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}'
    tools = (Tool("weather", schema), Tool("clock"))

    def call(name: str, *parts: str | int) -> list[int]:
        ids = [id_ for part in parts for id_ in ([part] if isinstance(part, int) else tokenizer.encode(part))]
        return [opens, *tokenizer.encode(f"call:{name}"), *ids, closes]

    weather = call("weather", "{city:", quote, "Ulm", quote, ",days:3}")
    required, either = (
        compiler.compile(ToolCallFormat(tools)),
        compiler.compile(ToolCallFormat(tools, allow_text=True)),
    )
    assert takes(required, weather)
    assert takes(required, [*weather, *call("clock", "{zone:", quote, "UTC", quote, "}"), END])
    assert not takes(required, call("weather", "{days:3}"))
    assert not takes(required, call("sun", "{}"))
    assert not takes(required, list(tokenizer.encode("No.")))
    assert takes(either, list(tokenizer.encode("No.")))
    assert takes(either, [*tokenizer.encode("Well: "), *weather])
    assert not takes(compiler.compile(ToolCallFormat(tools, parallel=False)), [*weather, *weather])
    assert closes in required.complete_after
    assert opens in required.complete_after  # a text of it is never cut off
    assert closes in either.complete_after
    assert opens not in either.complete_after


def test_only_strict_tools_must_compile(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    quote, opens, closes = (tokenizer.controls[name] for name in ('<|"|>', "<|tool_call>", "<tool_call|>"))
    call = [opens, *tokenizer.encode("call:clock{zone:"), quote, *tokenizer.encode("UTC"), quote]
    call += [*tokenizer.encode("}"), closes]
    kept = '{"properties": {"zone": {"type": "integer"}}}'
    assert not takes(compiler.compile(ToolCallFormat((Tool("clock", kept),))), call)
    odd = '{"$ref": "elsewhere"}'
    assert takes(compiler.compile(ToolCallFormat((Tool("clock", odd),))), call)
    with pytest.raises(InputError, match=r"tool 'clock'.*elsewhere"):
        compiler.compile(ToolCallFormat((Tool("clock", odd, strict=True),)))


def test_infill_has_its_prefix_and_suffix(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    gap = compiler.compile_infill(RegexFormat("[0-9]+"), "ra", "ge", begin=0, end=5)
    assert takes(gap, list(tokenizer.encode("ra12ge")))
    assert not takes(gap, list(tokenizer.encode("12")))
    assert not takes(gap, [*tokenizer.encode("ra12ge"), END])


def test_a_token_dfa_is_built_once_and_cached(compiler: GrammarCompiler) -> None:
    found: list[Constraint] = []
    threads = [Thread(target=lambda: found.append(compiler.compile(JsonFormat()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(one.token_dfa) for one in found}) == 1


def test_the_least_recently_used_token_dfa_is_dropped_first(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiler.compile(RegexFormat("a")).token_dfa
    monkeypatch.setattr(compiler_module, "_MAX_CACHE_BYTES", first.nbytes * 5 // 2)
    second = compiler.compile(RegexFormat("b")).token_dfa
    assert compiler.compile(RegexFormat("a")).token_dfa is first
    compiler.compile(RegexFormat("c"))
    assert compiler.compile(RegexFormat("a")).token_dfa is first
    assert compiler.compile(RegexFormat("b")).token_dfa is not second


def test_a_vocabulary_without_the_needed_tokens_is_refused(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    with pytest.raises(InputError, match="no end token"):
        GrammarCompiler(tokenizer, VOCAB, ()).compile(RegexFormat("a"))
    mute = GrammarCompiler(_Mute(), VOCAB, (END,))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="does not know tool calls"):
        mute.compile(ToolCallFormat((Tool("clock"),)))


class _Mute:
    """A vocabulary without controls."""

    controls: ClassVar[dict[str, int]] = {}

    def bytes_of(self, id_: int) -> bytes | None:
        return None


def test_threads_that_compile_at_once_build_one_trie(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, built = compiler_module.TokenTrie.of_tokenizer, 0

    def slow(tokenizer: Tokenizer, vocab_size: int) -> TokenTrie:
        nonlocal built
        built += 1
        time.sleep(0.05)  # the other threads come meanwhile
        return whole(tokenizer, vocab_size)

    monkeypatch.setattr(compiler_module.TokenTrie, "of_tokenizer", slow)
    threads = [Thread(target=compiler.compile, args=(RegexFormat(f"a{n}"),)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == 1


def test_what_hostile_formats_leave_in_memory_is_bounded(compiler: GrammarCompiler) -> None:
    """Caches of parts of grammars are shared by all formats: a class of many ranges takes up to 190 kB."""
    tracemalloc.start()
    try:
        sizes = []
        for number in range(400):
            chars = "".join(chr(0x3400 + 2 * at) for at in range(number, number + 100))
            with suppress(InputError):
                compiler.compile(JsonFormat(json.dumps({"type": "string", "pattern": f"^[{chars}]$"})))
            compiler._cache.clear()
            if number >= 270:
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert max(sizes[-40:]) < 1.05 * max(sizes[:40])
