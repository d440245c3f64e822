"""Print a completion script for bash, zsh or fish: commands, options, their choices, bundled models, files.

The script is plain text with everything in it, so that pressing the tab key starts no Python. Print it
again after an update."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import dataclass

from dgemma.checkpoint.bundled import PREFIX, bundled_names
from dgemma.cli.main import COMMANDS, build_parser

EXAMPLES = (
    "examples:\n"
    "  dgemma completion bash > ~/.local/share/bash-completion/completions/dgemma\n"
    "  dgemma completion zsh > ~/.zfunc/_dgemma      # with fpath+=(~/.zfunc) before compinit in ~/.zshrc\n"
    "  dgemma completion fish > ~/.config/fish/completions/dgemma.fish"
)

# What a value is, where it has no choices. The scripts know these words.
FILE, MODEL, NOTHING = "@file", "@model", "@nothing"


@dataclass(frozen=True, kw_only=True)
class OptionWords:
    """An option. value: its choices, or one of the words above; "" for a switch."""

    names: tuple[str, ...]
    value: str
    help: str
    is_repeatable: bool


@dataclass(frozen=True, kw_only=True)
class CommandWords:
    """A command. positionals: (name, what it is, whether more of it may follow) in their order."""

    name: str
    help: str
    options: tuple[OptionWords, ...]
    positionals: tuple[tuple[str, str, bool], ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=tuple(SCRIPTS), help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    print(SCRIPTS[args.shell](commands()), end="")
    return 0


def commands() -> list[CommandWords]:
    """All commands, as the parser has them."""
    subparsers = build_parser()._subparsers
    assert subparsers is not None
    choices = subparsers._group_actions[0].choices
    assert isinstance(choices, dict)
    return [_command(name, parser) for name, parser in choices.items()]


def _command(name: str, parser: argparse.ArgumentParser) -> CommandWords:
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    return CommandWords(
        name=name,
        help=COMMANDS[name],
        options=tuple(
            OptionWords(
                names=tuple(action.option_strings),
                value="" if action.nargs == 0 else _value(action),
                help=" ".join((action.help or "").split()),
                is_repeatable=isinstance(action, argparse._AppendAction),
            )
            for action in shown
            if action.option_strings
        ),
        positionals=tuple(
            (str(action.metavar or action.dest), _value(action), action.nargs in ("*", "+"))
            for action in shown
            if not action.option_strings
        ),
    )


def _value(action: argparse.Action) -> str:
    if action.choices is not None:
        words = [str(choice) for choice in action.choices]
        assert all(re.fullmatch(r"[\w.+-]+", word) for word in words), words  # they need no quotes
        return " ".join(words)
    if action.dest == "model" or action.metavar == "MODEL":
        return MODEL
    # A NAME is one on the hub.
    return NOTHING if action.type in (int, float) or action.metavar == "NAME" else FILE


def _models() -> str:
    return " ".join(f"{PREFIX}{name}" for name in bundled_names())


# bash

_BASH = r"""# Completion of dgemma for bash, written by `dgemma completion bash`.

_dgemma_options() {
    case "$1" in
@OPTIONS@
        *) echo "--help --version" ;;
    esac
}

# What the value of option $2 of command $1 is; nothing for a switch.
_dgemma_value() {
    case "$1 $2" in
@VALUES@
    esac
}

# What positional number $2 of command $1 is.
_dgemma_positional() {
    case "$1 $2" in
@POSITIONALS@
        *) echo @file ;;
    esac
}

_dgemma() {
    # From the line itself: bash cuts words at colons, and models are called bundled:NAME.
    local line="${COMP_LINE:0:COMP_POINT}" command="" value="" position=0 word cur
    local -a words
    IFS=$' \t' read -a words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    ((${#words[@]} > 1)) || return
    cur="${words[${#words[@]} - 1]}"
    for word in "${words[@]:1:${#words[@]} - 2}"; do
        if [[ -n $value ]]; then
            value=""
        elif [[ $word == -*=* ]]; then
            :
        elif [[ $word == -* ]]; then
            value=$(_dgemma_value "$command" "$word")
        elif [[ -z $command ]]; then
            command=$word
        else
            position=$((position + 1))
        fi
    done
    if [[ -n $value ]]; then
        :
    elif [[ $cur == -*=* ]]; then
        value=$(_dgemma_value "$command" "${cur%%=*}")
        cur=${cur#*=}
    elif [[ $cur == -* ]]; then
        value=$(_dgemma_options "$command")
    elif [[ -z $command ]]; then
        value="@COMMANDS@"
    else
        value=$(_dgemma_positional "$command" "$position")
    fi
    COMPREPLY=()
    case $value in
        @file) return ;; # -o default: readline completes files
        @model)
            COMPREPLY=($(compgen -W "@MODELS@" -- "$cur"))
            ((${#COMPREPLY[@]})) || return
            local IFS=$'\n'
            COMPREPLY+=($(compgen -d -- "$cur"))
            ;;
        *)
            compopt +o default 2> /dev/null
            [[ $value == @nothing ]] || COMPREPLY=($(compgen -W "$value" -- "$cur"))
            ;;
    esac
    # Readline replaces only what stands behind the last colon.
    if [[ $cur == *:* && $COMP_WORDBREAKS == *:* ]]; then
        local before="${cur%"${cur##*:}"}"
        COMPREPLY=("${COMPREPLY[@]#"$before"}")
    fi
}

complete -o default -F _dgemma dgemma
"""


def bash_script(found: list[CommandWords]) -> str:
    options = [
        f'        {c.name}) echo "{" ".join(n for option in c.options for n in option.names)}" ;;'
        for c in found
    ]
    values: dict[str, list[str]] = {}
    positionals: dict[str, list[str]] = {}
    for command in found:
        for option in command.options:
            if option.value:
                values.setdefault(option.value, []).extend(f"{command.name} {name}" for name in option.names)
        for number, (_, value, _) in enumerate(command.positionals):
            if value != FILE:  # the rest
                positionals.setdefault(value, []).append(f"{command.name} {number}")
    parts = {
        "@OPTIONS@": "\n".join(options),
        "@VALUES@": _cases(values),
        "@POSITIONALS@": _cases(positionals),
        "@COMMANDS@": " ".join(command.name for command in found),
        "@MODELS@": _models(),
    }
    script = _BASH
    for mark, text in parts.items():
        script = script.replace(mark, text)
    return script


def _cases(keys: dict[str, list[str]]) -> str:
    """Cases of a `case` statement that print each key for its patterns."""
    return "\n".join(
        f"        {' | '.join(shlex.quote(pattern) for pattern in patterns)}) echo {shlex.quote(key)} ;;"
        for key, patterns in keys.items()
    )


# zsh


def zsh_script(found: list[CommandWords]) -> str:
    lines = [
        "#compdef dgemma",
        "# Completion of dgemma for zsh, written by `dgemma completion zsh`.",
        "",
        "_dgemma_models() {",
        f"    local -a models=({' '.join(shlex.quote(name) for name in _models().split())})",
        "    compadd -a models",
        "    _files",
        "}",
        "",
        "_dgemma() {",
        "    local curcontext=$curcontext state line",
        "    local -a names",
        "    _arguments -C '(- *)--help' '(- *)--version' '1: :->command' '*:: :->arguments'",
        "    case $state in",
        "        command)",
        "            names=(",
        *(f"                {shlex.quote(f'{c.name}:{c.help}')}" for c in found),
        "            )",
        "            _describe command names",
        "            ;;",
        "        arguments)",
        "            case $line[1] in",
    ]
    for command in found:
        specs = [spec for option in command.options for spec in _zsh_options(option)]
        for number, (name, value, is_repeatable) in enumerate(command.positionals, start=1):
            place = "*" if is_repeatable else str(number)
            specs.append(f"{place}:{_zsh_escaped(name)}:{_zsh_action(value)}")
        lines.append(f"                {command.name})")
        lines.append("                    _arguments \\")
        lines += [f"                        {shlex.quote(spec)} \\" for spec in specs[:-1]]
        lines.append(f"                        {shlex.quote(specs[-1])}")
        lines.append("                    ;;")
    lines += [
        "            esac",
        "            ;;",
        "    esac",
        "}",
        "",
        # As a file of fpath it is the body of the function; after `source` it must be registered.
        'if [[ $funcstack[1] == _dgemma ]]; then _dgemma "$@"; else compdef _dgemma dgemma; fi',
    ]
    return "\n".join(lines) + "\n"


def _zsh_options(option: OptionWords) -> list[str]:
    """`--x=[help]:value:action`: the value stands in the same word or in the next."""
    sign, value = ("=", f":value:{_zsh_action(option.value)}") if option.value else ("", "")
    often = "*" if option.is_repeatable else ""
    return [f"{often}{name}{sign}[{_zsh_escaped(option.help)}]{value}" for name in option.names]


def _zsh_action(value: str) -> str:
    return {FILE: "_files", MODEL: "_dgemma_models", NOTHING: " "}.get(value, f"({value})")


def _zsh_escaped(text: str) -> str:
    return re.sub(r"([\\\[\]:])", r"\\\1", text)


# fish


def fish_script(found: list[CommandWords]) -> str:
    lines = [
        "# Completion of dgemma for fish, written by `dgemma completion fish`.",
        "complete -c dgemma -n __fish_use_subcommand -f -l help",
        "complete -c dgemma -n __fish_use_subcommand -f -l version",
    ]
    for command in found:
        about = _fish_quoted(command.help)
        lines.append(f"complete -c dgemma -n __fish_use_subcommand -f -a {command.name} -d {about}")
        begin = f"complete -c dgemma -n '__fish_seen_subcommand_from {command.name}'"
        for option in command.options:
            names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names)
            lines.append(f"{begin} {names}{_fish_value(option.value)} -d {_fish_quoted(option.help)}")
        for _, value, _ in command.positionals:
            if value != FILE:
                lines.append(f"{begin}{_fish_positional(value)}")
    return "\n".join(lines) + "\n"


def _fish_positional(value: str) -> str:
    if value == NOTHING:
        return " -f"
    return f" -a {_fish_quoted(_models())}" if value == MODEL else f" -f -a {_fish_quoted(value)}"


def _fish_value(value: str) -> str:
    if not value:
        return ""
    if value in (FILE, NOTHING):
        return " -r" if value == FILE else " -x"
    return f" -r -a {_fish_quoted(_models())}" if value == MODEL else f" -x -a {_fish_quoted(value)}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
