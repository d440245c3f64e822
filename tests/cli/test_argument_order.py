"""Options may stand anywhere: before, between and after the positionals of every command."""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys

import pytest

from dgemma.cli.main import COMMANDS, build_parser, main

# Positionals, and options with their values.
LINES: dict[str, tuple[list[str], list[list[str]]]] = {
    "run": (["MODEL", "a prompt"], [["--raw"], ["--format", "int4"]]),
    "generate": (["MODEL", "a prompt"], [["--raw"], ["--seed", "3"]]),
    "chat": (["MODEL"], [["--thinking"], ["--seed", "3"]]),
    "fill": (["MODEL", "FILE"], [["--json"], ["--seed", "3"]]),
    "edit": (["MODEL", "FILE", "an instruction"], [["--json"], ["--seed", "3"]]),
    "decide": (["MODEL", "INPUT"], [["--json"], ["--seed", "3"]]),
    "extract": (["MODEL", "INPUT"], [["--json"], ["--seed", "3"]]),
    "solve": (["PUZZLE"], [["--json"], ["--seed", "3"]]),
    "play": (["MODEL"], [["--no-open"], ["--port", "3"]]),
    "serve": (["MODEL"], [["--exact"], ["--port", "3"]]),
    "run-batch": (["MODEL", "IN", "OUT"], [["--exact"], ["--max-num-seqs", "3"]]),
    "train": (["RECIPE", "lr=1", "steps=2"], [["--dry-run"], ["--threads", "3"]]),
    "eval": (["MODEL", "TASK"], [["--raw"], ["--limit", "3"]]),
    "merge": (["MODEL", "ADAPTER", "OUT"], []),
    "quantize": (["MODEL", "OUT"], [["--format", "int8"], ["--json"]]),
    "export": (["MODEL", "OUT"], [["--to", "vllm"], ["--adapter", "DIR"]]),
    "info": (["PATH"], [["--json"], ["--check"]]),
    "new": (["OUT"], [["--preset", "tiny"], ["--config-only"]]),
    "pull": (["NAME"], []),
    "list": ([], [["--json"]]),
    "rm": (["NAME"], [["--yes"]]),
    "bench": (["MODEL"], [["--json"]]),
    "plan": (["MODEL"], [["--rps", "1", "--p99", "2"], ["--json"]]),
    "doctor": ([], [["--json"]]),
    "selfcheck": ([], [["--device", "cpu"]]),
    "conform": (["transformers", "MODEL"], [["--json"], ["--source", "DIR"]]),
    "trace": (["show", "FILE"], [["--json"], ["--frames", "3"]]),
    "completion": (["bash"], []),
}


def parsed(command: str, argv: list[str]) -> argparse.Namespace:
    return build_parser([command]).parse_args([command, *argv])


def orders(positionals: list[str], options: list[list[str]]) -> list[list[str]]:
    """The positionals in their order, each option at every place among them."""
    places = itertools.product(range(len(positionals) + 1), repeat=len(options))
    found = []
    for chosen in places:
        line: list[str] = []
        for number in range(len(positionals) + 1):
            line += [
                part for at, option in zip(chosen, options, strict=True) if at == number for part in option
            ]
            line += positionals[number : number + 1]
        found.append(line)
    return found


def test_every_command_is_tried() -> None:
    assert LINES.keys() == COMMANDS.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_options_may_stand_anywhere(command: str) -> None:
    positionals, options = LINES[command]
    lines = orders(positionals, options)
    first = vars(parsed(command, lines[-1]))  # all options at the end
    assert len(lines) == (len(positionals) + 1) ** len(options)
    for line in lines:
        found = vars(parsed(command, line))
        same = {name: value for name, value in found.items() if name != "parser"}
        assert same == {name: value for name, value in first.items() if name != "parser"}, line
    assert all(value in str(first) for value in positionals)


def test_what_stands_behind_two_dashes_is_a_positional() -> None:
    found = parsed("generate", ["MODEL", "--raw", "--", "--seed"])
    assert (found.model, found.prompt, found.raw, found.seed) == ("MODEL", "--seed", True, None)


def test_an_unknown_option_and_a_positional_too_many_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for line, wrong in ((["MODEL", "--nosuch", "prompt"], "--nosuch"), (["MODEL", "prompt", "more"], "more")):
        with pytest.raises(SystemExit) as stopped:
            main(["generate", *line])
        assert stopped.value.code == 2
        assert f"unrecognized arguments: {wrong}" in capsys.readouterr().err


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize("prompt", ["Tell me a joke", "Why?  \n", "It's so.", "Hello", "Hello, " * 1000])
def test_a_prompt_without_a_model_is_told_what_it_was_taken_for(
    prompt: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["generate", prompt]) == 2
    err = capsys.readouterr().err
    assert "was taken for MODEL" in err
    assert f"dgemma generate bundled:text {shlex.quote(prompt)}" in err


def test_an_abbreviated_option_is_refused_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["extract", "a text", "--typ", "order"])
    assert end.value.code == 2
    assert "did you mean '--type'?" in capsys.readouterr().err
