"""Fetch a checkpoint from the hub into the local cache, and print its directory.

Only what dgemma reads is fetched: config.json, safetensors, tokenizer files; never a pickle. What is
there already is not fetched again. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are honoured."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dgemma.checkpoint.hub import EXAMPLE_NAME, PullPlan, fetch, plan_pull
from dgemma.cli.views.progress import byte_progress
from dgemma.machine import size_text

EXAMPLES = f"example:\n  dgemma pull {EXAMPLE_NAME}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="owner/name on the hub")
    parser.add_argument("--revision", metavar="R", help="a branch, a tag or a whole commit (default: main)")
    parser.add_argument("--json", action="store_true", help="print one JSON object for a program")


def run(args: argparse.Namespace) -> int:
    plan = plan_pull(args.name, revision=args.revision)
    sizes = f"{len(plan.files)} files, {size_text(plan.total_bytes)}"
    rest = f"the copy in the cache is whole, but {plan.note}" if plan.note else _rest(plan.missing_bytes)
    print(f"{plan.name}: {sizes}; {rest}", file=sys.stderr, flush=True)
    try:
        path = fetch_with_progress(plan)
    except KeyboardInterrupt:
        print(
            "dgemma pull: interrupted; files that are whole stay, the same command fetches the rest",
            file=sys.stderr,
        )
        return 130
    if args.json:
        found = {"name": plan.name, "path": str(path), "bytes": plan.total_bytes, "files": list(plan.files)}
        print(json.dumps(found, indent=2))
    else:
        print(path)
    return 0


def fetch_with_progress(plan: PullPlan) -> Path:
    with byte_progress("fetching", plan.missing_bytes) as advance:
        shown = 0

        def show(done: int, total: int) -> None:
            nonlocal shown
            advance(done - shown)
            shown = done

        return fetch(plan, show)


def _rest(missing_bytes: int) -> str:
    return f"{size_text(missing_bytes)} to fetch" if missing_bytes else "nothing to fetch"
