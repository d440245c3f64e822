"""Callbacks: each event reaches each callback in order, and TensorBoard reads what its callback writes."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dgemma.errors import CheckpointError, InputError
from dgemma.training.callbacks import CallbackList, TensorBoardCallback, TrainerCallback, callbacks_of
from dgemma.training.report import HeldOutReport, StepReport

STEP = StepReport(
    step=1, num_steps=10, loss=3.2, diffusion=2.1, encoder=1.1,
    diffusion_by_noise=(0.4, None, 1.9, 2.8, 3.4), learning_rate=1.5e-4, grad_norm=0.8, examples=4,
    tokens=4096, seconds=0.7, tokens_per_second=812.5, eta_s=None,
)  # fmt: skip
HELD_OUT = HeldOutReport(
    step=0, diffusion=2.5, encoder=1.4, diffusion_by_noise=(None,) * 5, examples=64, seconds=3.0
)


class Recorder(TrainerCallback):
    def __init__(self, name: str, events: list[Any]) -> None:
        self._name, self._events = name, events

    def on_start(self, step: int) -> None:
        self._events.append((self._name, "start", step))

    def on_step(self, report: StepReport) -> None:
        self._events.append((self._name, "step", report.step))

    def on_end(self, outcome: object) -> None:
        self._events.append((self._name, "end", outcome))


def points(directory: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(point.step, point.value) for point in accumulator.Scalars(tag)] for tag in tags}


def write_steps(directory: Path, start: int, last: int, loss: float) -> None:
    callback = TensorBoardCallback(directory)
    callback.on_start(start)
    for step in range(start + 1, last + 1):
        callback.on_step(replace(STEP, step=step, loss=loss))
    callback.on_end(None)


def test_each_callback_gets_each_event_in_the_order_of_the_list() -> None:
    events: list[Any] = []
    callbacks = CallbackList([Recorder("a", events), TrainerCallback(), Recorder("b", events)])
    callbacks.on_start(0)
    callbacks.on_step(STEP)
    callbacks.on_eval(HELD_OUT)
    callbacks.on_save(1)
    callbacks.on_note("text")
    callbacks.on_end(None)
    assert events == [
        ("a", "start", 0), ("b", "start", 0), ("a", "step", 1), ("b", "step", 1), ("a", "end", None),
        ("b", "end", None),
    ]  # fmt: skip


def test_only_callbacks_that_were_started_are_ended() -> None:
    class Broken(TrainerCallback):
        def on_start(self, step: int) -> None:
            raise ZeroDivisionError

    events: list[Any] = []
    callbacks = CallbackList([Recorder("a", events), Broken(), Recorder("b", events)])
    with pytest.raises(ZeroDivisionError):
        callbacks.on_start(0)
    callbacks.on_end(None)
    assert events == [("a", "start", 0), ("a", "end", None)]


def test_an_end_that_fails_does_not_keep_the_others_from_theirs() -> None:
    class Failing(TrainerCallback):
        def on_end(self, outcome: object) -> None:
            raise ZeroDivisionError

    events: list[Any] = []
    callbacks = CallbackList([Recorder("a", events), Failing(), Recorder("b", events)])
    callbacks.on_start(0)
    with pytest.raises(ZeroDivisionError):
        callbacks.on_end(None)
    assert events == [("a", "start", 0), ("b", "start", 0), ("a", "end", None), ("b", "end", None)]


def test_tensorboard_reads_every_scalar_of_every_report(tmp_path: Path) -> None:
    callback = TensorBoardCallback(tmp_path)
    callback.on_start(0)
    callback.on_eval(HELD_OUT)
    for step in range(1, 4):
        callback.on_step(replace(STEP, step=step, loss=1 / step))
    callback.on_end(None)
    found = points(tmp_path)
    assert set(found) == {*STEP.scalars(), *HELD_OUT.scalars()}
    assert found["loss/total"] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert found["held_out/diffusion"] == [(0, 2.5)]


def test_tensorboard_keeps_numbers_that_are_not_finite(tmp_path: Path) -> None:
    callback = TensorBoardCallback(tmp_path)
    callback.on_start(0)
    values = [math.nan, math.inf, -math.inf, 1e300]
    for step, value in enumerate(values, start=1):
        callback.on_step(replace(STEP, step=step, loss=value))
    callback.on_end(None)
    assert [repr(value) for _, value in points(tmp_path)["loss/total"]] == ["nan", "inf", "-inf", "inf"]


def test_a_resumed_run_replaces_the_steps_it_runs_again(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 9, 1.0)
    write_steps(tmp_path, 6, 12, 2.0)
    expected = [(step, 1.0 if step <= 6 else 2.0) for step in range(1, 13)]
    assert points(tmp_path)["loss/total"] == expected


def test_without_tensorboard_the_error_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match=r'pip install "dgemma\[tensorboard\]"') as caught:
        callbacks_of(["tensorboard"], tmp_path)
    assert caught.value.field == "callbacks"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").touch()
    with pytest.raises(CheckpointError, match="tensorboard cannot be written"):
        TensorBoardCallback(tmp_path).on_start(0)


FILE = """
from dgemma.training.callbacks import TrainerCallback
class Mine(TrainerCallback):
    def __init__(self, run_dir):
        self.run_dir = run_dir
def number(run_dir):
    return 5
"""


def test_a_recipe_names_its_own_callback_by_file_or_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_callbacks.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    lazy = "import my_callbacks\ndef __getattr__(name):\n    return getattr(my_callbacks, name)\n"
    (tmp_path / "my_lazy_callbacks.py").write_text(lazy)
    for name in (f"{tmp_path}/my_callbacks.py:Mine", "my_callbacks:Mine", "my_lazy_callbacks:Mine"):
        (found,) = callbacks_of([name], tmp_path)
        assert isinstance(found, TrainerCallback)
        assert found.run_dir == tmp_path  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensorbord", "did you mean 'tensorboard'?"),
        ("nowhere.py:Mine", "nowhere.py is not a file"),
        ("no_such_module:Mine", "cannot be imported"),
        ("json:nothing", "json has no 'nothing'"),
        (":Mine", "write module:name or file.py:name"),
        (".mine:Mine", "write module:name or file.py:name"),
        ("json:", "write module:name or file.py:name"),
        ("builtins:str", "must be a class or function"),
    ],
)
def test_a_name_that_gives_no_callback_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        callbacks_of([name], tmp_path)
    assert message in str(caught.value)
    assert caught.value.field == "callbacks"
