"""Compare another runtime with this one: where do they part?

RUNTIME runs in an environment of its own, which is made at the first use. Ten tiny checkpoints are made on
the spot, or MODEL, a checkpoint directory, is used. Compared are both passes layer by layer, with contexts
below, at and past the sliding window, with and without self-conditioning and after a commit; one step of the
sampler on given draws; a whole generation on given draws. The exit status is 1 if they part."""

from __future__ import annotations

import argparse
import json

from dgemma.cli.views.progress import Notice
from dgemma.cli.views.tables import Table, show
from dgemma.errors import InputError

EXAMPLES = (
    "examples:\n"
    "  dgemma conform transformers\n"
    "  dgemma conform mlx-vlm --geometries 3\n"
    "  dgemma conform transformers my-checkpoint --json"
)
DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runtime", metavar="RUNTIME", help="transformers or mlx-vlm")
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a checkpoint directory (default: tiny ones)"
    )
    parser.add_argument("--geometries", type=int, metavar="N", help="of the tiny ones (default: all ten)")
    parser.add_argument("--json", action="store_true", help="print one JSON object for a program")


def run(args: argparse.Namespace) -> int:
    from dgemma.conform.geometries import GEOMETRIES
    from dgemma.conform.run import conform
    from dgemma.conform.runtimes import runtime_named

    count = len(GEOMETRIES) if args.geometries is None else args.geometries
    if not 1 <= count <= len(GEOMETRIES):
        raise InputError(f"--geometries is {count}; it must be between 1 and {len(GEOMETRIES)}.")
    runtime = runtime_named(args.runtime)
    with Notice(f"{runtime.name} {' '.join(f'{k} {v}' for k, v in runtime.versions.items())} ..."):
        found = list(conform(runtime, args.model, GEOMETRIES[:count]))
    passed = all(one.passed for one in found)
    if args.json:
        report = {"runtime": runtime.name, "versions": runtime.versions, "passed": passed}
        print(json.dumps({**report, "cases": [one.to_json() for one in found]}))
        return 0 if passed else DIFFERENT
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
    show(
        [
            Table(
                header=["case", "first difference", "largest", "compared", "not"],
                rows=rows,
                num_text_columns=2,
            )
        ]
    )
    return 0 if passed else DIFFERENT
