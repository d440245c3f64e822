"""Run a model by its name: choose weights that fit this machine, fetch them, and answer.

Without a prompt, on a terminal, a conversation begins (see dgemma chat). A model that does not fit as it is
published is taken in a quantized form: one that others have published, else it is quantized here, once, into
the cache. What was chosen, how much is fetched and how long a step may take is said before."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dgemma.checkpoint.hub import (
    EXAMPLE_NAME,
    PullPlan,
    is_on_hub,
    plan_pull,
    published_quantized,
    resolve,
    resolve_config,
)
from dgemma.checkpoint.parameter_count import count_parameters
from dgemma.checkpoint.source import read_config
from dgemma.cli import chat, generate
from dgemma.cli.images import add_image_arguments
from dgemma.cli.options import (
    add_generation_arguments,
    add_pin_arguments,
    add_response_format_arguments,
    check_checkpoint,
    check_model,
    check_trace,
    pin_options,
)
from dgemma.cli.pull import fetch_with_progress
from dgemma.cli.views.progress import Notice, byte_progress, print_line
from dgemma.errors import CheckpointError, InputError
from dgemma.gguf_file import is_gguf
from dgemma.machine import memory_facts, size_text

if TYPE_CHECKING:
    import torch

    from dgemma.model.config import ModelConfig

EXAMPLES = (
    "examples:\n"
    f'  dgemma run {EXAMPLE_NAME} "Why is the sky blue?"\n'
    f'  dgemma run {EXAMPLE_NAME} "What is this?" --image photo.jpg\n'
    "  dgemma run bundled:text\n"
    f"  dgemma run {EXAMPLE_NAME} --format int4"
)
FORMATS = {"int8": "int8", "int4": "4bit"}  # of `dgemma quantize` -> their name in `count_parameters`
# What is needed beside the weights: activations, one canvas's logits, the interpreter.
_EXTRA_BYTES = 2_000_000_000


@dataclass(frozen=True)
class WeightsChoice:
    """The weights to run."""

    name: str
    format: str | None  # to quantize to here; None: as it is
    num_bytes: int  # of the weights in memory
    why: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a hub name, a checkpoint directory, or bundled:text")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the prompt; none: a conversation")
    parser.add_argument(
        "--format", choices=("auto", "plain", *FORMATS), default="auto",
        help="of the weights; auto: what fits (default: auto)",
    )  # fmt: skip
    parser.add_argument("--raw", action="store_true", help="continue the text, without the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object for a program")
    parser.set_defaults(tensor_parallel=1)
    add_generation_arguments(parser)
    add_image_arguments(parser)
    add_response_format_arguments(parser)
    add_pin_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_model(args.model, args.prompt, "run")
    check_checkpoint(args.model)
    check_trace(args)
    is_chat = args.prompt is None and sys.stdin.isatty() and not args.raw and not args.json
    if pin_options(args) and is_chat:
        raise InputError("--pins and --canvas are of one answer; give the prompt too.")

    def choose_weights() -> str:
        return str(prepare(args.model, args.format, args.device))

    return chat.run(args, choose_weights) if is_chat else generate.run(args, choose_weights)


def prepare(model: str, wanted: str, device_name: str) -> Path:
    """The directory of weights that fit; fetched and quantized, if necessary."""
    notice = Notice(f"looking at {model} ...")
    try:
        raw, config = read_config(resolve_config(model))
        from dgemma.checkpoint.device import check_device

        device = check_device(device_name)
        choice = choose(
            model, config, wanted, free_bytes(device),
            is_quantized=any(raw.get(name) is not None for name in ("quantization_config", "quantization")),
            stored_bytes=os.path.getsize(model) if is_gguf(model) and os.path.isfile(model) else None,
            published=lambda: (
                published_quantized(model, float8=device.type != "mps") if is_on_hub(model) else []
            ),
        )  # fmt: skip
        pull = plan_pull(choice.name) if is_on_hub(choice.name) else None
        seconds = step_seconds(config, device)
    finally:
        notice.clear()
    print_line(f"{choice.name}: {size_text(choice.num_bytes)} in memory, {choice.why}")
    if pull is not None and pull.missing_bytes:
        print_line(f"to fetch: {size_text(pull.missing_bytes)}")
    canvas = f"a step on a canvas of {config.canvas_len} tokens"
    print_line(f"{canvas}: about {seconds:.2g} s here; 12 to 48 steps are usual")
    return _quantized(choice, pull) if choice.format else _fetched(choice.name, pull)


def choose(
    name: str,
    config: ModelConfig,
    wanted: str,
    available: int,
    *,
    is_quantized: bool,
    published: Callable[[], Sequence[PullPlan]],
    stored_bytes: int | None = None,
) -> WeightsChoice:
    """The largest form that fits into `available` bytes, or the one that is wanted.

    stored_bytes: of a quantized model, where they are known.
    """
    sizes = count_parameters(config).bytes
    if is_quantized or wanted == "plain":
        size = (stored_bytes or sizes["4bit"]) if is_quantized else sizes["bf16"]
        return WeightsChoice(name, None, size, "as it is")
    if wanted in FORMATS:
        return WeightsChoice(name, wanted, sizes[FORMATS[wanted]], f"{wanted}, as was asked for")

    def fits(size: int) -> bool:
        return size + _EXTRA_BYTES <= available

    if fits(sizes["bf16"]):
        return WeightsChoice(name, None, sizes["bf16"], f"which fits into {available / 1e9:.1f} GB")
    too_large = f"bfloat16 ({sizes['bf16'] / 1e9:.1f} GB) does not fit into {available / 1e9:.1f} GB"
    for plan in sorted(published(), key=lambda plan: -plan.total_bytes):
        if fits(plan.total_bytes):
            why = f"published quantized weights: {too_large}"
            return WeightsChoice(plan.name, None, plan.total_bytes, why)
    for format_, key in FORMATS.items():
        if fits(sizes[key]):
            return WeightsChoice(name, format_, sizes[key], f"quantized to {format_} here: {too_large}")
    least = min(sizes.values()) + _EXTRA_BYTES
    raise InputError(
        f"{name} needs {least / 1e9:.1f} GB of memory in its smallest form, and "
        f"{available / 1e9:.1f} GB are free. Free some, or take the bundled model: dgemma run bundled:text"
    )


def free_bytes(device: torch.device) -> int:
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return memory_facts().available_bytes


def step_seconds(config: ModelConfig, device: torch.device) -> float:
    """An estimate: the products of a denoising step, at the speed of one product measured now."""
    import torch

    size, rows = config.hidden_size, config.canvas_len
    left, right = torch.ones(rows, size, device=device), torch.ones(size, size, device=device)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        (left @ right)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - began)
    active = count_parameters(config).active_parameters
    return best * active / (size * size)


def _fetched(name: str, pull: PullPlan | None) -> Path:
    return resolve(name) if pull is None else fetch_with_progress(pull)


def _quantized(choice: WeightsChoice, pull: PullPlan | None) -> Path:
    from dgemma.checkpoint.quantized.quantization_config import quantization_config_for
    from dgemma.checkpoint.quantized.writer import disk_bytes, from_checkpoint, shards_of, write_quantized
    from dgemma.checkpoint.source import open_checkpoint

    assert choice.format is not None
    source = open_checkpoint(_fetched(choice.name, pull))
    out = quantized_directory(source.path, choice)
    if is_complete(out):
        return out
    original, plan = from_checkpoint(source), quantization_config_for(choice.format, source.config)
    with byte_progress("quantizing", disk_bytes(shards_of(original, plan))) as advance:
        write_quantized(out, original, plan, on_bytes=advance)
    return out


def quantized_directory(path: Path, choice: WeightsChoice) -> Path:
    """In the cache; named by the model, and by its directory, which for a hub name has the commit."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    stem = Path(choice.name).name.replace(":", "-")
    return cache / "dgemma" / "models" / f"{stem}-{choice.format}-{digest}"


def is_complete(directory: Path) -> bool:
    from dgemma.checkpoint.save import JOURNAL
    from dgemma.checkpoint.source import open_checkpoint

    if not directory.is_dir() or (directory / JOURNAL).exists():
        return False
    try:
        open_checkpoint(directory)
    except CheckpointError:
        return False
    return True
