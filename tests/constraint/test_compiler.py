"""Forms become machines on words: the right texts, made once, with thoughts, calls and gaps."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

import dgemma.constraint.compiler as compiler_module
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.constraint.compiler import Compiler
from dgemma.constraint.constraint import Constraint
from dgemma.constraint.forms import Calls, Choice, Form, Json, Regex, Tool
from dgemma.errors import InputError
from dgemma.text.tokenizer import Tokenizer

END, TURN_END = 1, 106
VOCAB = PRESETS["tiny"].config.vocab_size


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_random(path, PRESETS["tiny"].config, dtype="F32", seed=1)
    return Tokenizer.from_directory(Path(path))


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer, VOCAB, (END, TURN_END))


def takes(constraint: Constraint, tokens: list[int]) -> bool:
    state = constraint.automaton.run(tokens)
    return state >= 0 and bool(constraint.automaton.accepts[state])


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (Regex(r"\d+"), ["7", "2026"], ["", "a", "1a"]),
        (Choice(("yes", "no")), ["yes", "no"], ["", "y", "yesno"]),
        (Json(), ['{"a": [1, true]}', "{}"], ["[]", "{", ""]),
        (Json('{"type": "integer"}'), ["3", "-12"], ["3.5", '"3"']),
    ],
)
def test_a_form_takes_its_texts_and_ends_behind_them(
    compiler: Compiler, tokenizer: Tokenizer, form: Form, good: list[str], bad: list[str]
) -> None:
    constraint = compiler.compile(form)
    for text in good:
        ids = list(tokenizer.encode(text))
        assert takes(constraint, ids)
        assert takes(constraint, [*ids, TURN_END, END, END])
    for text in bad:
        assert not takes(constraint, list(tokenizer.encode(text)))


def test_a_thought_comes_before_the_answer(compiler: Compiler, tokenizer: Tokenizer) -> None:
    opens, closes = tokenizer.controls["<|channel>"], tokenizer.controls["<channel|>"]
    thought = [opens, *tokenizer.encode("thought\nIs it? 7 or {"), closes]
    thinks, plain = compiler.compile(Regex("yes"), thinks=True), compiler.compile(Regex("yes"))
    answer = list(tokenizer.encode("yes"))
    assert takes(thinks, [*thought, *answer, END])
    assert takes(thinks, answer)
    assert not takes(plain, [*thought, *answer])
    assert not takes(thinks, [*thought, *thought, *answer])


def test_calls_are_written_as_the_model_writes_them(compiler: Compiler, tokenizer: Tokenizer) -> None:
    quote, opens, closes = (tokenizer.controls[name] for name in ('<|"|>', "<|tool_call>", "<tool_call|>"))
    schema = '{"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}'
    tools = (Tool("weather", schema), Tool("clock"))

    def call(name: str, *parts: str | int) -> list[int]:
        ids = [id_ for part in parts for id_ in ([part] if isinstance(part, int) else tokenizer.encode(part))]
        return [opens, *tokenizer.encode(f"call:{name}"), *ids, closes]

    weather = call("weather", "{city:", quote, "Ulm", quote, ",days:3}")
    required, either = compiler.compile(Calls(tools)), compiler.compile(Calls(tools, may_speak=True))
    assert takes(required, weather)
    assert takes(required, [*weather, *call("clock", "{zone:", quote, "UTC", quote, "}"), END])
    assert not takes(required, call("weather", "{days:3}"))
    assert not takes(required, call("sun", "{}"))
    assert not takes(required, list(tokenizer.encode("No.")))
    assert takes(either, list(tokenizer.encode("No.")))
    assert takes(either, [*tokenizer.encode("Well: "), *weather])
    assert not takes(compiler.compile(Calls(tools, several=False)), [*weather, *weather])
    assert closes in required.whole_after
    assert opens in required.whole_after  # a text of it is never cut off
    assert closes in either.whole_after
    assert opens not in either.whole_after


def test_only_strict_tools_are_promises(compiler: Compiler, tokenizer: Tokenizer) -> None:
    quote, opens, closes = (tokenizer.controls[name] for name in ('<|"|>', "<|tool_call>", "<tool_call|>"))
    call = [opens, *tokenizer.encode("call:clock{zone:"), quote, *tokenizer.encode("UTC"), quote]
    call += [*tokenizer.encode("}"), closes]
    kept = '{"properties": {"zone": {"type": "integer"}}}'
    assert not takes(compiler.compile(Calls((Tool("clock", kept),))), call)
    odd = '{"$ref": "elsewhere"}'
    assert takes(compiler.compile(Calls((Tool("clock", odd),))), call)
    with pytest.raises(InputError, match=r"tool 'clock'.*elsewhere"):
        compiler.compile(Calls((Tool("clock", odd, strict=True),)))


def test_a_gap_holds_what_was_taken_back_at_its_borders(compiler: Compiler, tokenizer: Tokenizer) -> None:
    gap = compiler.gap(Regex("[0-9]+"), "ra", "ge", begin=0, end=5)
    assert takes(gap, list(tokenizer.encode("ra12ge")))
    assert not takes(gap, list(tokenizer.encode("12")))
    assert not takes(gap, [*tokenizer.encode("ra12ge"), END])


def test_a_machine_is_made_once_and_kept(compiler: Compiler) -> None:
    found: list[Constraint] = []
    threads = [Thread(target=lambda: found.append(compiler.compile(Json()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(one.automaton) for one in found}) == 1


def test_the_machine_used_longest_ago_goes_first(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler.compile(Regex("a")).automaton
    monkeypatch.setattr(compiler_module, "_MOST_KEPT_BYTES", first.nbytes * 5 // 2)
    second = compiler.compile(Regex("b")).automaton
    assert compiler.compile(Regex("a")).automaton is first
    compiler.compile(Regex("c"))
    assert compiler.compile(Regex("a")).automaton is first
    assert compiler.compile(Regex("b")).automaton is not second


def test_what_a_vocabulary_cannot_say_is_refused(compiler: Compiler, tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="no end token"):
        Compiler(tokenizer, VOCAB, ()).compile(Regex("a"))
    mute = Compiler(_Mute(), VOCAB, (END,))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="does not know tool calls"):
        mute.compile(Calls((Tool("clock"),)))


class _Mute:
    """A vocabulary without controls."""

    controls: ClassVar[dict[str, int]] = {}
    byte_ids: frozenset[int] = frozenset()
    vocab_size = 0
