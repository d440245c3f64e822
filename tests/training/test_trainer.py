"""A run is a function of its recipe and data: interrupted, divided or logged, its weights are the same."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dgemma
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.cli.main import main
from dgemma.errors import CheckpointError, InputError, TrainingError
from dgemma.training import setup
from dgemma.training import trainer as trainer_module
from dgemma.training.callbacks import TrainerCallback
from dgemma.training.curves import write_curves
from dgemma.training.recipe import (
    DataRecipe,
    HeldOutRecipe,
    NoiseRecipe,
    OptimizerRecipe,
    Recipe,
    SavingRecipe,
)
from dgemma.training.report import HeldOutReport, StepReport, read_log
from dgemma.training.run_directory import RunDirectory
from dgemma.training.trainer import Trainer, TrainingOutcome
from sizes import IS_FULL


class Notes(TrainerCallback):
    """Keeps every event."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.looks: list[HeldOutReport] = []
        self.states: list[int] = []
        self.texts: list[str] = []

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)

    def on_eval(self, report: HeldOutReport) -> None:
        self.looks.append(report)

    def on_save(self, step: int) -> None:
        self.states.append(step)

    def on_note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny"
    config = PRESETS["tiny"].config
    write_random(path, replace(config, layers=config.layers[1:]), seed=3)  # one of each kind
    return str(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("data") / "sums.jsonl"
    lines = [
        json.dumps({"prompt": f"{a} and {b}?", "response": f"{a} and {b} make {a + b}. " * (1 + a)})
        for a in range(4)
        for b in range(4)
    ]
    file.write_text("\n".join(lines))
    return str(file)


@pytest.fixture(autouse=True)
def without_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drawing costs as much as many steps. Tests of the drawing ask for `drawing`."""
    monkeypatch.setattr(trainer_module, "write_curves", lambda directory: None)


@pytest.fixture
def drawing(without_drawing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "write_curves", write_curves)


@pytest.fixture(scope="module")
def whole(model: str, data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the basic recipe's run. Tests that write to it copy it."""
    out = tmp_path_factory.mktemp("whole") / "run"
    finish(recipe_of(model, data, out))
    return out


def recipe_of(model: str, path: str, out: Path, **changes: Any) -> Recipe:
    basic: dict[str, Any] = {
        "model": model,
        "out": str(out),
        "data": DataRecipe(path=path, max_length=96),
        "steps": 6,
        "batch": 4,
        "precision": "fp32",
        "optimizer": OptimizerRecipe(learning_rate=1e-3),
        "saving": SavingRecipe(every=2),
    }
    return Recipe(**{**basic, **changes})


def finish(recipe: Recipe) -> dict[str, Tensor]:
    trainer = Trainer(recipe)
    assert trainer.run(Notes()) is TrainingOutcome.FINISHED
    return trainer.directory.load_state(recipe.steps)


def final_state(out: Path) -> dict[str, Tensor]:
    directory = RunDirectory(str(out))
    return directory.load_state(directory.states()[-1])


def stop_after(recipe: Recipe, step: int) -> None:
    trainer = Trainer(recipe)
    notes = Notes()
    assert trainer.run(notes, lambda: len(notes.steps) == step) is TrainingOutcome.INTERRUPTED


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


WAYS: dict[str, dict[str, Any]] = {
    "lora, fp32": {},  # the basic recipe
    "lora, bf16": {"precision": "bf16"},
    "all, fp32, accumulated": {"train": "all", "micro_batch": 2},
    "all, bf16 over fp32 masters": {"train": "all", "precision": "bf16", "freeze": ()},
    "lora, bf16, recomputed": {"precision": "bf16", "recompute": True},
}


# The other three mix what these two have.
@pytest.mark.parametrize("way", WAYS if IS_FULL else ["lora, fp32", "all, bf16 over fp32 masters"])
def test_an_interrupted_and_resumed_run_gives_the_same_bits(
    way: str, model: str, data: str, whole: Path, tmp_path: Path
) -> None:
    if WAYS[way]:
        whole = tmp_path / "whole"
        finish(recipe_of(model, data, whole, **WAYS[way]))
    pieces = recipe_of(model, data, tmp_path / "pieces", **WAYS[way])
    stop_after(pieces, random.Random(way).randrange(1, 6))
    assert same(finish(pieces), final_state(whole))
    logs = [read_log(out / "log.jsonl") for out in (whole, tmp_path / "pieces")]
    assert [(r.step, r.diffusion, r.encoder) for r in logs[0]] == [
        (r.step, r.diffusion, r.encoder) for r in logs[1]
    ]


def test_other_seeds_and_data_give_other_bits(model: str, data: str, whole: Path, tmp_path: Path) -> None:
    assert not same(final_state(whole), finish(recipe_of(model, data, tmp_path, seed=1)))


def test_a_killed_run_goes_on_from_its_last_state_to_the_same_bits(
    model: str, data: str, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    recipe = recipe_of(model, data, out)
    # However late the signal comes, the run is not at its end.
    file = tmp_path / "waits.py"
    file.write_text(
        "import time\n"
        "from dgemma.training.callbacks import TrainerCallback\n"
        "class Waits(TrainerCallback):\n"
        "    def __init__(self, run): pass\n"
        "    def on_step(self, report):\n"
        "        if report.step == 5: time.sleep(600)\n"
    )
    command = [
        sys.executable, "-m", "dgemma.cli.main", "train", f"model={model}", f"data.path={data}",
        "data.max_length=96", f"out={out}", "steps=6", "batch=4", "precision=fp32",
        "optimizer.learning_rate=1e-3", "saving.every=2", f"callbacks=[{file}:Waits]",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + 600
        while not list(out.glob("states/step-????????/state.json")):
            assert time.monotonic() < until
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    resumed = Trainer(recipe)
    assert 0 < resumed.start_step < 6
    assert same(finish(recipe), final_state(whole))


@pytest.mark.parametrize("damage", ["zeroed", "cut"])
def test_a_damaged_state_costs_steps_and_not_the_result(
    damage: str, model: str, data: str, whole: Path, tmp_path: Path
) -> None:
    pieces = recipe_of(model, data, tmp_path / "pieces")
    stop_after(pieces, 5)
    file = tmp_path / "pieces" / "states" / "step-00000005" / "state.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] + bytes(len(content) // 2) * (damage == "zeroed"))
    trainer, notes = Trainer(pieces), Notes()
    assert trainer.start_step == 4
    assert "step-00000005" in trainer.notes[0]
    assert trainer.notes[0].endswith("Going on from step 4.")
    assert trainer.run(notes) is TrainingOutcome.FINISHED
    assert same(trainer.directory.load_state(6), final_state(whole))
    assert trainer.directory.states() == [4, 6]


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_the_command_stops_after_its_step_when_asked_and_goes_on(
    model: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "asked"
    command = [
        "train", f"model={model}", f"data={data}",
        "data.max_length=96", f"out={out}", "steps=100000", "batch=4", "precision=fp32",
    ]  # fmt: skip
    python = [sys.executable, "-m", "dgemma.cli.main"]
    with subprocess.Popen([*python, *command], stderr=subprocess.PIPE, text=True) as process:
        while not (out / "log.jsonl").exists() or not (out / "log.jsonl").read_text():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.wait() == 130, said
    assert "the same command goes on" in said
    steps = [report.step for report in read_log(out / "log.jsonl")]
    assert main([*command, f"steps={steps[-1]}"]) == 2
    assert f"steps was 100000 and is {steps[-1]}" in capsys.readouterr().err


def gradients(recipe: Recipe) -> dict[str, Tensor]:
    """Of the first step, before the optimizer has them."""
    trainer = Trainer(recipe)
    found: dict[str, Tensor] = {}

    def keep(rate: float) -> float:
        found.update({n: m.grad.clone() for n, m in trainer._weights.masters.items() if m.grad is not None})
        return 1.0

    trainer._optimizer.step = keep  # type: ignore[method-assign]
    trainer._do_step()
    return found


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_the_division_of_a_step_into_forwards_changes_nothing_but_rounding(
    micro_batch: int, model: str, data: str, tmp_path: Path
) -> None:
    recipe = recipe_of(model, data, tmp_path, train="all", freeze=(), batch=8)
    whole = gradients(recipe)
    parts = gradients(replace(recipe, micro_batch=micro_batch))
    assert whole.keys() == parts.keys()
    for name, expected in whole.items():
        torch.testing.assert_close(parts[name], expected, atol=2e-6, rtol=1e-4)


def test_recomputing_and_small_model_forms_change_nothing_but_rounding(
    model: str, data: str, tmp_path: Path
) -> None:
    recipe = recipe_of(model, data, tmp_path, train="all", freeze=())
    plain = gradients(recipe)
    again = gradients(replace(recipe, recompute=True))
    # Longer texts turn the explicit attention off.
    longer = gradients(replace(recipe, data=replace(recipe.data, max_length=1025)))
    for name, expected in plain.items():
        torch.testing.assert_close(again[name], expected, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(longer[name], expected, atol=1e-6, rtol=1e-4)


def test_without_encoder_weight_answers_are_not_read_and_the_held_out_look_still_tells_both_losses(
    model: str, data: str, tmp_path: Path
) -> None:
    looking = HeldOutRecipe(data=DataRecipe(path=data, max_length=96), every=6, examples=4)
    recipe = recipe_of(model, data, tmp_path / "a", noise=NoiseRecipe(encoder_weight=0.0), held_out=looking)
    notes, whole = Notes(), Notes()
    Trainer(recipe).run(notes)
    Trainer(replace(recipe, out=str(tmp_path / "b"), noise=NoiseRecipe())).run(whole)
    assert notes.steps[0].diffusion == pytest.approx(whole.steps[0].diffusion, abs=1e-5)
    assert notes.steps[0].encoder == 0
    assert notes.steps[0].tokens < whole.steps[0].tokens
    assert notes.looks[0] == replace(whole.looks[0], seconds=notes.looks[0].seconds)
    assert notes.looks[0].encoder > 1


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_a_compiled_run_follows_the_plain_one_and_resumes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not IS_FULL:
        # The graphs as they are traced; test_setup.py compares the gradients of generated code.
        traced = partialmethod(torch.nn.Module.compile, backend="eager")
        monkeypatch.setattr(torch.nn.Module, "compile", traced)
    small = tmp_path / "small"
    config = PRESETS["tiny"].config
    # Few graphs to compile: one layer; texts of one length, and a guess for every row.
    write_random(small, replace(config, layers=config.layers[-1:]), seed=3)
    records = [{"prompt": f"{a} and {b}?", "response": f"{a} and {b}."} for a in range(4) for b in range(4)]
    recipe = recipe_of(
        str(small), "-", tmp_path / "plain", steps=3, data=DataRecipe(records=records, max_length=96),
        noise=NoiseRecipe(self_conditioning=1.0),
    )  # fmt: skip
    finish(recipe)
    compiled = replace(recipe, out=str(tmp_path / "compiled"), compile=True)
    whole = finish(compiled)
    pieces = replace(compiled, out=str(tmp_path / "pieces"))
    stop_after(pieces, 2)
    assert same(finish(pieces), whole)
    plain, fused = (read_log(tmp_path / name / "log.jsonl") for name in ("plain", "compiled"))
    for a, b in zip(plain, fused, strict=True):
        assert a.diffusion == pytest.approx(b.diffusion, abs=1e-3)
        assert a.encoder == pytest.approx(b.encoder, abs=1e-3)


@pytest.mark.parametrize("train", ["lora", "all"])
def test_a_model_learns_what_it_is_shown_and_its_result_is_usable(
    train: str, model: str, tmp_path: Path, drawing: None
) -> None:
    record = {"prompt": "Say it.", "response": "The sea is blue."}
    recipe = recipe_of(
        model, "-", tmp_path, data=DataRecipe(records=[record], max_length=64), train=train, steps=36,
        optimizer=OptimizerRecipe(learning_rate=1e-2 if train == "lora" else 3e-3),
        held_out=HeldOutRecipe(data=DataRecipe(records=[record], max_length=64), every=18, examples=8),
    )  # fmt: skip
    trainer = Trainer(recipe)
    notes = Notes()
    trainer.run(notes)
    assert [look.step for look in notes.looks] == [0, 18, 36]
    assert notes.looks[-1].encoder < 0.2 * notes.looks[0].encoder
    assert notes.looks[-1].diffusion < 0.5 * notes.looks[0].diffusion
    written = tmp_path / ("adapter" if train == "lora" else "model")
    lm = dgemma.load(
        model if train == "lora" else written,
        dtype="float32",
        adapter=written if train == "lora" else None,
    )
    assert lm.chat("Say it.", decode="causal", temperature=0, max_tokens=16).text == "The sea is blue."
    assert "<svg" in (tmp_path / "curves.svg").read_text()


def test_frozen_parts_and_the_base_under_an_adapter_do_not_change(
    model: str, data: str, tmp_path: Path
) -> None:
    before = dgemma.load(model, dtype="float32").transformer.state_dict()
    trainer = Trainer(recipe_of(model, data, tmp_path / "all", train="all", freeze=("router", "norms")))
    trainer.run(Notes())
    after = trainer.lm.transformer.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    kept = ("router.", "norm.weight", "before_", "after_", "_scalar")
    assert changed == {
        n for n in before if not any(k in n for k in kept) or "self_conditioning" in n or "_norm" in n
    }
    trainer = Trainer(recipe_of(model, data, tmp_path / "lora"))
    trainer.run(Notes())
    base = trainer.lm.without_adapter().transformer.state_dict()
    assert all(torch.equal(base[name], before[name]) for name in before)


def test_held_out_data_is_evaluated_with_the_same_noise_each_time(
    model: str, data: str, tmp_path: Path
) -> None:
    held_out = HeldOutRecipe(data=DataRecipe(path=data, max_length=96), every=2, examples=6)
    still = OptimizerRecipe(learning_rate=0.0)
    notes = Notes()
    Trainer(recipe_of(model, data, tmp_path, held_out=held_out, optimizer=still, steps=4)).run(notes)
    assert len({(look.diffusion, look.encoder, look.diffusion_by_noise) for look in notes.looks}) == 1
    assert len(notes.looks) == 3


def test_another_recipe_or_other_data_does_not_go_on_with_a_run(
    model: str, data: str, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    recipe = recipe_of(model, data, tmp_path)
    with pytest.raises(InputError, match=r"optimizer.learning_rate was 0.001 and is 0.5"):
        Trainer(replace(recipe, optimizer=OptimizerRecipe(learning_rate=0.5)))
    Trainer(replace(recipe, saving=SavingRecipe(every=1)))  # changes no bit of the result
    with pytest.raises(InputError, match="steps was 6 and is 8"):
        Trainer(replace(recipe, steps=8))
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_text("\n".join(Path(data).read_text().splitlines()[:9]))
    state = next((tmp_path / "states").glob("step-00000006/state.json"))
    state.write_text(state.read_text().replace(data, str(shorter)))
    with pytest.raises(InputError, match="had 16 records when this run began and has 9 now"):
        Trainer(replace(recipe, data=replace(recipe.data, path=str(shorter))))


def test_a_constant_rate_lets_a_run_be_made_longer(model: str, data: str, tmp_path: Path) -> None:
    constant = OptimizerRecipe(decay="constant", warmup=0)
    long = finish(recipe_of(model, data, tmp_path / "long", optimizer=constant, steps=8))
    finish(recipe_of(model, data, tmp_path / "short", optimizer=constant, steps=5))
    assert same(finish(recipe_of(model, data, tmp_path / "short", optimizer=constant, steps=8)), long)


def test_a_run_made_longer_gives_its_new_weights(model: str, data: str, tmp_path: Path) -> None:
    constant = OptimizerRecipe(decay="constant", warmup=0)
    for steps in (2, 3, 3):
        recipe = recipe_of(model, data, tmp_path, train="all", optimizer=constant, steps=steps)
        state = finish(recipe)
        result = dgemma.load(tmp_path / "model", dtype="float32").transformer.state_dict()
        for name in ("embedding.weight", "layers.0.mlp.down.weight"):
            assert torch.equal(result[name], state[f"master.{name}"])


def test_gradients_that_are_not_finite_change_nothing_and_end_a_run_that_has_only_them(
    model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(model, data, tmp_path, steps=30)
    trainer = Trainer(recipe)
    before = {name: master.detach().clone() for name, master in trainer._weights.masters.items()}
    right = trainer_module.token_losses
    monkeypatch.setattr(
        trainer_module, "token_losses",
        lambda *a, **k: (lambda found: type(found)(found.diffusion * float("nan"), found.encoder))(
            right(*a, **k)
        ),
    )  # fmt: skip
    notes = Notes()
    with pytest.raises(TrainingError, match="last 10 steps were not finite"):
        trainer.run(notes)
    assert len(notes.texts) == 9
    assert "step 1: gradients are not finite" in notes.texts[0]
    assert same(before, {name: m.detach() for name, m in trainer._weights.masters.items()})


def test_a_finished_run_may_be_asked_again(model: str, data: str, tmp_path: Path) -> None:
    recipe = recipe_of(model, data, tmp_path, train="all")
    first = finish(recipe)
    assert same(finish(recipe), first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": DataRecipe(records=[{"text": "x"}], max_length=8192)}, "8192 positions leave 8160"),
        ({"train": "all", "freeze": ("embedding", "norms", "attention", "mlp", "experts", "router",
                                    "self_conditioning")}, "leaves nothing to train"),
    ],
)  # fmt: skip
def test_recipes_that_do_not_fit_the_model_are_refused(
    changes: dict[str, Any], message: str, model: str, data: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        Trainer(recipe_of(model, data, tmp_path, **changes))


def test_a_model_in_another_precision_is_refused(model: str, data: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"precision is 'fp32', but the model is in torch.bfloat16"):
        Trainer(recipe_of(model, data, tmp_path), lm=dgemma.load(model, dtype="bfloat16"))


@pytest.mark.parametrize("is_fast", [True, False])
def test_precision_auto_is_what_is_fast_here(monkeypatch: pytest.MonkeyPatch, is_fast: bool) -> None:
    monkeypatch.setattr(setup, "has_fast_bf16", lambda: is_fast)
    recipe = recipe_of("m", "d", Path("o"), precision="auto")
    assert setup.resolve_precision(recipe).precision == ("bf16" if is_fast else "fp32")
    assert setup.resolve_precision(replace(recipe, device="cuda")).precision == "bf16"
    assert setup.resolve_precision(replace(recipe, precision="bf16")).precision == "bf16"


def test_a_resumed_run_keeps_the_precision_that_auto_chose(
    model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constant = OptimizerRecipe(decay="constant", warmup=0)
    recipe = recipe_of(model, data, tmp_path, precision="auto", steps=2, optimizer=constant)
    monkeypatch.setattr(setup, "has_fast_bf16", lambda: False)
    Trainer(recipe).run()
    monkeypatch.setattr(setup, "has_fast_bf16", lambda: True)
    again = Trainer(replace(recipe, steps=3))
    assert (again.recipe.precision, again.lm.dtype, again.start_step) == ("fp32", torch.float32, 2)
    other = recipe_of(model, data, tmp_path / "other", precision="auto")
    assert Trainer(other, lm=dgemma.load(model, dtype="bfloat16")).recipe.precision == "bf16"


def test_callbacks_of_the_recipe_and_of_the_caller_get_every_event(
    model: str, data: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dgemma.training.callbacks import TrainerCallback\n"
        "class Lines(TrainerCallback):\n"
        "    def __init__(self, run): self.file = run / 'lines.txt'\n"
        "    def add(self, text):\n"
        "        with open(self.file, 'a') as out: print(text, file=out)\n"
        "    def on_start(self, step): self.add(f'start {step}')\n"
        "    def on_step(self, report): self.add(f'step {report.step}')\n"
        "    def on_eval(self, report): self.add(f'eval {report.step}')\n"
        "    def on_save(self, step): self.add(f'save {step}')\n"
        "    def on_end(self, outcome): self.add(f'end {outcome and outcome.value}')\n"
    )
    recipe = recipe_of(
        model, data, tmp_path / "run", steps=4, callbacks=(f"{file}:Lines",),
        held_out=HeldOutRecipe(data=DataRecipe(path=data, max_length=96), every=2, examples=2),
    )  # fmt: skip
    own, view = Notes(), Notes()
    Trainer(recipe, callbacks=[own]).run(view)
    assert (tmp_path / "run" / "lines.txt").read_text().split("\n") == [
        "start 0", "eval 0", "step 1", "step 2", "eval 2", "save 2", "step 3", "step 4", "eval 4", "save 4",
        f"end {TrainingOutcome.FINISHED.value}", "",
    ]  # fmt: skip
    assert own.steps == view.steps
    assert own.states == view.states == [2, 4]


def test_a_callback_that_fails_ends_the_run_and_the_saved_state_stays(
    model: str, data: str, tmp_path: Path
) -> None:
    ends: list[TrainingOutcome | None] = []

    class Failing(Notes):
        def on_step(self, report: StepReport) -> None:
            super().on_step(report)
            if report.step == 3:
                raise OSError("the tracker is away")

        def on_end(self, outcome: TrainingOutcome | None) -> None:
            ends.append(outcome)

    recipe = recipe_of(model, data, tmp_path, steps=4)
    failing = Failing()
    with pytest.raises(OSError, match="the tracker is away"):
        Trainer(recipe, callbacks=[failing]).run()
    assert (failing.states, ends) == ([2], [None])
    notes = Notes()
    assert Trainer(recipe).run(notes) is TrainingOutcome.FINISHED
    assert [report.step for report in notes.steps] == [3, 4]


def test_curves_that_cannot_be_written_end_the_run_by_an_exception(
    model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[TrainingOutcome | None] = []

    class Ends(TrainerCallback):
        def on_end(self, outcome: TrainingOutcome | None) -> None:
            ends.append(outcome)

    def refuse(run_dir: Path) -> Path:
        raise CheckpointError(f"{run_dir} cannot be written")

    monkeypatch.setattr("dgemma.training.trainer.write_curves", refuse)
    with pytest.raises(CheckpointError, match="cannot be written"):
        Trainer(recipe_of(model, data, tmp_path, steps=1), callbacks=[Ends()]).run()
    assert ends == [None]


def test_a_run_without_matplotlib_ends_well_and_names_the_remedy(
    model: str, data: str, tmp_path: Path, drawing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    notes = Notes()
    assert Trainer(recipe_of(model, data, tmp_path, steps=1)).run(notes) is TrainingOutcome.FINISHED
    assert [text for text in notes.texts if 'pip install "dgemma[plot]"' in text]
    assert (tmp_path / "log.jsonl").is_file()
    assert not (tmp_path / "curves.svg").exists()
