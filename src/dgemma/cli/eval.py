"""Run a task and report its scores with 95 % intervals, steps and seconds.

TASK is a file of JSON lines ({"prompt": ..., "response": ...}), a class of your own (task.py:TaskClass, whose
code is run), reasoning-gym:NAME, or sudoku, which may stand alone: its model comes with the package.
With --out each result is written as it comes, and the same command again
goes on where it ended."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dgemma.cli.options import (
    add_generation_arguments,
    check_checkpoint,
    check_output_file,
    generation_options,
    load_model,
    recording,
)
from dgemma.cli.views import tables
from dgemma.cli.views.progress import FirstFailures, count_progress
from dgemma.errors import InputError
from dgemma.evaluation.intervals import require_scipy
from dgemma.evaluation.report import EvaluationReport, compare
from dgemma.evaluation.results import ExampleResult, StoredRun, differences, read_results
from dgemma.evaluation.task import EvaluationPlan
from dgemma.evaluation.tasks.registry import BUNDLED_MODELS, open_task
from dgemma.sudoku.puzzles import BANDS

EXAMPLES = (
    "examples:\n"
    "  dgemma eval MODEL held-out.jsonl --limit 100 --batch 8 --out run.jsonl\n"
    "  dgemma eval MODEL held-out.jsonl --preset fast --compare run.jsonl\n"
    "  dgemma eval MODEL my_task.py:MyTask --json\n"
    "  dgemma eval MODEL loss:held-out.txt\n"
    "  dgemma eval sudoku --band hard --limit 100 --batch 50\n"
    "  dgemma eval MODEL reasoning-gym:chain_sum --max-tokens 64 --limit 50"
)


LOSS = "loss:"  # before a file: both losses on it, in place of answers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a checkpoint directory, or a hub name; none: the task's bundled model"
    )
    parser.add_argument(
        "task",
        metavar="TASK",
        nargs="?",
        help="FILE.jsonl, FILE.py:CLASS, reasoning-gym:NAME, sudoku, loss:FILE",
    )
    parser.add_argument("--band", choices=BANDS, help="of sudoku: puzzles of one difficulty (default: all)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N examples")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="answered together (default: 1)")
    parser.add_argument("--raw", action="store_true", help="continue prompts, without the chat template")
    parser.add_argument("--group", action="store_true", help="also by the task's groups")
    parser.add_argument("--json", action="store_true", help="print one JSON object for a program")
    parser.add_argument("--out", metavar="FILE", help="write results as they come; go on from it")
    parser.add_argument("--compare", metavar="FILE", help="another run's --out, compared by example")
    add_generation_arguments(parser)


def run(args: argparse.Namespace) -> int:
    # Check everything that can be checked before a large model is loaded.
    options = generation_options(args)
    plan = EvaluationPlan(
        limit=args.limit,
        batch=args.batch,
        seed=options.pop("seed", None),
        options=options,
        raw=args.raw,
        system=args.system,
        thinking=args.thinking,
    )
    _name_model_and_task(args)
    if args.task.startswith(LOSS):
        return _print_both_sides(args)
    check_checkpoint(args.model)
    require_scipy()
    task = open_task(args.task)
    other = None if args.compare is None else read_results(args.compare)
    if args.out is not None:
        check_output_file(args.out, "--out")
    model = args.model if args.adapter is None else f"{args.model} with {args.adapter}"
    lm = load_model(args)
    from dgemma.evaluation.runner import Evaluation  # imports torch: what is wrong is said before

    evaluation = Evaluation(lm, task, plan, out=args.out, model=model)
    if evaluation.num_stored:
        print(f"going on from {args.out}, which has {evaluation.num_stored} results", file=sys.stderr)
    status = 0
    try:
        with recording(lm, args.trace, "eval"), _progress(evaluation.total) as advance:
            for result in evaluation.run():
                advance(result, args.stats)
    except KeyboardInterrupt:
        status = 130
    report = evaluation.report()
    if report.results:
        _print(args, report, other)
    if status == 130:
        print(f"dgemma eval: interrupted after {report.n} examples", file=sys.stderr)
    elif report.stopped is not None:
        print(f"dgemma eval: {report.stopped}", file=sys.stderr)
        status = 1
    elif report.failed == report.n:
        print("dgemma eval: every example failed", file=sys.stderr)
        status = 1
    return status


def _print_both_sides(args: argparse.Namespace) -> int:
    for name in ("out", "compare", "trace"):
        if getattr(args, name) is not None:
            raise InputError(f"--{name} is for answers; of {LOSS}FILE there are none. Drop it.")
    lm = load_model(args)
    from dgemma.training.both_sides import measure_both_sides

    sides = measure_both_sides(lm, args.task.removeprefix(LOSS), limit=args.limit, batch=args.batch)
    print(json.dumps(sides.as_dict(), indent=2) if args.json else sides.report())
    return 0


def _name_model_and_task(args: argparse.Namespace) -> None:
    """`eval MODEL TASK`; and for a task with a bundled model `eval TASK` or `eval TASK MODEL`."""
    first = str(args.model).partition(":")[0]
    if first in BUNDLED_MODELS and not Path(args.model).exists():
        args.model, args.task = args.task or BUNDLED_MODELS[first], args.model
    elif args.task is None:
        raise InputError(f"no task; give MODEL and TASK, or one of {', '.join(BUNDLED_MODELS)} alone.")
    if args.band is not None:
        if args.task != "sudoku":
            raise InputError(f"--band is for the task sudoku; the task here is {args.task!r}.")
        args.task = f"sudoku:{args.band}"


def _print(args: argparse.Namespace, report: EvaluationReport, other: StoredRun | None) -> None:
    compared = None if other is None else compare(other.results.values(), report.results)
    changed = [] if other is None else differences(report.settings, other.settings)
    if args.json:
        found = report.to_json()
        if compared is not None:
            found["comparison"] = {
                "with": args.compare,
                "differences": {name: difference.to_json() for name, difference in compared.items()},
                "settings": changed,
            }
        print(json.dumps(found))
        return
    shown = [tables.score_table(report), tables.fact_table(report)]
    if args.group:
        shown.append(tables.group_table(report))
        if not report.groups:
            print(f"task {report.task!r} has no groups", file=sys.stderr)
    if compared is not None:
        shown.append(tables.comparison_table(compared))
    tables.show(shown)
    if changed:
        print("compared with other settings: " + "; ".join(changed), file=sys.stderr)


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[ExampleResult, bool], None]]:
    """Yields `advance(result, with_stats)`."""
    failures = FirstFailures(more="more examples failed; --json and --out have all reasons")

    def lines(result: ExampleResult, with_stats: bool) -> Iterator[str]:
        failure = None if result.failure is None else f"example {result.number} failed: {result.failure}"
        yield from failures.lines(failure)
        if with_stats:
            yield _stats(result)

    with count_progress("eval", total, "examples") as advance:
        yield lambda result, with_stats: advance(lines(result, with_stats))


def _stats(result: ExampleResult) -> str:
    scores = ", ".join(f"{name} {value:.3g}" for name, value in result.scores.items()) or "no scores"
    written = result.written
    if written is None:
        return f"example {result.number}: {scores}; seed {result.seed}"
    steps = ", ".join(map(str, written.steps)) or "none, written left to right"
    return (
        f"example {result.number}: {scores}; {written.tokens} tokens, {written.seconds:.2f} s, steps {steps}"
        f", {written.finish_reason}; seed {result.seed}"
    )
