"""Compare another runtime with this one: where do they part?

RUNTIME runs in an environment of its own, which is made at the first use. Ten tiny checkpoints are made on
the spot, or MODEL, a checkpoint directory, is used. Compared are both passes layer by layer, with contexts
below, at and past the sliding window, with and without self-conditioning and after a commit; one step of the
sampler on given draws; a whole generation on given draws.

RUNTIME may be the address of a server with OpenAI's API that serves MODEL: compared are log-probabilities and
seeds, all that it shows. The exit status is 1 if they part, and 3 if RUNTIME cannot be installed here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.cli.options import read_key_file
from dgemma.cli.views.progress import Notice, print_line
from dgemma.cli.views.tables import Table, show
from dgemma.cli.views.terminal import print_styled
from dgemma.errors import InputError

if TYPE_CHECKING:
    from dgemma.conform.compare import Conformance

EXAMPLES = (
    "examples:\n"
    "  dgemma conform transformers\n"
    "  dgemma conform mlx-vlm --geometries 3\n"
    "  dgemma conform gemma-jax --source gemma\n"
    "  dgemma conform transformers my-checkpoint --json\n"
    "  dgemma conform http://127.0.0.1:8000/v1 my-checkpoint"
)
DIFFERENT = 1
NOT_INSTALLED = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runtime",
        metavar="RUNTIME",
        help="transformers, mlx-vlm, gemma-jax (-skip, -one-less), or the address of a server",
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a checkpoint directory (default: tiny ones)"
    )
    parser.add_argument("--geometries", type=int, metavar="N", help="of the tiny ones (default: all ten)")
    parser.add_argument("--source", metavar="DIR", help="of gemma-jax: a copy of google-deepmind/gemma")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="of a server: the key to send")
    parser.add_argument("--json", action="store_true", help="print one JSON object for a program")


def run(args: argparse.Namespace) -> int:
    from dgemma.conform.runtimes import NotInstalledError

    try:
        report, found = _server(args) if "://" in args.runtime else _runtime(args)
    except NotInstalledError as error:
        print_line(f"dgemma conform: {error}")
        return NOT_INSTALLED
    passed = all(one.passed for one in found)
    if args.json:
        print(json.dumps({**report, "passed": passed, "cases": [one.to_json() for one in found]}))
    else:
        _show(found)
    return 0 if passed else DIFFERENT


def _runtime(args: argparse.Namespace) -> tuple[dict[str, Any], list[Conformance]]:
    from dgemma.conform.geometries import GEOMETRIES
    from dgemma.conform.run import conform
    from dgemma.conform.runtimes import runtime_named

    count = len(GEOMETRIES) if args.geometries is None else args.geometries
    if not 1 <= count <= len(GEOMETRIES):
        raise InputError(f"--geometries is {count}; it must be between 1 and {len(GEOMETRIES)}.")
    if args.api_key_file is not None:
        raise InputError("--api-key-file is for a server; RUNTIME is none.")
    runtime = runtime_named(args.runtime).with_source(args.source)
    with Notice(f"{runtime.name} {', '.join(f'{k} {v}' for k, v in runtime.report.items())} ..."):
        found = list(conform(runtime, args.model, GEOMETRIES[:count]))
    return {"runtime": runtime.name, "versions": runtime.report}, found


def _server(args: argparse.Namespace) -> tuple[dict[str, Any], list[Conformance]]:
    from dgemma.conform.server import conform_server

    if args.model is None:
        raise InputError("a server is compared with the checkpoint that it serves: give MODEL.")
    if args.geometries is not None or args.source is not None:
        raise InputError("--geometries and --source are not for a server.")
    key = None if args.api_key_file is None else read_key_file(args.api_key_file)
    with Notice(f"{args.runtime} ..."):
        found = conform_server(args.runtime, args.model, key)
    return {"runtime": args.runtime, "versions": {}}, [found]


def _show(found: Sequence[Conformance]) -> None:
    rows = [
        [
            one.case,
            "none" if one.parting is None else one.parting.place,
            f"{one.largest:.1e}",
            str(one.compared),
            str(len(one.not_compared)),
        ]
        for one in found
    ]
    header = ["case", "first difference", "largest", "compared", "not"]
    show([Table(header=header, rows=rows, num_text_columns=2)])
    missing = dict.fromkeys(kind for one in found for kind in one.not_compared_kinds)
    lines = [f"not compared: {', '.join(missing)}"] if missing else []
    lines += dict.fromkeys(note for one in found for note in one.notes)
    print_styled([(line + "\n", "") for line in lines])
