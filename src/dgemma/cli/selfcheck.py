"""Compare the causal and the denoising pass with golden tensors of the reference, on one device and dtype.

The golden tensors are inside the package; no download. Takes seconds, at most two minutes. The
report can be pasted into an issue: GPUs and Macs are tested by their users."""

from __future__ import annotations

import argparse
import json

EXAMPLES = "examples:\n  dgemma selfcheck\n  dgemma selfcheck --device cuda --dtype bfloat16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps (default: cpu)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "both"), default="both", help="(default: both)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for a program")


def run(args: argparse.Namespace) -> int:
    from dgemma.selfcheck import check, report

    dtypes = ("float32", "bfloat16") if args.dtype == "both" else (args.dtype,)
    findings = check(args.device, dtypes)
    if args.json:
        print(json.dumps(findings.as_dict(), indent=2))
    else:
        print(report(findings))
    return 0 if findings.passed else 1
