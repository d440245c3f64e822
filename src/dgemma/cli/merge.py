"""Add an adapter into its base and write the result as a checkpoint of its own.

The result needs no adapter and runs at the base's speed. Tensors keep the dtype they have on disk; each sum
is computed in fp32 and rounded once. It goes from file to file, and holds one matrix in memory at a time."""

from __future__ import annotations

import argparse
from pathlib import Path

from dgemma.cli.views.progress import byte_progress

EXAMPLES = "example:\n  dgemma merge MODEL runs/poems/adapter poems-merged"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the base: a checkpoint directory, or a hub name")
    parser.add_argument("adapter", metavar="ADAPTER", help="directory of the adapter")
    parser.add_argument("out", metavar="OUT", help="directory to make; must not hold a checkpoint")


def run(args: argparse.Namespace) -> int:
    from dgemma.checkpoint.adapter_source import open_adapter
    from dgemma.checkpoint.hub import resolve
    from dgemma.checkpoint.merge import write_merged
    from dgemma.checkpoint.save import refuse_taken
    from dgemma.checkpoint.source import open_checkpoint

    out = Path(args.out)
    refuse_taken(out)
    source = open_checkpoint(resolve(args.model))
    adapter = open_adapter(args.adapter, source.config)
    total = sum(entry.nbytes for entry in (*source.entries.values(), *source.kept_aside))
    with byte_progress("merging", total) as advance:
        write_merged(out, source, adapter, on_bytes=advance)
    print(f"{out}: {len(adapter.factors)} weights of {args.model} with {args.adapter} added in")
    return 0
