"""Measure a model here: seconds per step, commit and causal token, committed tokens/s, peak memory.

Every canvas takes exactly --steps steps, whatever the model would write, and speed counts committed tokens,
end to end. With Transformers installed the reference runs in turn on the same weights: trust the ratio more
than the seconds, and read the spread. Both models are then in memory at once."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from dgemma.cli.options import add_load_arguments, load_model
from dgemma.machine import inspect_machine, package_versions

EXAMPLES = "example:\n  dgemma bench MODEL --steps 8 --canvases 2 --rounds 5 --json > figures.json"
_UNITS = {
    "seconds_per_step": ("denoise step", "s"),
    "seconds_per_commit": ("commit", "s"),
    "seconds_per_causal_token": ("causal token", "s"),
    "tokens_per_second": ("committed tokens", "/s"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint directory, bundled:text, or a hub name")
    parser.add_argument("--prompt-tokens", type=int, default=256, metavar="N", help="(default: 256)")
    parser.add_argument("--canvases", type=int, default=2, metavar="N", help="per answer (default: 2)")
    parser.add_argument("--steps", type=int, default=8, metavar="K", help="per canvas (default: 8)")
    parser.add_argument("--causal-tokens", type=int, default=16, metavar="N", help="(default: 16)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measured in turn (default: 3)")
    parser.add_argument("--no-reference", action="store_true", help="do not load Transformers' model")
    add_load_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object for a program")


def run(args: argparse.Namespace) -> int:
    from dgemma.bench.model_bench import BenchPlan, run_bench
    from dgemma.bench.reference import TimedReference, load_reference
    from dgemma.checkpoint.hub import resolve
    from dgemma.errors import InputError

    for name in ("prompt_tokens", "canvases", "steps", "causal_tokens", "rounds"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1.")
    plan = BenchPlan(
        prompt_tokens=args.prompt_tokens,
        canvases=args.canvases,
        steps=args.steps,
        causal_tokens=args.causal_tokens,
        rounds=args.rounds,
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
    found = run_bench(lm, reference, plan, log=lambda line: print(line, file=sys.stderr, flush=True))
    machine = inspect_machine()
    found["machine"] = {"processor": machine.processor, "cores": machine.cores}
    found["versions"] = {name: version for name, version in package_versions().items() if version}
    print(json.dumps(found, indent=2) if args.json else _page(found))
    return 0


def _page(found: dict[str, Any]) -> str:
    plan = found["plan"]
    lines = [
        f"{found['machine']['processor']}, {found['machine']['cores']} cores; {found['dtype']} on "
        f"{found['device']}; prompt of {plan['prompt_tokens']}, {plan['canvases']} canvases of "
        f"{plan['steps']} steps; median (least-most) of {plan['rounds']}",
        f"{'':<20}{'dgemma':>32}"
        + (f"{'reference':>32}{'dgemma is faster by':>28}" if "reference" in found else ""),
    ]
    for name, (label, unit) in _UNITS.items():
        if name not in found["dgemma"]:  # one canvas alone has no commit
            continue
        cells = [_spread(found["dgemma"][name], unit)]
        if "reference" in found:
            cells += [
                _spread(found["reference"][name], unit),
                _spread(found["times_faster"][name], "x"),
            ]
        widths = (32, 32, 28)
        lines.append(f"{label:<20}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=False)))
    peaks = [
        "unknown" if size is None else f"{size / 1e6:,.0f} MB" for size in found["peak_extra_bytes"].values()
    ]
    lines.append(f"{'peak extra memory':<20}" + "".join(f"{peak:>32}" for peak in peaks))
    lines.append(f"{'weights':<20}{found['weight_bytes'] / 1e6:>29,.0f} MB")
    return "\n".join(lines)


def _spread(values: dict[str, float], unit: str) -> str:
    return f"{values['median']:.4g}{unit} ({values['min']:.4g}-{values['max']:.4g})"
