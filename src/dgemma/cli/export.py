"""Write a checkpoint for other runtimes: plain weights, an adapter added in; or a GGUF file; or for MLX.

A quantized model is dequantized. `--to vllm` leaves experts in packed integers (`dgemma quantize --format
int4`) and makes only the rest plain: vLLM reads it, Transformers does not. It goes from file to file; memory
holds one stored matrix. An interrupted export goes on when the same command is given again.

`--to gguf` writes one file (q8_0, or f16, bf16) with the provisional names of llama.cpp's open pull request.
`--to mlx` quantizes experts to 4 bits (or 8) and other linears to 8, as mlx-vlm reads them."""

from __future__ import annotations

import argparse
from pathlib import Path

from dgemma.cli.options import check_disk
from dgemma.cli.views.progress import byte_progress
from dgemma.errors import InputError

EXAMPLES = (
    "examples:\n"
    "  dgemma export MODEL-int4 MODEL-plain --adapter runs/poems/adapter\n"
    "  dgemma export MODEL-int4 MODEL-vllm --to vllm\n"
    "  dgemma export MODEL model-Q8_0.gguf --to gguf\n"
    "  dgemma export MODEL MODEL-mlx --to mlx --format 8bit"
)
_FORMATS = {"gguf": ("q8_0", "f16", "bf16"), "mlx": ("4bit", "8bit")}  # the first is the default


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint directory, a hub name, bundled:NAME")
    parser.add_argument("out", metavar="OUT", help="directory to make, or to go on with; a new .gguf file")
    parser.add_argument(
        "--to",
        choices=("hf", "vllm", "gguf", "mlx"),
        default="hf",
        help="hf: Transformers and vLLM read it; vllm: experts stay quantized; gguf; mlx (default: hf)",
    )
    parser.add_argument(
        "--format",
        choices=[name for names in _FORMATS.values() for name in names],
        help="of gguf: q8_0, f16 or bf16 (default: q8_0); of mlx: 4bit or 8bit (default: 4bit)",
    )
    parser.add_argument("--adapter", metavar="DIR", help="a LoRA adapter to add in (default: none)")


def run(args: argparse.Namespace) -> int:
    from dgemma.checkpoint.adapter_source import open_adapter
    from dgemma.checkpoint.export import RUNTIMES, plan_export, write_export
    from dgemma.checkpoint.hub import resolve
    from dgemma.checkpoint.mlx_export import plan_mlx
    from dgemma.checkpoint.save import refuse_taken
    from dgemma.checkpoint.source import open_checkpoint

    out = Path(args.out)
    name = _format(args.to, args.format)
    if args.to == "gguf":
        return _run_gguf(args, out, name)
    refuse_taken(out)
    source = open_checkpoint(resolve(args.model))
    adapter = None if args.adapter is None else open_adapter(args.adapter, source.config)
    if args.to == "mlx":
        export = plan_mlx(source, adapter, name=name)
    else:
        export = plan_export(source, adapter, to=args.to)
    check_disk(out, export.nbytes, "Choose another disk, or free some space.")
    with byte_progress("exporting", export.nbytes) as advance:
        write_export(out, export, on_bytes=advance)
    print(f"{out}: {args.model} for {RUNTIMES.get(args.to, f'MLX in {name}')}, {export.nbytes / 1e6:,.1f} MB")
    if export.num_double_scalars and args.to != "mlx":
        print(
            f"note: {export.num_double_scalars} of {export.num_layers} layers have a layer_scalar for each "
            "of their two passes; vLLM keeps one, and will compute other numbers."
        )
    return 0


def _format(to: str, asked: str | None) -> str:
    known = _FORMATS.get(to, ())
    if asked is not None and asked not in known:
        remedy = f"of --to {to} it is {' or '.join(known)}" if known else f"--to {to} has none"
        raise InputError.about("format", f"is {asked!r}; {remedy}.")
    return asked or (known[0] if known else "")


def _run_gguf(args: argparse.Namespace, out: Path, name: str) -> int:
    from dgemma.checkpoint.adapter_source import open_adapter
    from dgemma.checkpoint.gguf_export import plan_gguf, refuse_taken_file, write_gguf
    from dgemma.checkpoint.hub import resolve
    from dgemma.checkpoint.source import open_checkpoint

    refuse_taken_file(out)
    source = open_checkpoint(resolve(args.model))
    adapter = None if args.adapter is None else open_adapter(args.adapter, source.config)
    export = plan_gguf(source, adapter, name=name)
    check_disk(out, export.nbytes, "Choose another disk, or free some space.")
    with byte_progress("exporting", export.nbytes) as advance:
        write_gguf(out, export, on_bytes=advance)
    print(f"{out}: {args.model} in {name}, {export.nbytes / 1e6:,.1f} MB")
    print("note: the names of tensors are those of a llama.cpp pull request that is still open.")
    if export.num_left_out:
        print(f"note: {export.num_left_out} tensors of the vision tower are not in it.")
    return 0
