"""Make a checkpoint with random weights in the released layout, with a small real tokenizer.

It generates noise, not language: it is for trying code, tests and measurements. With --quantize the weights
are quantized as they are made, so a model that is too large in bf16 is never written in bf16."""

from __future__ import annotations

import argparse
from pathlib import Path

from dgemma.checkpoint.parameter_count import count_parameters
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.quantized.quantization_config import NAMES, quantization_config_for
from dgemma.cli.options import check_disk
from dgemma.cli.views.progress import byte_progress
from dgemma.model.config import ModelConfig

EXAMPLES = "presets:\n" + "\n".join(f"  {name:<8} {p.purpose}" for name, p in PRESETS.items())
_DTYPES = {"bfloat16": "BF16", "float32": "F32"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="directory to make; must not hold a checkpoint")
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="geometry (default: tiny)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: 0)")
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="bfloat16", help="of the weights (default: bfloat16)"
    )
    parser.add_argument(
        "--quantize", choices=NAMES, metavar="FORMAT", help=f"quantized: {', '.join(NAMES)} (default: not)"
    )
    parser.add_argument(
        "--config-only", action="store_true", help="write config.json alone, enough for dgemma info"
    )


def run(args: argparse.Namespace) -> int:
    from dgemma.checkpoint.random_weights import write_random
    from dgemma.checkpoint.save import refuse_taken, write_config

    config = PRESETS[args.preset].config
    out = Path(args.out)
    refuse_taken(out)
    if args.quantize:
        return _quantized(args, out, config)
    if args.config_only:
        write_config(out, config.to_json())
        print(f"{out}: config.json of preset {args.preset}")
        return 0
    item = 2 if args.dtype == "bfloat16" else 4
    total = count_parameters(config).total_parameters * item
    check_disk(out, total)
    with byte_progress("writing", total) as advance:
        write_random(out, config, dtype=_DTYPES[args.dtype], seed=args.seed, on_bytes=advance)
    print(f"{out}: preset {args.preset}, {total / 1e6:,.1f} MB of random {args.dtype} weights")
    return 0


def _quantized(args: argparse.Namespace, out: Path, config: ModelConfig) -> int:
    from dgemma.checkpoint.quantized.writer import (
        disk_bytes,
        from_random,
        shards_of,
        write_quantized,
    )
    from dgemma.checkpoint.random_weights import tokenizer_files

    plan = quantization_config_for(args.quantize, config)
    with tokenizer_files() as companions:
        original = from_random(config, seed=args.seed, companions=companions)
        total = disk_bytes(shards_of(original, plan))
        check_disk(out, total)
        with byte_progress("writing", total) as advance:
            write_quantized(out, original, plan, on_bytes=advance)
    print(f"{out}: preset {args.preset}, {total / 1e6:,.1f} MB of random weights in {args.quantize}")
    return 0
