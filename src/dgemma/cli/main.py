"""`dgemma`: parse, run one command, and turn every expected error into one line."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from dgemma import __version__
from dgemma.errors import DgemmaError, InputError, suggestion

FAILURE, USAGE = 1, 2  # exit statuses; 130 after Ctrl-C

# Each command is the module of its name (run_batch.py is `dgemma run-batch`), imported when it is typed.
COMMANDS = {
    "run": "fetch a model that fits this machine, and answer",
    "generate": "write an answer to a prompt",
    "chat": "talk with a model",
    "fill": "fill the gaps of a text",
    "edit": "change a text in place, under an instruction",
    "decide": "answer questions about a text, with probabilities",
    "extract": "a record out of a message: who, when, how many",
    "solve": "solve a Sudoku, offline, with the bundled model",
    "play": "try models in the browser: chat, fill, edit, Sudoku, canvases",
    "serve": "serve a model over HTTP, to OpenAI's clients",
    "run-batch": "answer a file of requests, resumably",
    "train": "fine-tune a model, resumably",
    "eval": "run a task: scores with intervals, steps, seconds",
    "merge": "write base plus adapter as one checkpoint",
    "quantize": "write a checkpoint in int8, int4 or NVFP4",
    "export": "write a checkpoint for Transformers and vLLM",
    "info": "a model's size, parts and cache; does it fit here?",
    "new": "a random checkpoint for experiments",
    "pull": "fetch a checkpoint from the hub",
    "list": "the models on this machine",
    "rm": "delete a model from the hub cache",
    "bench": "what a step, a commit and a token cost here",
    "plan": "how many replicas a load needs, and what they cost",
    "doctor": "what this machine has, and what that means",
    "selfcheck": "are the numbers right on this device?",
    "conform": "does another runtime compute the same?",
    "trace": "watch, draw, compare and replay recorded generations",
    "completion": "a completion script for bash, zsh or fish",
}

# These import torch, which takes a second or two, before they say more than that MODEL is not there.
IMPORT_TORCH_FIRST = (
    "serve", "run-batch", "train", "merge", "quantize", "export", "new", "doctor", "selfcheck",
    "conform",
)  # fmt: skip


class _CommandParser(argparse.ArgumentParser):
    """argparse, with options anywhere between the positionals, and a guess at what was meant."""

    _is_mixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """argparse alone loses an optional positional (`nargs="?"`) that stands behind an option."""
        if self._subparsers is not None or self._is_mixing:
            return super().parse_known_args(args, namespace)
        self._is_mixing = True  # it calls this method for the options, then for the positionals
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_mixing = False

    def error(self, message: str) -> NoReturn:
        options = [name for action in self._actions for name in action.option_strings]
        choices = [str(name) for action in self._actions for name in action.choices or ()]
        hint = ""
        if message.startswith("unrecognized arguments:"):
            hint = suggestion(message.split()[2].split("=")[0], options, otherwise="")
        elif "invalid choice: '" in message:
            hint = suggestion(message.split("invalid choice: '")[1].split("'")[0], choices, otherwise="")
        self.exit(USAGE, f"{self.prog}: {message}{hint}\nTry: {self.prog} --help\n")


def build_parser(commands: Collection[str] = COMMANDS.keys()) -> argparse.ArgumentParser:
    """The parser. Only `commands` get their arguments; the others are listed."""
    parser = _CommandParser(
        prog="dgemma",
        description="Block-diffusion language models, first of all DiffusionGemma, run exactly.",
    )
    parser.add_argument("--version", action="version", version=f"dgemma {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, help_line in COMMANDS.items():
        sub = subparsers.add_parser(
            name,
            help=help_line,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # a script with --typ would break when --typo is added
        )
        if name in commands:
            module = importlib.import_module(f"dgemma.cli.{name.replace('-', '_')}")
            sub.description = module.__doc__
            sub.epilog = module.EXAMPLES
            module.add_arguments(sub)
            sub.set_defaults(run=module.run, parser=sub)
    return parser


def wait_without_spinning() -> None:
    """Let OpenMP's threads sleep soon after a product: beside other programs spinning is most of the time.

    GNU's library reads this once, when torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def main(argv: Sequence[str] | None = None) -> int:
    wait_without_spinning()
    argv = sys.argv[1:] if argv is None else argv
    typed = next((arg for arg in argv if not arg.startswith("-")), "")
    parser = build_parser([typed])
    if not argv:
        parser.print_help()
        return 0
    args, unknown = parser.parse_known_args(argv)
    args.arguments = [*argv]
    if unknown:
        # After an unknown option nobody knows which of the others are its values.
        options = [arg for arg in unknown if arg.startswith("-")]
        args.parser.error(f"unrecognized arguments: {' '.join(options or unknown)}")
    try:
        if args.command in IMPORT_TORCH_FIRST:
            from dgemma.cli.options import check_checkpoint
            from dgemma.cli.views.progress import Notice

            if getattr(args, "model", None) is not None:
                check_checkpoint(args.model)
            with Notice(f"starting dgemma {args.command} ..."):
                importlib.import_module("torch")
        status: int = args.run(args)
        sys.stdout.flush()  # here, where a reader that has left is not an error
    except DgemmaError as error:
        print(f"dgemma {args.command}: {error}", file=sys.stderr)
        return USAGE if isinstance(error, InputError) else FAILURE
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        print(
            f"dgemma {args.command}: out of memory; take smaller weights (dgemma quantize), a shorter "
            f"context or fewer requests at once, or close other programs. {_first_line(error)}",
            file=sys.stderr,
        )
        return FAILURE
    except KeyboardInterrupt:
        print(f"dgemma {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output left (`dgemma info x | head`): not an error, but stay silent.
        _drop_output()
        return 0
    except OSError as error:  # of the machine: a full disk, a directory that cannot be written
        place = error.filename or "the output"
        print(f"dgemma {args.command}: {place} cannot be read or written: {error.strerror}", file=sys.stderr)
        if error.filename is None:
            _drop_output()
        return FAILURE
    return status


def _drop_output() -> None:
    """What is still buffered goes nowhere, so that Python has nothing to say about it when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_out_of_memory(error: Exception) -> bool:
    # By name and by text: torch is imported by some commands only, and its error for a CPU has no type.
    names = {base.__name__ for base in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "DefaultCPUAllocator" in str(error)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0].partition("DefaultCPUAllocator: ")[2] or lines[0] if lines else ""


if __name__ == "__main__":
    sys.exit(main())
