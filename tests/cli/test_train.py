"""`dgemma train` as a person meets it: the stranger's path, the dry run, and mistakes."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.cli import train
from dgemma.cli.main import main
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
    assert not (place / "dry").exists()


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
