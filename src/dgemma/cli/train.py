"""Train an adapter, or the whole model, from a recipe.

A recipe is a YAML or Python file; single entries can be given or changed as name=value. Ctrl-C ends the run
after its step and keeps its state: the same command resumes it, bit for bit. --dry-run loads no weights:
it checks the data, estimates the memory of a step, for this model and at the released size, and names a
setting that fits a 24 GB card."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dgemma.checkpoint.hub import resolve
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.source import read_config
from dgemma.cli.options import is_helper, thread_count
from dgemma.cli.views.progress import print_line
from dgemma.cli.views.train_view import open_train_view
from dgemma.errors import CheckpointError, InputError
from dgemma.machine import memory_facts
from dgemma.model.config import ModelConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dgemma.training.data.stream import DataReport, ExampleStream
    from dgemma.training.memory import MemoryEstimate
    from dgemma.training.recipe import Recipe

EXAMPLES = (
    "entries of a recipe (docs/training.md has them with their parts and defaults):\n"
    "  model, out, data, held_out     the checkpoint, the run's directory, what is learned, what is not\n"
    "  train, freeze, lora            an adapter (lora) or all weights; parts left alone; ranks and targets\n"
    "  objective, rollout             denoise, or along the sampler's own paths: distill, reward\n"
    "  noise, optimizer               canvas and self-conditioning; learning rate, decay, clipping\n"
    "  steps, batch, micro_batch      steps; examples per step, and per forward\n"
    "  precision, device, compile, recompute, seed, saving, callbacks\n\n"
    "examples:\n"
    "  dgemma train recipe.yaml\n"
    "  dgemma train recipe.yaml steps=500 optimizer.learning_rate=1e-4 out=runs/second\n"
    "  dgemma train model=my-model data=chats.jsonl out=runs/first steps=200 --dry-run"
)


# What the common cards for one person have.
CARD_BYTES = 24_000_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a YAML or Python file, or name=value")
    parser.add_argument("changes", metavar="NAME=VALUE", nargs="*", help="entries of the recipe")
    parser.add_argument("--dry-run", action="store_true", help="check the data, estimate memory, stop")
    parser.add_argument(
        "--check-data", action="store_true", help="read all of the data before the first step"
    )
    parser.add_argument("--threads", type=thread_count, metavar="N", help="of the processor (default: all)")
    parser.add_argument(
        "--nproc", type=int, default=1, metavar="N",
        help="processes that share each batch, each with a part of the weights (FSDP2; docs/scale.md)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    helps = is_helper(args.nproc)
    if not helps:
        _say("reading the recipe and the data ...")
    from dgemma.training.recipe_file import read_recipe

    changes = list(args.changes)
    file = args.recipe
    if file is not None and "=" in file and not Path(file).exists():
        changes.insert(0, file)
        file = None
    recipe = read_recipe(file, changes)
    if args.dry_run:
        return dry_run(recipe)
    if args.nproc == 1:
        return _train(recipe, args, None)
    from dgemma.scale.processes import joined
    from dgemma.training.shards import check_divisible

    check_divisible(recipe, args.nproc)
    with joined(args.nproc, recipe.device, args.arguments, option="nproc") as mesh:
        if not helps:
            return _train(recipe, args, mesh)
        with suppress(InputError, CheckpointError):  # the first process says the same
            return _help(recipe, args, mesh)
        return 2


def _train(recipe: Recipe, args: argparse.Namespace, mesh: DeviceMesh | None) -> int:
    from dgemma.training.trainer import Trainer, TrainingOutcome

    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)
    trainer = Trainer(recipe, mesh=mesh)
    if args.check_data and not check_data(trainer.setup.stream, trainer.setup.canvases.canvas_len):
        raise InputError("the data has faults; repair them first.")
    with open_train_view(recipe.steps, trainer.start_step) as view, _stop_flag(view.on_note) as stopped:
        view.on_note(
            f"{trainer.num_trained:,} parameters are trained"
            + (f" by {args.nproc} processes" if args.nproc > 1 else "")
            + (f"; going on after step {trainer.start_step}" if trainer.start_step else "")
        )
        outcome = trainer.run(view, stopped)
    directory = trainer.directory
    if outcome is TrainingOutcome.INTERRUPTED:
        print(f"dgemma train: interrupted; the same command goes on from {directory.path}", file=sys.stderr)
        return 130
    print(directory.result[recipe.train])
    return 0


def _help(recipe: Recipe, args: argparse.Namespace, mesh: DeviceMesh) -> int:
    """As a process that is not the first."""
    import torch

    from dgemma.training.trainer import Trainer

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    with _stop_flag(lambda text: None) as stopped:
        Trainer(recipe, mesh=mesh).run(should_stop=stopped)
    return 0


@contextmanager
def _stop_flag(note: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask to stop after the step; a second Ctrl-C does not wait."""
    stop_requested = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal stop_requested
        if stop_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop_requested = True
        note("stopping after this step; once more to stop at once")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: stop_requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def dry_run(recipe: Recipe) -> int:
    """Report what the data holds and what a step will need, with no weights loaded."""
    from dgemma.training.setup import open_stream_of_files

    path = resolve(recipe.model)
    _, config = read_config(path)
    canvas_len = recipe.noise.canvas_len or config.canvas_len
    good = True
    parts = {"data": recipe.data}
    if recipe.held_out is not None:
        parts["held out"] = recipe.held_out.data
    for name, data in parts.items():
        stream = open_stream_of_files(data, path, config, recipe.seed)
        good &= check_data(stream, canvas_len, name)
    print(_memory_table(recipe, config))
    return 0 if good else 1


def check_data(stream: ExampleStream, canvas_len: int, name: str = "data") -> bool:
    """Read everything once; print counts, and faults to stderr -> whether there were none."""
    report = stream.check_all(canvas_len=canvas_len)
    print(f"{name}: {_counts(report)}")
    for problem in report.problems:
        print(f"  {problem}", file=sys.stderr)
    if report.num_broken > len(report.problems):
        print(f"  and {report.num_broken - len(report.problems)} more", file=sys.stderr)
    return report.num_broken == 0


def _counts(report: DataReport) -> str:
    canvases = ", ".join(f"{count:,} of {length}" for length, count in list(report.canvases.items())[:8])
    lines = [
        f"{report.num_records:,} records, {report.num_examples:,} examples, {report.num_tokens:,} tokens, "
        f"{report.num_response_tokens:,} of them learned; longest {report.longest:,}",
        f"  responses by canvases: {canvases}" + (", ..." if len(report.canvases) > 8 else ""),
    ]
    if report.num_clipped:
        lines.append(f"  {report.num_clipped:,} are cut off at max_length; their ends are not learned")
    lines += [f"  {count:,} left out: {reason.value}" for reason, count in report.skipped.items()]
    if report.num_broken:
        lines.append(f"  {report.num_broken:,} records have faults")
    return "\n".join(lines)


def _memory_table(recipe: Recipe, config: ModelConfig) -> str:
    from dgemma.training.memory import estimate_step, with_4bit_base
    from dgemma.training.setup import resolve_precision

    released = PRESETS["26b"].config
    here = resolve_precision(recipe)
    recipe = recipe if recipe.precision != "auto" else replace(recipe, precision="bf16")  # as on a card
    _say("estimating a step of this model ...")
    rows: list[tuple[str, MemoryEstimate]] = [("this model", estimate_step(config, here))]
    if config != released:
        _say("estimating a step of 26 B ...")
        rows.append(("26 B", estimate_step(released, recipe)))
    name, estimate = rows[0] if rows[0][1].total > CARD_BYTES else rows[-1]
    if recipe.train == "lora":
        rows.append(("26 B, 4-bit base", with_4bit_base(rows[-1][1], released, recipe)))
    size = recipe.micro_batch or recipe.batch
    precision = here.precision + (f", 26 B in {recipe.precision}" if here != recipe else "")
    head = f"{'':<20}{'weights':>12}{'optimizer':>12}{'activations':>12}{'in all':>12}"
    lines = [
        f"memory of a step ({recipe.train}, {precision}, {size} x {recipe.data.max_length} tokens"
        f"{', recomputing' if recipe.recompute else ''}), estimated:",
        head,
    ]
    for row, found in rows:
        cells = (found.weights, found.trained, found.activations, found.total)
        lines.append(f"{row:<20}" + "".join(f"{_size(cell):>12}" for cell in cells))
    if recipe.device == "cpu":
        memory = memory_facts()
        lines.append(f"this machine has {_size(memory.available_bytes)} free of {_size(memory.memory_bytes)}")
    if estimate.total > CARD_BYTES:
        shape = config if name == "this model" else released
        lines.append(f"{name} on a {CARD_BYTES / 1e9:.0f} GB card: {_on_a_card(recipe, shape, estimate)}")
    return "\n".join(lines)


def _on_a_card(recipe: Recipe, config: ModelConfig, estimate: MemoryEstimate) -> str:
    """What to type so that a step fits, or that nothing does."""
    from dgemma.training.memory import cheaper_setting

    _say("looking for a setting that fits a card ...")
    found = cheaper_setting(config, recipe, estimate, CARD_BYTES)
    if found is None:
        if recipe.train != "lora":
            return "does not fit, even with micro_batch=1 recompute=true; train an adapter (train=lora)"
        return "does not fit, even with micro_batch=1 recompute=true on a 4-bit base; lower data.max_length"
    changes = " ".join(found.changes)
    if found.has_4bit_base:
        base = "a 4-bit base (dgemma quantize MODEL OUT --format int4, then model=OUT)"
        changes = f"{changes}, on {base}" if changes else base
    return f"{found.estimate.total / 1e9:.1f} GB with {changes}"


def _say(line: str) -> None:
    """What takes its time, on a terminal only."""
    if sys.stderr.isatty():
        print_line(line)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
