"""`dgemma generate` and `dgemma chat` as a user types them, in a pipe and on a terminal."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dgemma
from dgemma.cli import chat
from dgemma.cli import main as command_line
from dgemma.cli.views.terminal import printable
from terminal import Program, PseudoTerminal, ScriptedModel, plain_screen

Reply = Callable[[list[dict[str, Any]], dict[str, Any]], tuple[str, str]]
POEM = (
    "Noise first,\n\tthen words,\nthen 日本語 and 👨\u200d👩\u200d👧 and a row that wraps where it is narrow"
)


def echo(messages: list[dict[str, Any]], options: dict[str, Any]) -> tuple[str, str]:
    """All that the model was given, in words."""
    return "", " / ".join(f"{message['role']}: {message['content']}" for message in messages)


class Asked:
    """A stand-in for `dgemma.load` that remembers what it and its model were asked."""

    def __init__(self, reply: Reply = echo, **kind: Any) -> None:
        self.load: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self.reply, self.kind = reply, kind

    def __call__(self, path: str, **options: Any) -> ScriptedModel:
        self.load = {"path": path, **options}
        options["progress"](40, 100)
        options["progress"](100, 100)
        return ScriptedModel(self._noted, **self.kind)

    def _noted(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> tuple[str, str]:
        self.options = options
        return self.reply(messages, options)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    stand_in = Asked()
    monkeypatch.setattr(dgemma, "load", stand_in)
    monkeypatch.setattr("dgemma.cli.options.check_checkpoint", lambda model: None)
    return stand_in


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return give


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        status = command_line.main(argv)
    except SystemExit as stop:
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


# generate, in a pipe


def test_the_prompt_is_one_turn_of_the_chat(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "generate", "m", "Hello") == (0, "user: Hello\n", "")
    assert asked.options == {"drafts": False, "thinking": False}
    assert run(capsys, "generate", "m", "Hello", "--system", "Be brief.", "--thinking") == (
        0,
        "system: Be brief. / user: Hello\n",
        "",
    )
    assert asked.options["thinking"]


def test_raw_continues_the_text_and_so_does_a_model_without_a_template(
    asked: Asked, capsys: pytest.CaptureFixture[str], stdin: Callable[[bytes], None]
) -> None:
    assert run(capsys, "generate", "m", "Once", "--raw")[1] == "raw: Once\n"
    stdin(b"Once\n")
    assert run(capsys, "generate", "m", "-", "--raw")[1] == "raw: Once\n"
    asked.kind["has_chat_template"] = False
    assert run(capsys, "generate", "m", "Once")[1] == "raw: Once\n"


@pytest.mark.parametrize("prompt", [[], ["-"]])
def test_the_prompt_may_come_from_stdin(
    prompt: list[str],
    asked: Asked,
    capsys: pytest.CaptureFixture[str],
    stdin: Callable[[bytes], None],
) -> None:
    stdin("Grüße\naus zwei Zeilen\n".encode())
    assert run(capsys, "generate", "m", *prompt)[1] == "user: Grüße\naus zwei Zeilen\n"


def test_options_reach_the_model(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (
        "--seed 3 --max-tokens 9 --max-denoising-steps 5 --preset fast --temperature 0.5 --deadline 2.5 "
        "--decode causal --stop a --stop b --dtype float32 --device cpu --exact --compile "
        "--adapter d --top-k 7 --top-p 0.9 --canvas-len 16"
    )
    assert run(capsys, "generate", "m", "x", *argv.split())[0] == 0
    assert asked.options == {
        "seed": 3, "max_tokens": 9, "max_denoising_steps": 5, "preset": "fast", "temperature": 0.5,
        "deadline_s": 2.5, "decode": "causal", "stop": ["a", "b"], "drafts": False, "thinking": False,
        "top_k": 7, "top_p": 0.9, "canvas_len": 16,
    }  # fmt: skip
    del asked.load["progress"]
    loaded = {"path": "m", "dtype": "float32", "device": "cpu", "exact": True, "compile": True}
    assert asked.load == {**loaded, "adapter": "d"}


def test_text_in_a_pipe_is_as_the_model_wrote_it(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    asked.reply = lambda *_: ("a thought", POEM + "\x1b[31m")
    assert run(capsys, "generate", "m", "x")[1] == POEM + "\x1b[31m\n"
    asked.reply = lambda *_: ("", "one line\n")
    assert run(capsys, "generate", "m", "x")[1] == "one line\n"


def test_json_is_one_object_and_nothing_else(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    asked.reply = lambda *_: ("hm", POEM)
    status, out, err = run(capsys, "generate", "m", "x", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["text"], found["thought"], found["seed"]) == (POEM, "hm", 7)
    assert found["finish_reason"] == "stop"
    assert out.count("\n") == 1


def test_stats_go_to_stderr(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    asked.reply = lambda *_: ("", "x" * 40)
    _, out, err = run(capsys, "generate", "m", "x", "--stats")
    assert out == "x" * 40 + "\n"
    assert [line.split("  ")[0] for line in err.splitlines()] == [
        "tokens", "seconds", "tokens/s", "steps per canvas", "tokens per forward", "finish", "seed",
    ]  # fmt: skip
    assert [line[20:] for line in err.splitlines()] == [
        "40 after a prompt of 5", "2.00, first text after 1.00", "20.0", "4, 4", "5.00", "stop", "7",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "data", "message"),
    [
        (["  "], b"", "the prompt is '  '; it must hold some text."),
        ([], b"", "the prompt is ''; it must hold some text."),
        (["-"], b"caf\xe9!", "the text holds bytes that are not UTF-8, after 'caf'"),
        (["x", "--system", "\udcff"], b"", "bytes that are not UTF-8, after ''"),
        (["x", "--raw", "--system", "y"], b"", "--system needs the chat template, and --raw leaves it out."),
        (["x", "--raw", "--thinking"], b"", "--thinking needs the chat template"),
        (["x", "--max-tokens", "0"], b"", "max_tokens is 0"),
        (["x", "--temperature", "-1"], b"", "temperature is -1.0"),
        (["x", "--stop", ""], b"", "stop has a string of 0 characters"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    argv: list[str],
    data: bytes,
    message: str,
    asked: Asked,
    capsys: pytest.CaptureFixture[str],
    stdin: Callable[[bytes], None],
) -> None:
    stdin(data)
    status, out, err = run(capsys, "generate", "m", *argv)
    assert (status, out) == (2, "")
    assert err.startswith("dgemma generate: ")
    assert message in err
    assert err.count("\n") == 1


def test_wrong_options_are_refused_before_anything_is_loaded(
    asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "generate", "m", "x", "--seed", str(1 << 70))[0] == 2
    assert asked.load == {}
    status, _, err = run(capsys, "generate", "m", "x", "--preset", "fats")
    assert status == 2
    assert "did you mean 'fast'?" in err


def test_a_template_that_is_missing_is_named(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    asked.kind["has_chat_template"] = False
    assert "and this checkpoint has none" in run(capsys, "generate", "m", "x", "--thinking")[2]
    assert run(capsys, "chat", "m")[2] == (
        "dgemma chat: m has no chat template; use `dgemma generate --raw`.\n"
    )


def test_an_interrupt_in_a_pipe_keeps_what_is_final(
    asked: Asked, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked.reply = lambda *_: ("", "x" * 100)
    real = ScriptedModel.stream_chat

    def interrupted(self: ScriptedModel, *args: Any, **options: Any) -> Any:
        for number, event in enumerate(real(self, *args, **options)):
            if number == 2:
                raise KeyboardInterrupt
            yield event

    monkeypatch.setattr(ScriptedModel, "stream_chat", interrupted)
    assert run(capsys, "generate", "m", "x") == (130, "x" * 64 + "\n", "dgemma generate: interrupted\n")
    assert run(capsys, "generate", "m", "x", "--json") == (130, "", "dgemma generate: interrupted\n")


# chat, in a pipe


def test_each_line_is_a_turn_and_the_history_is_kept(
    asked: Asked, capsys: pytest.CaptureFixture[str], stdin: Callable[[bytes], None]
) -> None:
    asked.reply = lambda messages, options: ("secret", f"{len(messages)}:{messages[-1]['content']}")
    stdin(b"eins\n\n/new\nzwei\\\n/system Kurz.\ndrei\n vier\n /no command\n/quit\nnie\n")
    status, out, err = run(capsys, "chat", "m")
    assert (status, out) == (0, "1:eins\n1:zwei\\\n4:drei\n6:vier\n8:/no command\n")
    assert "a new conversation" in err


@pytest.mark.parametrize("word", ["/quit", "/exit", "/bye"])
def test_a_chat_ends_by_the_word_that_people_type(
    asked: Asked, capsys: pytest.CaptureFixture[str], stdin: Callable[[bytes], None], word: str
) -> None:
    asked.reply = lambda messages, options: ("", messages[-1]["content"])
    stdin(f"a\n{word}\nb\n".encode())
    assert run(capsys, "chat", "m")[:2] == (0, "a\n")


def test_chat_commands(
    asked: Asked, capsys: pytest.CaptureFixture[str], stdin: Callable[[bytes], None], tmp_path: Path
) -> None:
    asked.reply = lambda messages, options: ("", f"seed {options.get('seed')}")
    file = tmp_path / "talk.json"
    stdin(f"/help\na\n/seed 5\nb\n/save {file}\n/seed\nc\n/system\n/save {file}\n".encode())
    status, out, err = run(capsys, "chat", "m", "--seed", "3", "--system", "Short.", "--stats")
    assert (status, out) == (0, "seed 3\nseed 5\nseed None\n")
    for command in chat.COMMANDS:
        assert command in err
    assert err.count("tokens/s") == 3
    assert f"6 messages in {file}" in err
    assert json.loads(file.read_text())["messages"] == [
        {"role": role, "content": content}
        for pair in (("a", "seed 3"), ("b", "seed 5"), ("c", "seed None"))
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]


def test_an_answer_is_written_anew_with_the_next_seed_in_place_of_the_old_one(
    asked: Asked, capsys: pytest.CaptureFixture[str], stdin: Callable[[bytes], None], tmp_path: Path
) -> None:
    asked.reply = lambda messages, options: ("", f"{len(messages)}: seed {options.get('seed')}")
    file = tmp_path / "talk.json"
    stdin(f"a\nb\n/regenerate\n/regenerate\n/stats\n/save {file}\n".encode())
    status, out, err = run(capsys, "chat", "m", "--seed", "3")
    assert (status, out) == (0, "1: seed 3\n3: seed 3\n3: seed 4\n3: seed 5\n")
    assert err.count("tokens/s") == 1
    contents = [message["content"] for message in json.loads(file.read_text())["messages"]]
    assert contents == ["a", "1: seed 3", "b", "3: seed 5"]


def test_a_saved_conversation_is_loaded_with_its_system_text(
    asked: Asked, capsys: pytest.CaptureFixture[str], stdin: Callable[[bytes], None], tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    stdin(f"a\n/save {file}\n".encode())
    run(capsys, "chat", "m", "--system", "Short.")
    stdin(f"lost\n/load {file}\nb\n".encode())
    status, out, err = run(capsys, "chat", "m", "--system", "Long.")
    assert status == 0
    assert out.splitlines()[-1] == (
        "system: Short. / user: a / assistant: system: Short. / user: a / user: b"
    )
    assert f"2 messages from {file}" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory."),
        ("[", "is not JSON."),
        ("[" * 100_000, "is not JSON."),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "holds text that is not UTF-8."),
        ("[]", "holds no conversation"),
        ('{"messages": [{"role": "user"}]}', "holds no conversation"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "holds no conversation"),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]}',
            "a system text that is not its first message",
        ),
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(
    content: str | None,
    message: str,
    asked: Asked,
    capsys: pytest.CaptureFixture[str],
    stdin: Callable[[bytes], None],
    tmp_path: Path,
) -> None:
    file = tmp_path / "talk.json"
    if content is not None:
        file.write_text(content)
    stdin(f"a\n/load {file}\nb\n".encode())
    status, out, err = run(capsys, "chat", "m")
    assert status == 1
    assert out.splitlines()[-1] == "user: a / assistant: user: a / user: b"
    assert message in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"/regenerate", "/regenerate needs a question first"),
        (b"/stats", "/stats needs an answer first"),
        (b"/load", "/load needs the name of a file"),
        (b"/sead 4", "unknown command '/sead'; did you mean '/seed'? /help lists them."),
        (b"/seed four", "/seed is 'four'; it must be a whole number."),
        (b"/seed 99999999999999999999999", "seed is 99999999999999999999999"),
        (b"/save", "/save needs the name of a file"),
        (b"/save /", "/ exists; choose another name."),
        (b"/save /nowhere/at/all.json", "cannot be written: No such file or directory."),
        (b"caf\xe9", "the text holds bytes that are not UTF-8, after 'caf'"),
    ],
)
def test_an_error_is_one_line_and_the_chat_goes_on(
    line: bytes,
    message: str,
    asked: Asked,
    capsys: pytest.CaptureFixture[str],
    stdin: Callable[[bytes], None],
) -> None:
    stdin(line + b"\nafter\n")
    status, out, err = run(capsys, "chat", "m")
    assert (status, out) == (1, "user: after\n")
    assert err.startswith("dgemma chat: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_turn_that_fails_is_not_part_of_the_conversation(
    asked: Asked, capsys: pytest.CaptureFixture[str], stdin: Callable[[bytes], None]
) -> None:
    def reply(messages: list[dict[str, Any]], options: dict[str, Any]) -> tuple[str, str]:
        if messages[-1]["content"] == "too long":
            raise dgemma.InputError("the prompt is too long.")
        return echo(messages, options)

    asked.reply = reply
    stdin(b"too long\nshort\n")
    assert run(capsys, "chat", "m") == (1, "user: short\n", "dgemma chat: the prompt is too long.\n")


def test_an_interrupt_ends_a_script(
    asked: Asked,
    capsys: pytest.CaptureFixture[str],
    stdin: Callable[[bytes], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    asked.reply = interrupted
    stdin(b"one\ntwo\n")
    assert run(capsys, "chat", "m") == (130, "", "dgemma chat: interrupted\n")
    stdin(b"")
    monkeypatch.setattr(chat, "_read_line", interrupted)
    assert run(capsys, "chat", "m") == (130, "", "dgemma chat: interrupted\n")


def test_a_keyboard_with_a_pipe_for_answers_gets_its_prompts_on_stderr(
    asked: Asked,
    capsys: pytest.CaptureFixture[str],
    stdin: Callable[[bytes], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stdin(b"one\\\ntwo\n")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    status, out, err = run(capsys, "chat", "m")
    assert (status, out) == (0, "user: one\ntwo\n")
    assert err == "/help lists the commands, Ctrl-D ends.\n> . > \n"


def test_help_names_every_option(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("generate", "chat"):
        status, page, _ = run(capsys, command, "--help")
        assert status == 0
        assert "examples:" in page
        assert "--max-denoising-steps" in page


# on a terminal

PROGRAM = """
import os, sys
import dgemma
from dgemma.cli import main, options
from terminal import ScriptedModel
options.check_checkpoint = lambda model: None
def reply(messages, given):
    text = messages[-1]["content"]
    if text == "long":
        return "", "Final words.\\n" + "and so on " * 1000
    return ("Let me think." if given["thinking"] else ""), f"{len(messages)} {text}"
dgemma.load = lambda path, **_: ScriptedModel(reply, step_s=float(path), go=os.environ.get("GO"))
sys.exit(main.main())
"""


LATER_CANVAS = re.compile(r"canvas ([3-9]|\d\d)")  # than those with the first words


@pytest.mark.parametrize("columns", [40, 200])
def test_a_terminal_ends_with_the_plain_text(columns: int, tmp_path: Path) -> None:
    with (
        PseudoTerminal(columns, 24) as terminal,
        Program(terminal, PROGRAM, "generate", "0.1", POEM, env={"GO": str(tmp_path / "go")}) as program,
    ):
        terminal.wait_for(lambda screen: any("step 2/48" in row for row in screen.rows()))
        assert not terminal.echoes()
        (tmp_path / "go").touch()
        assert program.wait() == 0
        assert terminal.echoes()
        expected = plain_screen(f"1 {POEM}\n", columns, 24)
        assert terminal.screen.text() == expected.text()
        assert (terminal.screen.cursor.x, terminal.screen.cursor.hidden) == (0, False)
        assert b"\x1b[32m" in terminal.raw or b"\x1b[33m" in terminal.raw


def test_no_colour_is_honoured() -> None:
    with PseudoTerminal(80, 24) as terminal:
        assert Program(terminal, PROGRAM, "generate", "0.07", "x" * 60, env={"NO_COLOR": "1"}).wait() == 0
        assert b"\x1b[3" not in terminal.raw
        assert b"\x1b[1m" in terminal.raw


def test_a_terminal_in_the_c_locale_does_not_crash() -> None:
    with PseudoTerminal(80, 24, encoding="ascii") as terminal:
        env = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
        assert Program(terminal, PROGRAM, "generate", "0.02", "a \u65e5", env=env).wait() == 0
        assert terminal.screen.text()[0].startswith("1 a ")


def test_no_prompt_on_a_terminal_is_an_error() -> None:
    with PseudoTerminal(100, 24) as terminal:
        assert Program(terminal, PROGRAM, "generate", "bundled:text").wait() == 2
        assert terminal.screen.text() == [
            "dgemma generate: no prompt; give it as an argument, or send it to stdin."
        ]


def test_ctrl_c_ends_an_answer_cleanly() -> None:
    with (
        PseudoTerminal(80, 24) as terminal,
        Program(terminal, PROGRAM, "generate", "0.05", "long") as program,
    ):
        terminal.wait_for(
            lambda screen: "Final words." in screen.text()[:1] and LATER_CANVAS.search(str(screen.rows()))
        )
        terminal.type("typed ahead")
        program.interrupt()
        assert program.wait() == 130
        *answer, last = terminal.screen.text()
        assert last == "dgemma generate: interrupted"
        assert answer[0] == "Final words."
        assert "and so on and so on".startswith(answer[1][:19])
        assert not terminal.screen.cursor.hidden
        assert terminal.echoes()
        assert b"Traceback" not in terminal.raw


def test_a_chat_on_a_terminal() -> None:
    with (
        PseudoTerminal(80, 24) as terminal,
        Program(terminal, PROGRAM, "chat", "0.03", "--thinking") as program,
    ):

        def ready(number: int) -> None:
            """Wait for the prompt `number`, with the cursor behind it."""
            terminal.wait_for(
                lambda screen: (
                    sum(line.startswith(">") for line in screen.text()) == number
                    and screen.rows()[screen.cursor.y] == ">"
                    and terminal.screen.cursor.x == 2
                )
            )

        ready(1)
        terminal.type("hello\r")
        ready(2)
        terminal.type("two\\\rlines\r")
        ready(3)
        terminal.type("/seed x\r")
        ready(4)
        terminal.type("long\r")
        terminal.wait_for(lambda screen: LATER_CANVAS.search(str(screen.rows())))
        program.interrupt()
        ready(5)
        terminal.type("last\r")
        ready(6)
        terminal.type("\x04")
        assert program.wait() == 0
        lines = terminal.screen.text()
        assert "Traceback" not in str(lines)
        for line in ("> hello", "Let me think.", "1 hello", "3 two", "lines", "dgemma chat: interrupted"):
            assert line in lines
        # The interrupted answer is part of the conversation.
        assert "7 last" in lines
        assert "dgemma chat: /seed is 'x'; it must be a whole number." in lines
        assert not terminal.screen.cursor.hidden


def test_ctrl_c_at_the_prompt_ends_the_chat() -> None:
    with PseudoTerminal(80, 24) as terminal, Program(terminal, PROGRAM, "chat", "0") as program:
        terminal.wait_for(lambda screen: ">" in screen.rows())
        program.interrupt()
        assert program.wait() == 0
        assert b"Traceback" not in terminal.raw


# With a real model, tiny and of random weights: noise, but all the way


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("model") / "tiny")
    assert command_line.main(["new", path, "--dtype", "float32"]) == 0
    return path


QUICK = ["--seed", "1", "--max-tokens", "40", "--max-denoising-steps", "3"]
REAL = """
import sys
from dgemma.cli import main
sys.exit(main.main())
"""


def test_a_real_answer_is_the_same_in_a_pipe_in_json_and_on_a_terminal(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    status, out, _ = run(capsys, "generate", tiny, "Hello", *QUICK)
    assert status == 0
    assert out.endswith("\n")
    found = json.loads(run(capsys, "generate", tiny, "Hello", *QUICK, "--json")[1])
    assert out == found["text"] + ("" if found["text"].endswith("\n") else "\n")
    assert found["steps"][0] <= 3
    with (
        PseudoTerminal(40, 24) as terminal,
        Program(terminal, REAL, "generate", tiny, "Hello", *QUICK) as program,
    ):
        assert program.wait() == 0
        expected = plain_screen(printable(out, "utf-8"), 40, 24)
        assert terminal.screen.text() == expected.text()
        assert b"step " in terminal.raw
        assert not terminal.screen.cursor.hidden


def test_a_real_chat_goes_on_from_its_cache(
    tiny: str, capsys: pytest.CaptureFixture[str], stdin: Callable[[bytes], None]
) -> None:
    capsys.readouterr()
    stdin(b"one\ntwo\n")
    status, out, err = run(capsys, "chat", tiny, *QUICK, "--decode", "causal", "--stats")
    assert status == 0
    assert out.count("\n") >= 2
    prompts = [int(line.split()[-1]) for line in err.splitlines() if line.startswith("tokens  ")]
    assert prompts[1] > prompts[0] + 40
