"""Delete a model from the hub cache, with all its revisions, and say how much space that frees.

Only the cache is touched: a directory of yours is never deleted, nor a model of the package. On a terminal
the command asks first; in a script give --yes."""

from __future__ import annotations

import argparse
import sys

from dgemma.checkpoint.hub_cache import plan_deletion
from dgemma.errors import InputError
from dgemma.machine import size_text

EXAMPLES = "example:\n  dgemma rm someone/a-model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="owner/name, as dgemma list shows it")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> int:
    deletion = plan_deletion(args.name)
    revisions = "1 revision" if deletion.num_revisions == 1 else f"{deletion.num_revisions} revisions"
    size = size_text(deletion.nbytes)
    if not args.yes:
        if not sys.stdin.isatty():
            raise InputError(
                f"{deletion.name} ({size}, {revisions}) was not deleted: without a terminal nobody can be "
                "asked. Give --yes."
            )
        if not _agrees(f"delete {deletion.name} ({size}, {revisions}) from {deletion.path.parent}? [y/N] "):
            print("nothing was deleted", file=sys.stderr)
            return 1
    deletion.execute()
    print(f"deleted {deletion.name}: {size} freed")
    return 0


def _agrees(question: str) -> bool:
    """To stderr, where it is seen even if stdout is a file. Ctrl-D is a no."""
    print(question, end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer.endswith("\n"):
        print(file=sys.stderr)
    return answer.strip().lower() in ("y", "yes")
