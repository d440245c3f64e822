"""`dgemma train` as a person meets it: the stranger's path, the dry run, and mistakes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.cli import train
from dgemma.cli.main import main
from dgemma.training import memory
from dgemma.training.memory import MemoryEstimate
from dgemma.training.recipe import Recipe


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("train")
    write_random(directory / "model", PRESETS["tiny"].config)
    lines = [json.dumps({"prompt": f"What is {n}?", "response": f"It is {n}."}) for n in range(50)]
    (directory / "data.jsonl").write_text("\n".join(lines))
    return directory


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def basics(place: Path, out: str) -> list[str]:
    return [
        f"model={place / 'model'}", f"data={place / 'data.jsonl'}", "data.max_length=64",
        f"out={place / out}", "batch=4", "precision=fp32",
    ]  # fmt: skip


SHORT = ("--max-tokens", "8", "--max-denoising-steps", "2")


def test_fifty_lines_an_adapter_a_score_and_an_answer(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "train", *basics(place, "run"), "steps=3", "--check-data")
    assert status == 0
    assert out.splitlines()[-1] == str(place / "run" / "adapter")
    assert "50 records, 50 examples" in out
    assert "step 3/3" in err
    adapter = str(place / "run" / "adapter")
    model = str(place / "model")
    status, out, _ = run(
        capsys, "eval", model, str(place / "data.jsonl"), "--adapter", adapter, "--limit", "2",
        *SHORT, "--json",
    )  # fmt: skip
    assert status == 0
    assert json.loads(out)["n"] == 2
    status, _, _ = run(capsys, "generate", model, "What is 3?", "--adapter", adapter, *SHORT)
    assert status == 0


def test_a_dry_run_counts_the_data_and_estimates_here_and_at_the_released_size(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two wide layers in its place: the released model takes half a minute, and README runs it.
    medium = PRESETS["medium"]
    wide = replace(medium.config, hidden_size=2048, layers=medium.config.layers[-2:])
    monkeypatch.setitem(train.PRESETS, "26b", replace(medium, config=wide))
    status, out, _ = run(
        capsys, "train", *basics(place, "dry"), "recompute=true", "precision=bf16", "--dry-run"
    )
    assert status == 0
    assert "data: 50 records, 50 examples" in out
    rows = {
        line[:20].strip(): line.split()[-8:] for line in out.splitlines() if " GB" in line or " MB" in line
    }
    assert {"this model", "26 B", "26 B, 4-bit base"} <= rows.keys()
    whole, packed = (float(rows[name][-2]) for name in ("26 B", "26 B, 4-bit base"))
    assert 1.5 < whole < 4
    assert packed < whole
    assert " card: " not in out  # it fits
    assert not (place / "dry").exists()


def fake_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 GB of weights, 10 with four bits, and 10 GB for each example kept whole."""

    def estimate(config: object, recipe: Recipe) -> MemoryEstimate:
        examples = recipe.micro_batch or recipe.batch
        each = 2 * recipe.noise.canvases if recipe.recompute else 10
        large = config == PRESETS["26b"].config
        return MemoryEstimate(weights=(40 if large else 4) * GB, trained=GB, activations=examples * each * GB)

    monkeypatch.setattr(memory, "estimate_step", estimate)
    monkeypatch.setattr(memory, "with_4bit_base", lambda found, *_: replace(found, weights=10 * GB))


GB = 10**9
QUANTIZE = "a 4-bit base (dgemma quantize MODEL OUT --format int4, then model=OUT)"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (["batch=4"], "this model on a 24 GB card: 15.0 GB with micro_batch=1"),
        (["batch=1"], f"26 B on a 24 GB card: 13.0 GB with recompute=true, on {QUANTIZE}"),
        (["batch=1", "recompute=true"], f"26 B on a 24 GB card: 13.0 GB with {QUANTIZE}"),
        (
            ["batch=1", "train=all"],
            "26 B on a 24 GB card: does not fit, even with micro_batch=1 recompute=true; train an adapter "
            "(train=lora)",
        ),
        (
            ["batch=1", "noise.canvases=8"],
            "26 B on a 24 GB card: does not fit, even with micro_batch=1 recompute=true on a 4-bit base; "
            "lower data.max_length",
        ),
    ],
)
def test_a_dry_run_ends_with_what_fits_a_card(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: list[str],
    line: str,
) -> None:
    fake_estimates(monkeypatch)
    status, out, err = run(capsys, "train", *basics(place, "dry"), *changes, "--dry-run")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == line


def test_a_dry_run_says_what_it_does_on_a_terminal(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_estimates(monkeypatch)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    status, _, err = run(capsys, "train", *basics(place, "dry"), "--dry-run")
    assert status == 0
    assert [line for line in err.splitlines() if line.endswith("...")] == [
        "starting dgemma train ...",
        "reading the recipe and the data ...",
        "estimating a step of this model ...",
        "estimating a step of 26 B ...",
        "looking for a setting that fits a card ...",
    ]


def test_a_dry_run_speaks_before_torch_is_imported() -> None:
    code = (
        "import sys; from dgemma.cli import main; from dgemma.cli.views import progress\n"
        "progress.Notice = lambda text: sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)\n"
        "main.main(['train', 'model=m', '--dry-run']); sys.exit('it said nothing')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_faults_in_the_data_are_listed_with_their_place(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = place / "bad.jsonl"
    bad.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a", "respnse": "b"}\n')
    wrong = [*basics(place, "bad"), f"data.path={bad}"]
    status, out, err = run(capsys, "train", *wrong, "--check-data")
    assert status == 2
    assert "1 records have faults" in out
    assert f"{bad}:2" in err
    assert "did you mean 'response'?" in err
    assert "the data has faults; repair them first." in err


def test_help_names_every_entry_of_a_recipe() -> None:
    listed = train.EXAMPLES.split("examples:")[0]
    for field in fields(Recipe):
        assert re.search(rf"\b{field.name}\b", listed), field.name


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the recipe lacks model and out and data; for example: model=my-model"),
        (["nowhere.yaml"], "nowhere.yaml is not a file"),
        (["model=m", "data=d", "out=o", "stesp=3"], "did you mean 'steps'?"),
        (["model=m", "data=d", "out=o", "lora.rnak=3"], "did you mean 'rank'?"),
        (["model=m", "data=d", "out=o", "steps=many"], "steps is 'many'"),
    ],
)
def test_mistakes_get_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "train", *argv)
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
