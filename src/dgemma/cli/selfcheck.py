"""Compare the causal and the denoising pass with golden tensors of the reference, on one device and dtype.

The golden tensors are inside the package; no download. Takes seconds, at most two minutes. The
report can be pasted into an issue: GPUs and Macs are tested by their users.

With a MODEL, how well its causal pass and its canvases predict a short English text, too: decode lossless
and verified rest on the causal pass."""

from __future__ import annotations

import argparse
import json
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dgemma.training.both_sides import BothSides

EXAMPLES = (
    "examples:\n  dgemma selfcheck\n  dgemma selfcheck --device cuda --dtype bfloat16\n"
    "  dgemma selfcheck bundled:text"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a checkpoint to look at as well")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps (default: cpu)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "both"), default="both", help="(default: both)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for a program")


def _both_sides(model: str, device: str) -> BothSides:
    from dgemma import load
    from dgemma.training.both_sides import measure_both_sides

    text = (resources.files("dgemma") / "data" / "selfcheck.txt").read_text(encoding="utf-8")
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    # Each several times, with other noise: few canvases have little or much of it.
    return measure_both_sides(load(model, device=device), [{"text": part} for part in paragraphs * 8])


def run(args: argparse.Namespace) -> int:
    from dgemma.selfcheck import check, report

    dtypes = ("float32", "bfloat16") if args.dtype == "both" else (args.dtype,)
    sides = None if args.model is None else _both_sides(args.model, args.device)
    findings = check(args.device, dtypes)
    if args.json:
        found = findings.as_dict() | ({} if sides is None else {"model": args.model, **sides.as_dict()})
        print(json.dumps(found, indent=2))
    else:
        print(report(findings))
        if sides is not None:
            print(f"\n{args.model} on a short English text:\n{sides.report()}")
    return 0 if findings.passed else 1
