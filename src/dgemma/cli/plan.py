"""How many replicas a load needs: a simulation of the scheduler, the KV cache and the router in virtual time.

Without MODEL the released size on --hardware, whose steps take as long as the cost model of
`dgemma bench --predict` says: nothing was measured on those devices by us. With MODEL its steps are measured
on this machine first.
A left-to-right server of the same size, with its own published efficiency, stands beside it."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dgemma.cli.options import add_load_arguments, check_checkpoint, check_figure_file, load_model
from dgemma.errors import InputError

if TYPE_CHECKING:
    from dgemma.plan.fleet import Fleet

EXAMPLES = (
    "examples:\n"
    "  dgemma plan --hardware h100x8 --rps 200 --prompt 1500 --answer 400 --p99 2.5 --price 2.5\n"
    "  dgemma plan --hardware dgx-spark --rps 1 --prompt 500 --answer 200 --p99 20 --svg plan.svg\n"
    "  dgemma plan bundled:text --rps 1 --prompt 60 --answer 60 --p99 10 --json"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="measured here (default: the released size)"
    )
    parser.add_argument("--hardware", metavar="DEVICE", help="h100, h100x8, rtx5090, dgx-spark, ...")
    parser.add_argument("--format", metavar="F", help="of the weights (default: the best that fits)")
    load = parser.add_argument_group("the load")
    load.add_argument("--rps", type=float, required=True, metavar="R", help="requests per second")
    load.add_argument("--prompt", type=int, default=1000, metavar="N", help="tokens (default: 1000)")
    load.add_argument("--answer", type=int, default=256, metavar="N", help="tokens (default: 256)")
    load.add_argument(
        "--spread", type=float, default=0.5, metavar="S",
        help="of lengths, sigma of a lognormal distribution (default: 0.5)",
    )  # fmt: skip
    load.add_argument(
        "--shared", type=int, default=0, metavar="N",
        help="tokens of the prompt that are one of --system-prompts (default: 0)",
    )  # fmt: skip
    load.add_argument(
        "--system-prompts", type=int, default=100, metavar="N", help="by Zipf's law (default: 100)"
    )
    load.add_argument("--turns", type=int, default=1, metavar="N", help="of a conversation (default: 1)")
    load.add_argument(
        "--p99", type=float, required=True, metavar="SECONDS", help="for 99 of 100 whole answers"
    )
    load.add_argument(
        "--requests", type=int, default=5000, metavar="N", help="of the last simulation (default: 5000)"
    )
    fleet = parser.add_argument_group("the replicas")
    fleet.add_argument("--steps", type=int, default=16, metavar="K", help="per canvas (default: 16)")
    fleet.add_argument("--max-num-seqs", type=int, default=16, metavar="N", help="of one (default: 16)")
    fleet.add_argument(
        "--mean-life", type=float, metavar="HOURS", help="of a replica until it fails (default: none fails)"
    )
    fleet.add_argument(
        "--start", type=float, default=60, metavar="SECONDS", help="of a new replica (default: 60)"
    )
    fleet.add_argument("--price", type=float, metavar="P", help="of a device for an hour")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw latencies and devices by load")
    add_load_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object for a program")


def run(args: argparse.Namespace) -> int:
    from dgemma.plan.page import draw, page
    from dgemma.plan.planner import Goal, size, traffic_facts
    from dgemma.plan.traffic import Traffic

    for name in ("steps", "max_num_seqs", "requests"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1.")
    if args.price is not None and not 0 <= args.price < math.inf:
        raise InputError(f"--price is {args.price:g}; it must be at least 0.")
    if args.svg is not None:  # not after minutes of simulating
        check_figure_file(args.svg)
    if (args.model is None) == (args.hardware is None):
        raise InputError("what shall be planned? Give --hardware DEVICE, or MODEL to measure it here.")
    if args.model is not None and args.format is not None:
        raise InputError("--format belongs to --hardware; MODEL is measured with the weights that it has.")
    traffic = Traffic(
        rate=args.rps, prompt=args.prompt, answer=args.answer, spread=args.spread, shared=args.shared,
        system_prompts=args.system_prompts, turns=args.turns,
    )  # fmt: skip
    traffic.check()
    goal = Goal(p99_s=args.p99, requests=args.requests)
    title, fleets = _fleets(args)
    plans = [
        size(fleet, traffic, goal, kind=kind, price=args.price, log=_log) for kind, fleet in fleets.items()
    ]
    if args.svg is not None:
        draw(plans, args.svg)
    if args.json:
        found = {"title": title, "traffic": traffic_facts(traffic), "p99_s": args.p99}
        print(json.dumps({**found, "plans": [plan.facts() for plan in plans]}, indent=2))
    else:
        print(page(title, traffic, goal, plans))
    return 0


def _fleets(args: argparse.Namespace) -> tuple[str, dict[str, Fleet]]:
    """What is simulated: a title, and a replica of each kind of server."""
    from dgemma.bench.predict import RELEASED, default_format
    from dgemma.plan.fleet import Fleet
    from dgemma.plan.hardware import Hardware, predicted_shape, shape_of

    longest = 8 * (args.prompt + args.answer) * args.turns
    options = {
        "start_s": args.start,
        "mean_life_s": float("inf") if args.mean_life is None else 3600 * args.mean_life,
    }
    if args.hardware is not None:
        hardware = Hardware.parse(args.hardware)
        shapes = {
            kind: predicted_shape(
                hardware, args.format, max_len=longest, causal=is_causal, max_num_seqs=args.max_num_seqs
            )
            for kind, is_causal in (("diffusion", False), ("left to right", True))
        }
        form = args.format or default_format(RELEASED, hardware.device)
        title = f"{hardware.device.label}, {form}: by the cost model, never run by us"
        return title, {
            kind: Fleet(shape=shape, replicas=1, steps=(args.steps,), **options)
            for kind, shape in shapes.items()
        }
    check_checkpoint(args.model)
    from dgemma.engine.open import free_bytes  # imports torch
    from dgemma.plan.measure import measure_times

    args.seed = 0
    lm = load_model(args)
    fleets = {}
    for kind, is_causal in (("diffusion", False), ("left to right", True)):
        shape = shape_of(
            measure_times(lm, max_num_seqs=args.max_num_seqs, causal=is_causal, log=_log),
            lm.config,
            cache_bytes=free_bytes(lm.device) // 2,
            max_len=longest,
            max_num_seqs=args.max_num_seqs,
            causal=is_causal,
        )
        fleets[kind] = Fleet(shape=shape, replicas=1, steps=(args.steps,), **options)
    return f"{args.model}, measured on this machine", fleets


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
