"""Train an adapter, or the whole model, from a recipe.

A recipe is a YAML or Python file; single entries can be given or changed as name=value. Ctrl-C ends the run
after its step and keeps its state: the same command goes on, to the same bits. --dry-run loads no weights:
it checks the data and says what memory the run will take, for this model and at the released size."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from dgemma.cli.train_view import TrainView, open_train_view
from dgemma.errors import InputError

HELP = "fine-tune a model, resumably"
EXAMPLES = (
    "entries of a recipe (docs/training.md has them with their parts and defaults):\n"
    "  model, out, data, held_out     the checkpoint, the run's directory, what is learned, what is not\n"
    "  train, freeze, lora            an adapter (lora) or all weights; parts left alone; ranks and targets\n"
    "  noise, optimizer               canvas and self-conditioning; learning rate, decay, clipping\n"
    "  steps, batch, micro_batch      steps; examples per step, and per forward\n"
    "  precision, device, compile, recompute, seed, saving, tensorboard\n\n"
    "examples:\n"
    "  dgemma train recipe.yaml\n"
    "  dgemma train recipe.yaml steps=500 optimizer.learning_rate=1e-4 out=runs/second\n"
    "  dgemma train model=my-model data=chats.jsonl out=runs/first steps=200 --dry-run"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a YAML or Python file, or name=value")
    parser.add_argument("changes", metavar="NAME=VALUE", nargs="*", help="entries of the recipe")
    parser.add_argument("--dry-run", action="store_true", help="check the data, estimate memory, stop")
    parser.add_argument(
        "--check-data", action="store_true", help="read all of the data before the first step"
    )


def run(args: argparse.Namespace) -> int:
    from dgemma.training.recipe_file import read_recipe

    changes = list(args.changes)
    file = args.recipe
    if file is not None and "=" in file and not Path(file).exists():
        changes.insert(0, file)
        file = None
    recipe = read_recipe(file, changes)
    if args.dry_run:
        from dgemma.cli.train_dry_run import dry_run

        return dry_run(recipe)
    from dgemma.training.trainer import Outcome, Trainer

    trainer = Trainer(recipe)
    if args.check_data:
        from dgemma.cli.train_dry_run import check_data

        if not check_data(trainer.setup.stream, trainer.setup.canvases.canvas_len):
            raise InputError("the data has faults; repair them first.")
    with open_train_view(recipe.steps, trainer.start_step) as view, _stop_flag(view) as stopped:
        view.note(
            f"{trainer.num_trained:,} parameters are trained"
            + (f"; going on after step {trainer.start_step}" if trainer.start_step else "")
        )
        outcome = trainer.run(view, stopped)
    directory = trainer.directory
    if outcome is Outcome.INTERRUPTED:
        print(f"dgemma train: interrupted; the same command goes on from {directory.path}", file=sys.stderr)
        return 130
    print(directory.result[recipe.train])
    return 0


@contextmanager
def _stop_flag(view: TrainView) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask to stop after the step; a second Ctrl-C does not wait."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True
        view.note("stopping after this step; once more to stop at once")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
