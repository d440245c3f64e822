"""`dgemma train --dry-run`: what the data holds and what a step will need, with no weights loaded."""

from __future__ import annotations

import sys

from dgemma.checkpoint.hub import resolve
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.source import read_config
from dgemma.machine import inspect_machine
from dgemma.model.config import ModelConfig
from dgemma.training.data_report import DataReport
from dgemma.training.memory import MemoryEstimate, estimate_step, with_4bit_base
from dgemma.training.recipe import Recipe
from dgemma.training.setup import open_stream_of_files
from dgemma.training.stream import ExampleStream


def dry_run(recipe: Recipe) -> int:
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
    released = PRESETS["26b"].config
    rows: list[tuple[str, MemoryEstimate]] = [("this model", estimate_step(config, recipe))]
    if config != released:
        rows.append(("26 B", estimate_step(released, recipe)))
    if recipe.train == "lora":
        rows.append(("26 B, 4-bit base", with_4bit_base(rows[-1][1], released, recipe)))
    size = recipe.micro_batch or recipe.batch
    head = f"{'':<20}{'weights':>12}{'optimizer':>12}{'activations':>12}{'in all':>12}"
    lines = [
        f"memory of a step ({recipe.train}, {recipe.precision}, {size} x {recipe.data.max_length} tokens"
        f"{', recomputing' if recipe.recompute else ''}), estimated:",
        head,
    ]
    for name, estimate in rows:
        cells = (estimate.weights, estimate.trained, estimate.activations, estimate.total)
        lines.append(f"{name:<20}" + "".join(f"{_size(cell):>12}" for cell in cells))
    if recipe.device == "cpu":
        machine = inspect_machine()
        lines.append(
            f"this machine has {_size(machine.available_bytes)} free of {_size(machine.memory_bytes)}"
        )
    return "\n".join(lines)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
