"""`dgemma`: parse, run one command, and turn every expected error into one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from dgemma import __version__
from dgemma.cli import (
    bench,
    chat,
    decide,
    doctor,
    edit,
    eval,  # noqa: A004
    fill,
    generate,
    info,
    merge,
    new,
    pull,
    quantize,
    run_batch,
    selfcheck,
    serve,
    solve,
    train,
)
from dgemma.errors import DgemmaError, suggestion

COMMANDS = (
    generate, chat, fill, edit, decide, solve, serve, run_batch, train, eval, merge, quantize, info, new,
    pull, bench, doctor, selfcheck, )  # fmt: skip


class _CommandParser(argparse.ArgumentParser):
    """argparse, plus a guess at what was meant."""

    def error(self, message: str) -> NoReturn:
        options = [name for action in self._actions for name in action.option_strings]
        choices = [str(name) for action in self._actions for name in action.choices or ()]
        hint = ""
        if message.startswith("unrecognized arguments:"):
            hint = suggestion(message.split()[2].split("=")[0], options, otherwise="")
        elif "invalid choice: '" in message:
            hint = suggestion(message.split("invalid choice: '")[1].split("'")[0], choices, otherwise="")
        self.exit(2, f"{self.prog}: {message}{hint}\nTry: {self.prog} --help\n")


def command_name(module: ModuleType) -> str:
    """As it is typed: run_batch.py is `dgemma run-batch`."""
    return module.__name__.rpartition(".")[2].replace("_", "-")


def build_parser() -> argparse.ArgumentParser:
    parser = _CommandParser(
        prog="dgemma",
        description="Block-diffusion language models, first of all DiffusionGemma, run exactly.",
    )
    parser.add_argument("--version", action="version", version=f"dgemma {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        sub = commands.add_parser(
            command_name(module),
            help=module.HELP,
            description=module.__doc__,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run, parser=sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        status: int = args.run(args)
    except DgemmaError as error:
        print(f"dgemma {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"dgemma {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output left (`dgemma info x | head`): not an error, but stay silent.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


if __name__ == "__main__":
    sys.exit(main())
