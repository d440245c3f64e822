"""Callbacks of a training run: the interface, TensorBoard, and callbacks that a recipe names.

A recipe lists callbacks by name: `tensorboard`, or `module:name`, or `path/to/file.py:name`, where `name` is
a class or function that takes the run's directory and returns a `TrainerCallback`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.errors import CheckpointError, InputError, suggestion
from dgemma.training.named_object import load_named
from dgemma.training.report import HeldOutReport, StepReport

if TYPE_CHECKING:
    from dgemma.training.trainer import TrainingOutcome

MISSING_TENSORBOARD = (
    "callbacks has 'tensorboard', and TensorBoard is not installed; run: "
    'pip install "dgemma[tensorboard]", or remove it from callbacks.'
)


class TrainerCallback:
    """Methods that the trainer calls. Each does nothing here: override those you need.

    The trainer calls callbacks in the order of its list, in its own thread. An exception ends the run; the
    last saved state stays.
    """

    def on_start(self, step: int) -> None:
        """The run begins, or resumes after `step` steps."""

    def on_step(self, report: StepReport) -> None:
        """One optimizer step is done."""

    def on_eval(self, report: HeldOutReport) -> None:
        """A held-out evaluation is done."""

    def on_save(self, step: int) -> None:
        """The state after `step` steps is on the disk."""

    def on_note(self, text: str) -> None:
        """A message for the user at the terminal."""

    def on_end(self, outcome: TrainingOutcome | None) -> None:
        """The run ends; None: by an exception. Called once for each callback whose `on_start` was called."""


class CallbackList(TrainerCallback):
    """Passes each event on to several callbacks."""

    def __init__(self, callbacks: Sequence[TrainerCallback]) -> None:
        self._callbacks = list(callbacks)
        self._started: list[TrainerCallback] = []

    def on_start(self, step: int) -> None:
        for callback in self._callbacks:
            self._started.append(callback)
            callback.on_start(step)

    def on_step(self, report: StepReport) -> None:
        for callback in self._callbacks:
            callback.on_step(report)

    def on_eval(self, report: HeldOutReport) -> None:
        for callback in self._callbacks:
            callback.on_eval(report)

    def on_save(self, step: int) -> None:
        for callback in self._callbacks:
            callback.on_save(step)

    def on_note(self, text: str) -> None:
        for callback in self._callbacks:
            callback.on_note(text)

    def on_end(self, outcome: TrainingOutcome | None) -> None:
        with ExitStack() as ends:  # in the order of the list, and all of them, also where one fails
            for callback in reversed(self._started):
                ends.callback(callback.on_end, outcome)
            self._started = []


class TensorBoardCallback(TrainerCallback):
    """Scalars for TensorBoard, in `tensorboard/` of the run's directory.

    A resumed run purges the later steps of earlier files from TensorBoard: they are run again.
    """

    def __init__(self, run_dir: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError(MISSING_TENSORBOARD, field="callbacks") from None
        self._open: Any = SummaryWriter
        self._directory = run_dir / "tensorboard"
        self._writer: Any = None

    def on_start(self, step: int) -> None:
        with _write_errors(self._directory):
            # From step 0 everything is measured again, including the held-out losses before the first step.
            self._writer = self._open(str(self._directory), purge_step=step + 1 if step else 0)

    def on_step(self, report: StepReport) -> None:
        self._add(report)

    def on_eval(self, report: HeldOutReport) -> None:
        self._add(report)

    def on_end(self, outcome: TrainingOutcome | None) -> None:
        if self._writer is not None:
            with _write_errors(self._directory):
                self._writer.close()
            self._writer = None

    def _add(self, report: StepReport | HeldOutReport) -> None:
        with _write_errors(self._directory):
            for tag, value in report.scalars().items():
                self._writer.add_scalar(tag, value, report.step)


BUILT_IN: dict[str, Callable[[Path], TrainerCallback]] = {"tensorboard": TensorBoardCallback}


def callbacks_of(names: Sequence[str], run_dir: Path) -> list[TrainerCallback]:
    """The callbacks that a recipe names. A `module:name` or `file.py:name` runs that file's code."""
    return [_callback(name, run_dir) for name in names]


def _callback(name: str, run_dir: Path) -> TrainerCallback:
    if ":" not in name:
        if name not in BUILT_IN:
            raise InputError(
                f"callbacks has {name!r}{suggestion(name, BUILT_IN)} Give one of {', '.join(BUILT_IN)}, or "
                "your own as module:name or file.py:name.",
                field="callbacks",
            )
        return BUILT_IN[name](run_dir)
    found = load_named(name, field="callbacks")
    callback = found(run_dir) if callable(found) else None
    if not isinstance(callback, TrainerCallback):
        raise InputError.about(
            "callbacks",
            f"has {name!r}, which must be a class or function that takes the run's directory and returns a "
            "TrainerCallback.",
        )
    return callback


@contextmanager
def _write_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be written: {error.strerror}. Free some space, or choose another directory."
        ) from error
