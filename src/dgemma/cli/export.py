"""Write a checkpoint for Transformers and vLLM: plain weights, an adapter added in.

A quantized model is dequantized. `--to vllm` leaves experts in packed integers (`dgemma quantize --format
int4`) and makes only the rest plain: vLLM reads it, Transformers does not. It goes from file to file; memory
holds one stored matrix. An interrupted export goes on when the same command is given again."""

from __future__ import annotations

import argparse
from pathlib import Path

from dgemma.cli.options import check_disk
from dgemma.cli.views.progress import byte_progress

EXAMPLES = (
    "examples:\n"
    "  dgemma export MODEL-int4 MODEL-plain --adapter runs/poems/adapter\n"
    "  dgemma export MODEL-int4 MODEL-vllm --to vllm"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint directory, a hub name, bundled:NAME")
    parser.add_argument("out", metavar="OUT", help="directory to make, or to go on with")
    parser.add_argument(
        "--to",
        choices=("hf", "vllm"),
        default="hf",
        help="hf: both read it; vllm: experts stay quantized (default: hf)",
    )
    parser.add_argument("--adapter", metavar="DIR", help="a LoRA adapter to add in (default: none)")


def run(args: argparse.Namespace) -> int:
    from dgemma.checkpoint.adapter_source import open_adapter
    from dgemma.checkpoint.export import RUNTIMES, plan_export, write_export
    from dgemma.checkpoint.hub import resolve
    from dgemma.checkpoint.save import refuse_taken
    from dgemma.checkpoint.source import open_checkpoint

    out = Path(args.out)
    refuse_taken(out)
    source = open_checkpoint(resolve(args.model))
    adapter = None if args.adapter is None else open_adapter(args.adapter, source.config)
    export = plan_export(source, adapter, to=args.to)
    written = sum(file.stat().st_size for file in out.glob("*.safetensors")) if out.is_dir() else 0
    check_disk(out, export.nbytes - written, "Choose another disk, or free some space.")
    with byte_progress("exporting", export.nbytes) as advance:
        write_export(out, export, on_bytes=advance)
    print(f"{out}: {args.model} for {RUNTIMES[args.to]}, {export.nbytes / 1e6:,.1f} MB")
    if export.num_double_scalars:
        print(
            f"note: {export.num_double_scalars} of {export.num_layers} layers have a layer_scalar for each "
            "of their two passes; vLLM keeps one, and will compute other numbers."
        )
    return 0
