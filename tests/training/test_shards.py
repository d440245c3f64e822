"""A run on several processes: the losses and weights of one process, resumed on any other number of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh

from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.cli.main import main
from dgemma.machine import has_fast_bf16
from dgemma.training import trainer as trainer_module
from dgemma.training.recipe import (
    DataRecipe,
    HeldOutRecipe,
    NoiseRecipe,
    OptimizerRecipe,
    Recipe,
    SavingRecipe,
)
from dgemma.training.report import StepReport, read_log
from dgemma.training.trainer import Trainer, TrainingOutcome
from rank_processes import ENVIRONMENT, run_processes, run_rank
from sizes import IS_FULL, full

pytestmark = pytest.mark.skipif(
    not distributed.is_available() or sys.platform == "win32", reason="torch has no gloo here"
)
LIMIT = 1e-5
MUON_LIMIT = 1e-3 if has_fast_bf16() else LIMIT  # there it orthogonalizes in bf16
# A large eps: where a gradient is nearly zero, Adam makes a step of whatever rounding leaves.
ADAM = OptimizerRecipe(learning_rate=1e-3, decay="constant", eps=1e-2)
RUNS: dict[str, dict[str, Any]] = {
    # Muon over matrices, Adam over the rest.
    "all": {"train": "all", "optimizer": replace(ADAM, kind="muon"), "recompute": True},
    "an adapter in bf16": {"train": "lora", "optimizer": ADAM, "precision": "bf16"},
}
if IS_FULL:
    RUNS["an adapter"] = {"train": "lora", "optimizer": ADAM}
HALF, STEPS = 2, 4


def recipe_of(directory: Path, out: Path, name: str, steps: int) -> Recipe:
    data = DataRecipe(path=str(directory / "sums.jsonl"), max_length=64)
    basic: dict[str, Any] = {"precision": "fp32", **RUNS[name]}
    return Recipe(
        model=str(directory / "tiny"),
        out=str(out),
        data=data,
        held_out=HeldOutRecipe(data=data, every=2, examples=3),
        noise=NoiseRecipe(guesses=2),  # of which some processes have none
        steps=steps,
        batch=4,
        micro_batch=2,
        saving=SavingRecipe(every=2),
        **basic,
    )


def rank(mesh: DeviceMesh, directory: str, begun_by: str) -> dict[str, Any]:
    """Half of each run, if none has begun it; then the rest of it."""
    found: dict[str, Any] = {}
    trainer_module.write_curves = lambda directory: None  # a drawing costs as much as many steps
    for name in RUNS:
        out = Path(directory) / f"{mesh.size()}" / name
        if not begun_by:
            assert Trainer(recipe_of(Path(directory), out, name, HALF), mesh=mesh).run() is FINISHED
            if mesh.get_rank() == 0:
                shutil.copytree(out, Path(directory) / "begun" / name)
        elif mesh.get_rank() == 0:
            shutil.copytree(Path(directory) / "begun" / name, out)
        distributed.barrier()
        trainer = Trainer(recipe_of(Path(directory), out, name, STEPS), mesh=mesh)
        assert trainer.start_step == HALF
        held = sum(weight.to_local().numel() for weight in trainer.lm.transformer.parameters())
        found[name] = {"held": held, "trained": trainer.num_trained, "notes": trainer.notes}
        assert trainer.run() is FINISHED
    return found


FINISHED = TrainingOutcome.FINISHED


def weights_of(out: Path) -> dict[str, Tensor]:
    (file,) = [*out.glob("model/*.safetensors"), *out.glob("adapter/*.safetensors")]
    weights: dict[str, Tensor] = load_file(file)
    return weights


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("runs")
    config = PRESETS["tiny"].config
    write_random(path / "tiny", replace(config, layers=config.layers[1:]), seed=3)  # one of each kind
    lines = [
        json.dumps({"prompt": f"{a} and {b}?", "response": f"{a} and {b} make {a + b}. " * (1 + a)})
        for a in range(4)
        for b in range(4)
    ]
    (path / "sums.jsonl").write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def alone(directory: Path) -> Path:
    """All runs in one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "write_curves", lambda directory: None)
        return _alone(directory)


def _alone(directory: Path) -> Path:
    for name in RUNS:
        assert Trainer(recipe_of(directory, directory / "1" / name, name, STEPS)).run() is FINISHED
    return directory / "1"


@pytest.fixture(scope="module")
def by_two(directory: Path) -> list[dict[str, Any]]:
    return run_processes(__file__, 2, directory, directory, "")


@pytest.fixture(scope="module")
def by_four(directory: Path, by_two: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_processes(__file__, 4, tmp_path_factory.mktemp("four"), directory, "two")


def check_same_run(found: Path, expected: Path) -> None:
    # Rows alone are rounded otherwise than together.
    limit = {"all": MUON_LIMIT, "an adapter in bf16": 1e-3}.get(found.name, LIMIT)
    reports, others = read_log(found / "log.jsonl"), read_log(expected / "log.jsonl")
    assert len(reports) == len(others) == STEPS + 3  # with the looks at held-out data
    for report, other in zip(reports, others, strict=True):
        assert report.diffusion == pytest.approx(other.diffusion, rel=limit)
        assert report.encoder == pytest.approx(other.encoder, rel=limit)
        if isinstance(report, StepReport) and isinstance(other, StepReport):
            assert report.grad_norm == pytest.approx(other.grad_norm, rel=limit)
            assert report.tokens == pytest.approx(other.tokens, rel=0.3)  # padding depends on the division
    weights, others_weights = weights_of(found), weights_of(expected)
    assert weights.keys() == others_weights.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(weight, others_weights[key], rtol=1e-4, atol=limit)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_as_one(name: str, directory: Path, alone: Path, by_two: Any) -> None:
    check_same_run(directory / "2" / name, alone / name)


@full
@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_two_goes_on_with_four(name: str, directory: Path, alone: Path, by_four: Any) -> None:
    check_same_run(directory / "4" / name, alone / name)
    assert all(
        found[name]["notes"] == ["begun with processes 2, here 4: bits may differ"] for found in by_four
    )


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_two_goes_on_with_one(name: str, directory: Path, alone: Path, by_two: Any) -> None:
    out = directory / "of two" / name
    shutil.copytree(directory / "begun" / name, out)
    assert Trainer(recipe_of(directory, out, name, STEPS)).run() is FINISHED
    check_same_run(out, alone / name)


@full
@pytest.mark.parametrize("name", RUNS)
def test_each_process_holds_its_part_of_every_weight(name: str, by_two: Any, by_four: Any) -> None:
    for found, size in ((by_two, 2), (by_four, 4)):
        assert len(found) == size
        whole = sum(each[name]["held"] for each in found)
        assert max(each[name]["held"] for each in found) < 1.05 * whole / size
        assert len({each[name]["trained"] for each in found}) == 1


def test_a_changed_file_of_one_process_is_noticed(directory: Path, by_two: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(directory / "2" / "all", out)
    file = next((out / "states" / f"step-{STEPS:08d}").glob("shard-00002*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    trainer = Trainer(recipe_of(directory, out, "all", STEPS))
    assert trainer.start_step == HALF
    assert "shard-00002" in trainer.notes[0]


# The command


@contextmanager
def command(directory: Path, out: Path, *changes: str) -> Iterator[subprocess.Popen[str]]:
    entries = (f"model={directory / 'tiny'}", f"data={directory / 'sums.jsonl'}", f"out={out}", "batch=4")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "dgemma.cli.main",
            "train",
            *entries,
            "precision=fp32",
            *changes,
            "--nproc",
            "2",
        ],
        env={**os.environ, **ENVIRONMENT},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def helpers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children()
    return [child for child in children if "train" in child.cmdline()]


def until_trained(out: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 400
    while not ((out / "log.jsonl").exists() and (out / "log.jsonl").read_bytes().count(b"\n") > 2):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.05)


@full
def test_an_interrupted_command_keeps_its_state_and_ends_its_processes(
    directory: Path, tmp_path: Path
) -> None:
    with command(directory, tmp_path / "run", "steps=100000") as process:
        until_trained(tmp_path / "run", process)
        helpers = helpers_of(process)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
        assert process.returncode == 130
        assert "the same command goes on" in said
        assert not psutil.wait_procs(helpers, timeout=60)[1]
    assert list((tmp_path / "run" / "states").glob("step-*/shard-00002*"))


def test_a_process_that_is_killed_ends_the_run_with_one_error(directory: Path, tmp_path: Path) -> None:
    with command(directory, tmp_path / "run", "steps=100000") as process:
        until_trained(tmp_path / "run", process)
        (helper,) = helpers_of(process)
        helper.kill()
        _, said = process.communicate(timeout=300)  # one that hangs would hang for half an hour
        assert process.returncode == 1
        assert said.count("lost the others") == 1
        assert "Traceback" not in said


@pytest.mark.parametrize(
    ("changes", "number", "why"),
    [
        ((), "3", "batch is 4, and 3 processes share it"),
        ((), "0", "nproc is 0; it must be at least 1"),
        (("objective=distill",), "2", "must keep step"),
        (("compile=true",), "2", "never tested"),
    ],
)
def test_what_several_processes_cannot_do_is_refused_before_they_start(
    directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: tuple[str, ...],
    number: str,
    why: str,
) -> None:
    given = (f"model={directory / 'tiny'}", f"data={directory / 'sums.jsonl'}", f"out={tmp_path}", "batch=4")
    assert main(["train", *given, *changes, "--nproc", number]) == 2
    assert why in capsys.readouterr().err


if __name__ == "__main__":
    run_rank(rank)
