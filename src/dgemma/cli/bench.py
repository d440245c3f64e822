"""Measure a model here, against the reference and left to right; or a server; or predict a device.

MODEL: every canvas takes exactly --steps steps, whatever the model would write, and speed counts committed
tokens, end to end. With Transformers installed the reference runs in turn on the same weights: trust the
ratio more than the seconds, and read the spread. Both models are then in memory at once. What does not fit
into --time-limit is left out, by name.
--server URL: requests arrive at random times at --rate, or from --clients, at any OpenAI-compatible server.
--predict DEVICE: the cost model of the released size, with published figures beside it; nothing is run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dgemma.cli.options import (
    add_load_arguments,
    check_checkpoint,
    check_figure_file,
    load_model,
    read_key_file,
)
from dgemma.errors import InputError
from dgemma.machine import inspect_machine, package_versions

EXAMPLES = (
    "examples:\n"
    "  dgemma bench MODEL --steps 8 --rounds 5 --svg figures.svg\n"
    "  dgemma bench MODEL --time-limit 120 --no-reference --json > figures.json\n"
    "  dgemma bench --server http://127.0.0.1:8000 --rate 1 --rate 2 --latency-target 5\n"
    "  dgemma bench --predict rtx5090"
)
_AT_LEAST_1 = ("prompt_tokens", "canvases", "steps", "causal_tokens", "rounds", "requests", "max_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?",
        help="a checkpoint directory, bundled:text, or a hub name; of a server: the model's name there",
    )  # fmt: skip
    parser.add_argument("--prompt-tokens", type=int, default=256, metavar="N", help="(default: 256)")
    parser.add_argument("--canvases", type=int, default=2, metavar="N", help="per answer (default: 2)")
    parser.add_argument("--steps", type=int, metavar="K", help="per canvas (default: 8; to predict: 16)")
    parser.add_argument("--causal-tokens", type=int, default=16, metavar="N", help="(default: 16)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measured in turn (default: 3)")
    parser.add_argument(
        "--lengths", type=_numbers, metavar="N,N", help="of replies, in tokens (default: 16,64,256,1024)"
    )
    parser.add_argument(
        "--concurrency", type=_numbers, metavar="N,N", help="answers at once (default: 1,2,4,8,16)"
    )
    parser.add_argument(
        "--time-limit", type=float, default=600, metavar="SECONDS", help="of all parts (default: 600)"
    )
    parser.add_argument("--no-reference", action="store_true", help="do not load Transformers' model")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw replies by length and concurrency")
    add_load_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object for a program")
    server = parser.add_argument_group("a server")
    server.add_argument("--server", metavar="URL", help="of any OpenAI-compatible server")
    server.add_argument(
        "--rate", type=float, action="append", metavar="R", help="requests per second; repeat (default: 1)"
    )
    server.add_argument(
        "--clients", type=int, action="append", metavar="N",
        help="so many clients, each asking when its last answer has come; repeat",
    )  # fmt: skip
    server.add_argument("--requests", type=int, default=50, metavar="N", help="per rate (default: 50)")
    server.add_argument("--max-tokens", type=int, default=64, metavar="N", help="per reply (default: 64)")
    server.add_argument(
        "--latency-target", type=float, default=10, metavar="SECONDS", help="of goodput (default: 10)"
    )
    server.add_argument("--api-key-file", type=Path, metavar="FILE", help="the key to send (default: none)")
    predict = parser.add_argument_group("a prediction")
    predict.add_argument("--predict", metavar="DEVICE", help="h100, rtx5090, dgx-spark, m4-max, ...")
    predict.add_argument("--format", metavar="F", help="of the weights (default: the best that fits)")


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} has to be whole numbers from 1, such as 16,64")
    return tuple(int(part) for part in parts)


def run(args: argparse.Namespace) -> int:
    for name in _AT_LEAST_1:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
    if args.svg is not None:  # not after minutes of measuring
        check_figure_file(args.svg)
    if not args.time_limit > 0:
        raise InputError(f"--time-limit is {args.time_limit:g}; it must be more than 0 seconds.")
    if args.server is not None and args.predict is not None:
        raise InputError("--server and --predict are two things; give one of them.")
    other = "--server" if args.server is not None else "--predict" if args.predict is not None else None
    if args.svg is not None and other is not None:
        raise InputError(f"--svg is for MODEL; with {other} there is no figure. Drop it.")
    if args.predict is not None and args.model is not None:
        raise InputError("--predict is for the released size; drop MODEL, or --predict.")
    if args.server is not None:
        return _measure_server(args)
    if args.predict is not None:
        return _predict(args)
    if args.model is None:
        raise InputError("what shall be measured? Give MODEL, --server URL, or --predict DEVICE.")
    return _measure_model(args)


def _measure_model(args: argparse.Namespace) -> int:
    check_checkpoint(args.model)
    from dgemma.bench.model_bench import BenchPlan, ModelBench  # imports torch
    from dgemma.bench.reference import TimedReference, load_reference
    from dgemma.bench.report import page, write_figure
    from dgemma.checkpoint.hub import resolve

    plan = BenchPlan(
        prompt_tokens=args.prompt_tokens,
        canvases=args.canvases,
        steps=args.steps or BenchPlan.steps,
        causal_tokens=args.causal_tokens,
        rounds=args.rounds,
        lengths=args.lengths or BenchPlan.lengths,
        concurrency=args.concurrency or BenchPlan.concurrency,
        time_limit_s=args.time_limit,
    )
    path = resolve(args.model)
    args.seed = 0  # a figure shall not depend on what else runs now
    lm = load_model(args)
    reference = None
    if not args.no_reference and lm.device.type != "cpu":
        print(f"The reference is timed on the CPU only, not on {lm.device}.", file=sys.stderr)
    elif not args.no_reference:
        loaded = load_reference(path, lm.dtype)
        if loaded is None:
            print("Transformers with DiffusionGemma is not installed: no reference.", file=sys.stderr)
        else:
            reference = TimedReference(loaded)
    found = ModelBench(lm, reference, plan, _log).run()
    machine = inspect_machine()
    found["machine"] = {
        "processor": machine.processor, "cores": machine.cores, "features": machine.cpu_features,
    }  # fmt: skip
    found["versions"] = {name: version for name, version in package_versions().items() if version}
    _print(args, found, page)
    if args.svg is not None:
        write_figure(found, args.svg)
    return 0


def _measure_server(args: argparse.Namespace) -> int:
    from dgemma.bench.server_bench import LoadPlan, page, run_server_bench

    clients = tuple(args.clients or ())
    plan = LoadPlan(
        url=args.server,
        model=args.model,
        rates=tuple(args.rate or (() if clients else (1.0,))),
        concurrency=clients,
        requests=args.requests,
        max_tokens=args.max_tokens,
        latency_target_s=args.latency_target,
        api_key=None if args.api_key_file is None else read_key_file(args.api_key_file),
    )
    _print(args, run_server_bench(plan, _log), page)
    return 0


def _predict(args: argparse.Namespace) -> int:
    from dgemma.bench.predict_page import predict_json, predict_page

    options: dict[str, Any] = {} if args.steps is None else {"steps": args.steps}
    if args.json:
        print(json.dumps(predict_json(args.predict, args.format, **options), indent=2))
    else:
        print(predict_page(args.predict, args.format, **options))
    return 0


def _print(args: argparse.Namespace, found: dict[str, Any], page: Any) -> None:
    print(json.dumps(found, indent=2) if args.json else page(found))


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
