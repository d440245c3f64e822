"""Write a quantized checkpoint, in the layout of compressed-tensors; for other runtimes see `dgemma export`.

Experts, nine tenths of the released model, get the bits of the format; the other linears and the embedding
get eight; routers and norms stay as they are. Memory holds one block of rows. An interrupted run goes on
where it stopped when the same command is given again.

At the end a report compares the two models: how far one step's distributions are apart, how often the
argmax tokens agree, and the denoising steps per canvas. Quantized weights can need more steps."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.checkpoint.quantized.quantization_config import NAMES, quantization_config_for
from dgemma.cli.options import check_disk, load_with_progress
from dgemma.cli.views.progress import byte_progress
from dgemma.evaluation.task import EvaluationPlan, Task
from dgemma.evaluation.tasks.registry import BUNDLED_MODELS, open_task
from dgemma.machine import memory_facts, size_text

if TYPE_CHECKING:
    from dgemma.evaluation.quantized_report import QuantizedReport

EXAMPLES = (
    "examples:\n"
    "  dgemma quantize MODEL MODEL-int4 --format int4\n"
    "  dgemma quantize bundled:sudoku sudoku-int8 --format int8 --json"
)
_EXTRA_BYTES = 2_000_000_000  # beside the weights of both


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="IN", help="a plain checkpoint: a directory, a hub name, bundled:NAME"
    )
    parser.add_argument("out", metavar="OUT", help="directory to make, or to go on with")
    parser.add_argument("--format", choices=NAMES, default="int4", help="of the experts (default: int4)")
    parser.add_argument("--no-report", action="store_true", help="write only; do not compare the two models")
    parser.add_argument("--task", metavar="TASK", help="also compare scores: a task as of dgemma eval")
    parser.add_argument("--limit", type=int, default=100, metavar="N", help="examples of it (default: 100)")
    parser.add_argument("--json", action="store_true", help="print one JSON object for a program")


def run(args: argparse.Namespace) -> int:
    from dgemma.checkpoint.hub import resolve
    from dgemma.checkpoint.quantized.writer import (
        disk_bytes,
        from_checkpoint,
        shards_of,
        write_quantized,
    )
    from dgemma.checkpoint.save import refuse_taken
    from dgemma.checkpoint.source import open_checkpoint

    # What the report would refuse is refused now: the work before it may take an hour.
    task = None if args.no_report else _task(args)
    EvaluationPlan(limit=args.limit)
    source = open_checkpoint(resolve(args.model))
    original = from_checkpoint(source)
    plan = quantization_config_for(args.format, source.config)
    refuse_taken(Path(args.out))
    total = disk_bytes(shards_of(original, plan))
    check_disk(Path(args.out), total, "Choose a format of fewer bits, or free some space.")
    with byte_progress("quantizing", total) as advance:
        write_quantized(args.out, original, plan, on_bytes=advance)
    report, unavailable_reason = (
        _report(args, task, source.nbytes + total) if not args.no_report else (None, "--no-report")
    )
    if args.json:
        facts = {
            "format": args.format,
            "bytes": total,
            "plain_bytes": source.nbytes,
            "not_compared": unavailable_reason,
        }
        print(json.dumps({**facts, "report": None if report is None else report.to_json()}, indent=2))
        return 0
    before = f"where {args.model} has {source.nbytes / 1e6:,.1f} MB"
    print(f"{args.out}: {args.format}, {total / 1e6:,.1f} MB {before}")
    if report is not None:
        print(report.page())
    elif not args.no_report:
        print(f"not compared: {unavailable_reason}")
    return 0


def _task(args: argparse.Namespace) -> Task[Any] | None:
    spec = args.task or next((name for name, model in BUNDLED_MODELS.items() if model == args.model), None)
    return None if spec is None else open_task(spec)


def _report(
    args: argparse.Namespace, task: Task[Any] | None, both_bytes: int
) -> tuple[QuantizedReport | None, str | None]:
    from dgemma.evaluation.quantized_report import compare, prompts_for

    available = memory_facts().available_bytes
    needed = both_bytes + _EXTRA_BYTES
    if needed > available:
        return None, f"both models need {size_text(needed)} of memory, {size_text(available)} are free"
    plain = load_with_progress(args.model)
    quantized = load_with_progress(args.out)
    return compare(plain, quantized, prompts_for(plain, task), task=task, limit=args.limit), None
