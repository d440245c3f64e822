"""`dgemma bench` as a user types it: a page, or one JSON object; with the reference, or without."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dgemma
from dgemma.bench.model_bench import ModelBench
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.cli.main import main
from sizes import full

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
FEW = ["--prompt-tokens", "8", "--canvases", "2", "--steps", "2", "--causal-tokens", "2", "--rounds", "2",
       "--lengths", "4", "--concurrency", "1,2"]  # fmt: skip
ALONE = {
    "plan", "dtype", "device", "exact", "compiled", "dgemma", "peak_extra_bytes", "weight_bytes", "machine",
    "versions", "rounds", "skipped", "roofline", "lengths", "throughput", "verdict",
    "real_prompts",
}  # fmt: skip
FIGURES = {"seconds_per_step", "seconds_per_commit", "seconds_per_causal_token", "tokens_per_second"}
OURS = FIGURES | {"seconds_to_first_text", "seconds_per_canvas"}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("bench") / "tiny"
    write_random(path, PRESETS["tiny"].config, dtype="F32", seed=1)
    return str(path)


@pytest.fixture
def bench(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    # Real prompts take up to 48 steps; tests/bench/test_model_bench.py asks them.
    monkeypatch.setattr(ModelBench, "real_prompts", lambda self: self.found.update(real_prompts={}))

    def run(*argv: str) -> tuple[int, str, str]:
        status = main(["bench", *argv])
        return (status, *capfd.readouterr())

    return run


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)


def test_json_has_the_documented_keys_and_is_all_of_stdout(tiny: str, bench: Run) -> None:
    status, out, err = bench(tiny, *FEW, "--json")
    assert status == 0
    found = json.loads(out)
    assert found.keys() == ALONE | {"reference", "times_faster"}
    documented = DOCS.read_text()
    for key in found.keys() | OURS:
        assert f"`{key}`" in documented, key
    for side in ("dgemma", "reference", "times_faster"):
        assert found[side].keys() == (OURS if side == "dgemma" else FIGURES)
        for figure in found[side].values():
            assert figure.keys() == {"median", "min", "max"}
            assert 0 < figure["min"] <= figure["median"] <= figure["max"]
    assert found["plan"].items() >= {
        "prompt_tokens": 8, "canvases": 2, "steps": 2, "causal_tokens": 2, "rounds": 2, "time_limit_s": 600,
    }.items()  # fmt: skip
    assert found["peak_extra_bytes"].keys() == {"dgemma", "reference"}
    assert (found["dtype"], found["device"], found["exact"], found["compiled"]) == (
        "float32", "cpu", False, False,
    )  # fmt: skip
    assert found["versions"]["dgemma"] == dgemma.__version__
    weights = Path(tiny, "model.safetensors").stat().st_size
    assert 0.9 * weights < found["weight_bytes"] <= weights
    assert "round 2 of 2" in err


def test_without_transformers_it_says_so_and_still_measures(
    tiny: str, bench: Run, no_transformers: None
) -> None:
    status, out, err = bench(tiny, *FEW, "--json")
    assert status == 0
    assert err.splitlines()[0] == "Transformers with DiffusionGemma is not installed: no reference."
    found = json.loads(out)
    assert found.keys() == ALONE
    assert found["dgemma"].keys() == OURS
    assert found["peak_extra_bytes"].keys() == {"dgemma"}


def test_no_reference_loads_none_and_says_nothing(
    tiny: str, bench: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any) -> Any:
        raise AssertionError("the reference was loaded")

    monkeypatch.setattr("dgemma.bench.reference.load_reference", load)
    status, page, err = bench(tiny, *FEW, "--no-reference")
    assert status == 0
    assert [line.split(":")[0] for line in err.splitlines()[:3]] == [
        "warming up", "round 1 of 2", "round 2 of 2",
    ]  # fmt: skip
    assert "reference" not in page
    assert "faster by" not in page


def test_the_page_has_a_row_per_figure_and_its_columns_stand_apart(tiny: str, bench: Run) -> None:
    status, page, _ = bench(tiny, *FEW)
    assert status == 0
    assert "prompt of 8, 2 canvases of 2 steps; median (least-most) of 2" in page
    figure = r"\s+[\d.e+-]+{} \([\d.e+-]+\)"
    for label, unit in (
        ("denoising step", "s"), ("commit", "s"), ("causal token", "s"), ("committed tokens", "/s"),
    ):  # fmt: skip
        assert re.search("^" + label + figure.format(unit) * 2 + figure.format("x") + "$", page, re.M), page
    assert re.search(r"^weights\s+2 MB$", page, re.M)


@full
def test_one_canvas_has_no_row_for_commits(tiny: str, bench: Run) -> None:
    status, page, _ = bench(tiny, *FEW, "--canvases", "1", "--no-reference")
    assert status == 0
    assert "denoising step" in page
    assert not re.search("^commit ", page, re.M)


def test_memory_that_cannot_be_told_is_called_unknown(
    tiny: str, bench: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgemma.bench.model_bench.peak_growth_bytes", lambda run, device: None)
    _, page, _ = bench(tiny, *FEW, "--no-reference")
    assert re.search(r"^peak extra memory\s+unknown$", page, re.M)


@full
def test_memory_that_cannot_be_told_is_null_in_json(
    tiny: str, bench: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgemma.bench.model_bench.peak_growth_bytes", lambda run, device: None)
    found = json.loads(bench(tiny, *FEW, "--no-reference", "--json")[1])
    assert found["peak_extra_bytes"] == {"dgemma": None}


def test_the_options_reach_the_model(tiny: str, bench: Run) -> None:
    found = json.loads(bench(tiny, *FEW, "--no-reference", "--json", "--dtype", "bfloat16", "--exact")[1])
    assert (found["dtype"], found["exact"]) == ("bfloat16", True)


@pytest.mark.parametrize(
    "option", ["--rounds", "--steps", "--canvases", "--prompt-tokens", "--causal-tokens"]
)
@pytest.mark.parametrize("number", ["0", "-3"])
def test_a_wrong_number_is_one_line_before_anything_is_loaded(option: str, number: str, bench: Run) -> None:
    status, out, err = bench("no-such/model", option, number)
    assert (status, out) == (2, "")
    assert err == f"dgemma bench: {option} is {number}; it must be at least 1.\n"


def test_a_plan_that_does_not_fit_the_context_is_one_line(tiny: str, bench: Run) -> None:
    status, out, err = bench(tiny, *FEW, "--no-reference", "--prompt-tokens", "8190")
    assert (status, out) == (2, "")
    assert err.startswith("warming up\ndgemma bench: the prompt has 8190 tokens; ")
    assert err.count("\n") == 2


def test_away_from_the_cpu_it_says_that_there_is_no_reference(
    tiny: str, bench: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere:
        device = type("Device", (), {"type": "cuda", "__str__": lambda self: "cuda:1"})()

    def stop(lm: Any, reference: Any, *args: Any, **kwargs: Any) -> Any:
        assert reference is None
        raise dgemma.InputError("enough")

    monkeypatch.setattr(dgemma, "load", lambda *args, **kwargs: Elsewhere())
    monkeypatch.setattr("dgemma.bench.model_bench.ModelBench", stop)
    assert bench(tiny)[2] == (
        "The reference is timed on the CPU only, not on cuda:1.\ndgemma bench: enough\n"
    )


def test_a_file_that_cannot_be_used_is_one_line_before_anything_is_measured(
    bench: Run, tmp_path: Path
) -> None:
    key, figure = tmp_path / "key", tmp_path / "nowhere" / "a.svg"
    assert bench("--server", "http://127.0.0.1:1", "--api-key-file", str(key)) == (
        2, "", f"dgemma bench: --api-key-file {key} cannot be read: No such file or directory.\n",
    )  # fmt: skip
    assert bench("no-such/model", "--svg", str(figure)) == (
        2, "", f"dgemma bench: --svg {figure}: there is no directory {figure.parent}.\n",
    )  # fmt: skip


def test_what_would_be_left_out_is_refused(bench: Run, tmp_path: Path) -> None:
    figure = str(tmp_path / "a.svg")
    for words in (("--server", "http://127.0.0.1:1"), ("--predict", "h100")):
        assert bench(*words, "--svg", figure) == (
            2, "", f"dgemma bench: --svg is for MODEL; with {words[0]} there is no figure. Drop it.\n",
        )  # fmt: skip
    assert bench("m", "--predict", "h100") == (
        2, "", "dgemma bench: --predict is for the released size; drop MODEL, or --predict.\n",
    )  # fmt: skip
    assert bench("no-such/model", "--svg", str(tmp_path / "a.nosuch"))[2].startswith(
        f"dgemma bench: --svg {tmp_path / 'a.nosuch'}: the name can end in .svg, or one of"
    )


def test_a_figure_that_cannot_be_drawn_is_told_before_anything_is_measured(
    bench: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert bench("no-such/model", "--svg", "a.svg") == (
        2, "", 'dgemma bench: a figure needs matplotlib; run: pip install "dgemma[plot]"\n',
    )  # fmt: skip


@pytest.mark.parametrize("numbers", ["4,x", "0", "-1", "4,,8", ""])
def test_a_list_of_numbers_says_what_it_takes(
    bench: Run, numbers: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        bench("m", f"--lengths={numbers}")
    assert stop.value.code == 2
    assert f"argument --lengths: {numbers!r} has to be whole numbers from 1" in capfd.readouterr().err
