"""Write the manual pages from the parsers that print `--help`: dgemma.1, and one for each command.

    python -m tools.make_man

They stand in man/, and the wheel installs them under share/man/man1: in an environment that is activated,
`man dgemma-serve` finds its page. They are committed because the parsers import what an isolated build lacks.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from dgemma import __version__
from dgemma.cli.main import COMMANDS, build_parser
from tools.build_docs import parsers_below

MAN = Path(__file__).resolve().parent.parent / "man"
EXIT_STATUS = "0 for success, 1 for a failure, 2 for a wrong command line or input, 130 for an interrupt."


def escaped(text: str) -> str:
    """Text that roff prints as it stands."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    text = re.sub(r"[^\x00-\x7f]", lambda found: f"\\[u{ord(found[0]):04X}]", text)
    return re.sub(r"^(?=[.'])", r"\\&", text, flags=re.MULTILINE)  # not a request to roff


def bold(text: str) -> str:
    return f"\\fB{escaped(text)}\\fR"


def italic(text: str) -> str:
    return f"\\fI{escaped(text)}\\fR"


def filled(text: str) -> str:
    """Prose, which roff breaks anew for the reader's width."""
    return escaped(textwrap.fill(text, 76, break_long_words=False, break_on_hyphens=False)) + "\n"


def paragraphs(text: str) -> str:
    """Prose is filled; indented lines, such as commands, keep their line breaks."""
    found = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        for is_verbatim, group in groupby(block.splitlines(), key=lambda line: line.startswith("  ")):
            lines = "\n".join(group)
            found.append(f".EX\n{escaped(lines)}\n.EE\n" if is_verbatim else filled(lines))
    return ".PP\n".join(found)


def metavar(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    return "|".join(map(str, action.choices)) if action.choices else action.dest.upper()


def value_of(action: argparse.Action) -> str:
    """What follows an option's name, or stands for a positional, with its number of times."""
    name = italic(metavar(action))
    match action.nargs:
        case 0:
            return ""
        case "?":
            return f"[{name}]"
        case "*":
            return f"[{name} ...]"
        case "+":
            return f"{name} [{name} ...]" if action.option_strings else f"{name} ..."
        case _:
            return name


def entries(parser: argparse.ArgumentParser, actions: Iterable[argparse.Action]) -> Iterator[str]:
    formatter = parser._get_formatter()
    for action in actions:
        if action.help == argparse.SUPPRESS:
            continue
        names = ", ".join(map(bold, action.option_strings))
        yield f".TP\n{' '.join(filter(None, (names, value_of(action))))}\n"
        yield filled(formatter._expand_help(action)) if action.help else "\n"


def page(parser: argparse.ArgumentParser, summary: str) -> str:
    """One page. `summary` is the line that apropos finds."""
    name = parser.prog.replace(" ", "-")
    positionals = parser._get_positional_actions()
    is_main = parser._subparsers is not None
    option = f"[{italic('option')} ...]"
    synopsis = [italic("command"), "..."] if is_main else [option, *map(value_of, positionals)]
    parts = [
        f'.\\" Written by `python -m tools.make_man` from the parser of `{parser.prog} --help`.\n',
        f'.TH {escaped(name.upper())} 1 "" "dgemma {__version__}" "User Commands"\n',
        f".SH NAME\n{escaped(name)} \\- {escaped(summary)}\n",
        f".SH SYNOPSIS\n{bold(parser.prog)} {' '.join(synopsis)}\n",
        ".SH DESCRIPTION\n",
        paragraphs(parser.description or ""),
    ]
    if is_main:
        parts.append(".SH COMMANDS\n")
        parts += [f".TP\n{bold(command)}\n{escaped(about)}\n" for command, about in COMMANDS.items()]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action not in positionals or not is_main]
        if not actions:
            continue
        title = {"positional arguments": ".SH ARGUMENTS", "options": ".SH OPTIONS"}
        parts.append(title.get(group.title or "", f".SS {escaped(group.title or '')}") + "\n")
        parts += entries(parser, actions)
    notes, *examples = re.split(r"^examples?:\n", parser.epilog or "", flags=re.MULTILINE)
    if notes.strip():
        parts += [".SH NOTES\n", paragraphs(notes)]
    parts += [f".SH EXAMPLES\n{paragraphs(text)}" for text in examples]
    parts.append(f".SH EXIT STATUS\n{filled(EXIT_STATUS)}")
    others = [f"dgemma-{command}" for command in COMMANDS] if is_main else ["dgemma"]
    parts.append(".SH SEE ALSO\n" + ",\n".join(f"{bold(other)}(1)" for other in others) + "\n")
    return "".join(parts)


def pages() -> dict[str, str]:
    """All pages by the names of their files."""
    main, *commands = parsers_below(build_parser())
    found = {"dgemma.1": page(main, "run, study and serve block-diffusion language models")}
    for parser in commands:
        found[f"{parser.prog.replace(' ', '-')}.1"] = page(parser, COMMANDS[parser.prog.split()[1]])
    return found


def main() -> int:
    MAN.mkdir(exist_ok=True)
    written = pages()
    for old in MAN.glob("*.1"):
        if old.name not in written:
            old.unlink()
    for name, text in written.items():
        (MAN / name).write_text(text)
    print(f"{len(written)} pages in {MAN}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
