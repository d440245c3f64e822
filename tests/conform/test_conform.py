"""Transformers passes on every geometry; a fault in its forward is named with its layer, pass or step."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dgemma.cli.main import main
from dgemma.conform import runtimes
from dgemma.conform.case import ConformCase, make_case
from dgemma.conform.compare import Conformance, compare
from dgemma.conform.geometries import GEOMETRIES, Geometry, write_geometry
from dgemma.conform.run import conform
from dgemma.conform.runners import run_transformers
from dgemma.conform.runtimes import RUNTIMES, NotInstalledError, OtherRuntimeError, Runtime
from sizes import full

SMALL_WINDOW = GEOMETRIES[0]
LAST = 3 * SMALL_WINDOW.window


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cases")


@cache
def written(geometry: Geometry, place: Path) -> tuple[ConformCase, Path]:
    path = place / geometry.name
    path.mkdir()
    case = make_case(write_geometry(geometry, path / "checkpoint"), geometry.name, seed=geometry.seed)
    case.write(path)
    return case, path


def outcome(geometry: Geometry, place: Path, fault: Callable[[Any], None] | None = None) -> Conformance:
    case, path = written(geometry, place)
    model = run_transformers.load(path)
    if fault is not None:
        with torch.no_grad():
            fault(model)
    plan = json.loads((path / "plan.json").read_text())
    found = run_transformers.run(model, load_file(path / "inputs.safetensors"), plan)
    return compare(geometry.name, case.expected, found)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
def test_transformers_passes(geometry: Geometry, place: Path) -> None:
    found = outcome(geometry, place)
    assert found.passed, found.parting
    assert found.not_compared == ()
    assert found.largest < 1e-4


def test_a_bundled_model_is_compared_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Runtime, case: Path, python: Path) -> None:
        assert (case / "checkpoint" / "config.json").is_file()
        save_file({"generation/tokens": torch.zeros(3, dtype=torch.int64)}, case / "outputs.safetensors")

    monkeypatch.setattr(Runtime, "run", run)
    monkeypatch.setattr(Runtime, "python", lambda self: Path("python"))
    (found,) = conform(RUNTIMES["transformers"], "bundled:sudoku")
    assert (found.case, found.compared, found.passed) == ("bundled:sudoku", 1, False)


# Faults


def layers(model: Any) -> tuple[Any, Any]:
    return model.model.encoder.language_model.layers, model.model.decoder.layers


def window_one_longer(model: Any) -> None:
    config = model.config.text_config
    config.sliding_window += 1
    for part in (model.model.encoder.language_model, model.model.decoder):
        part.config.sliding_window = config.sliding_window
    for stack in layers(model):
        for layer in stack:
            if getattr(layer.self_attn, "sliding_window", None):
                layer.self_attn.sliding_window = config.sliding_window


def canvas_embedding_unscaled(model: Any) -> None:
    model.model.decoder.embed_tokens.embed_scale.fill_(1.0)


def wrong_rope_base_in_full_layers(model: Any) -> None:
    for part in (model.model.encoder.language_model, model.model.decoder):
        part.rotary_emb.full_attention_inv_freq *= 0.9


def query_norm_forgotten_in_layer_1(model: Any) -> None:
    layers(model)[0][1].self_attn.q_norm.weight.fill_(1.0)


def canvas_scalar_forgotten_in_layer_2(model: Any) -> None:
    layers(model)[1][2].layer_scalar.fill_(1.0)


def prompt_scalar_of_the_canvas_in_layer_1(model: Any) -> None:
    layers(model)[0][1].layer_scalar.copy_(layers(model)[1][1].layer_scalar)


def router_scale_forgotten_in_layer_1(model: Any) -> None:
    layers(model)[0][1].router.per_expert_scale.fill_(1.0)


def experts_swapped_in_layer_2(model: Any) -> None:
    down = layers(model)[0][2].experts.down_proj
    down.copy_(down.flip(0).clone())


def self_conditioning_ignored(model: Any) -> None:
    model.model.decoder.self_conditioning.down_proj.weight.zero_()


def logits_not_capped(model: Any) -> None:
    model.final_logit_softcapping = 1e5


def stale_cache(model: Any) -> None:
    """The second text that is encoded adds nothing: the canvas sees the old context."""
    encode = model.model.encoder.forward

    def forward(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if past_key_values is not None and past_key_values.get_seq_length():
            out = encode(*args, past_key_values=copy.deepcopy(past_key_values), **kwargs)
            out.past_key_values = past_key_values
            return out
        return encode(*args, past_key_values=past_key_values, **kwargs)

    model.model.encoder.forward = forward


def canvas_positions_from_zero(model: Any) -> None:
    rotary = model.model.decoder.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, positions, *rest, **options: forward(
        x, positions - positions[:, :1], *rest, **options
    )


FAULTS = [
    (window_one_longer, ("commit", "hidden.0")),
    # A norm after it hides the factor, until something is added before that norm.
    (canvas_embedding_unscaled, ("conditioned", "hidden.0")),
    # The first context has one token, to which attention is the same whatever the scores are.
    (wrong_rope_base_in_full_layers, ("canvas", "hidden.1")),
    (query_norm_forgotten_in_layer_1, ("canvas", "hidden.1")),
    (canvas_scalar_forgotten_in_layer_2, ("canvas", "hidden.2")),
    (prompt_scalar_of_the_canvas_in_layer_1, ("prompt", "hidden.1")),
    (router_scale_forgotten_in_layer_1, ("prompt", "hidden.1")),
    (experts_swapped_in_layer_2, ("prompt", "hidden.2")),
    (self_conditioning_ignored, ("conditioned", "hidden.0")),
    (logits_not_capped, ("prompt", "logits")),
    (stale_cache, ("next", "hidden.0")),
    (canvas_positions_from_zero, ("canvas", "hidden.0")),
]


@pytest.mark.parametrize(("fault", "expected"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_is_located(fault: Callable[[Any], None], expected: tuple[str, str], place: Path) -> None:
    found = outcome(SMALL_WINDOW, place, fault)
    assert found.parting is not None
    assert tuple(found.parting.name.split("/")[1:]) == expected, found.parting.place


def test_a_window_that_is_off_by_one_is_seen_where_the_window_ends(place: Path) -> None:
    found = outcome(SMALL_WINDOW, place, window_one_longer)
    assert found.parting is not None
    assert found.parting.name == "1/commit/hidden.0"
    assert 1 + found.parting.position == SMALL_WINDOW.window, "the first token that should not see the first"


def test_a_sampler_that_accepts_too_much_is_named_with_its_step(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = run_transformers.generation.EntropyBoundSampler
    make = kind.__init__

    def generous(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        config.entropy_bound = 5.0
        make(self, config, *args, **kwargs)

    monkeypatch.setattr(kind, "__init__", generous)
    found = outcome(SMALL_WINDOW, place)
    assert found.parting is not None
    assert found.parting.name == "step/canvas"


def test_a_schedule_that_is_off_by_one_is_named_with_its_step(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = run_transformers.generation.LinearTemperatureScheduleLogitsProcessor
    call = kind.__call__
    monkeypatch.setattr(
        kind, "__call__", lambda self, ids, logits, cur_step: call(self, ids, 3 * logits, cur_step=cur_step)
    )
    found = outcome(SMALL_WINDOW, place)
    assert found.parting is not None
    assert found.parting.name.startswith(("step/", "generation/"))


def test_what_a_runtime_does_not_show_is_counted_not_passed_over(place: Path) -> None:
    case, _ = written(SMALL_WINDOW, place)
    some = {name: tensor for name, tensor in case.expected.items() if name.endswith("logits")}
    found = compare("some", case.expected, some)
    assert found.passed
    assert len(found.not_compared) == len(case.expected) - len(some)
    assert not compare("none", case.expected, {}).passed, "nothing compared is nothing shown"


def test_shapes_and_not_numbers_part() -> None:
    ours = {"1/prompt/logits": torch.zeros(2, 3)}
    assert compare("shape", ours, {"1/prompt/logits": torch.zeros(3, 3)}).parting is not None
    assert compare("nan", ours, {"1/prompt/logits": torch.full((2, 3), float("nan"))}).parting is not None


def test_the_command_prints_a_table_and_an_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "transformers", "--geometries", "1"]) == 0
    assert "small window" in capsys.readouterr().out
    assert main(["conform", "transformer"]) == 2
    assert "transformers" in capsys.readouterr().err


@full
def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "transformers", "--geometries", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["vllm"], "its build for CPUs refuses diffusion models"),
        (["gemma-jax"], "get https://github.com/google-deepmind/gemma"),
        (["gemma-jax", "--source", "."], "must be a copy of https://github.com/google-deepmind/gemma"),
        (["transformers", "--source", "."], "transformers is installed from its packages"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_its_reason(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conform", *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_runtime_that_cannot_be_installed_has_an_exit_status_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "gemma").mkdir()
    (tmp_path / "gemma" / "__init__.py").write_text("__version__ = '9.9'\n")
    monkeypatch.setitem(RUNTIMES, "gemma-jax", replace(RUNTIMES["gemma-jax"], least_python=(4, 0)))
    assert main(["conform", "gemma-jax", "--source", str(tmp_path)]) == 3
    assert "gemma-jax needs Python 4.0 or newer, and none is on the path" in capsys.readouterr().err

    def refuse(command: list[str], otherwise: str) -> None:
        if "pip" in command:
            raise OtherRuntimeError(f"{otherwise}: no such package")

    monkeypatch.setattr(runtimes, "_call", refuse)
    missing = replace(RUNTIMES["transformers"], requirements=("dgemma-no-such-package==0",))
    with pytest.raises(NotInstalledError, match="transformers cannot be installed: no such package"):
        missing.python(tmp_path / "cache")


def test_a_copy_without_a_package_is_reported_with_its_version_and_commit(tmp_path: Path) -> None:
    (tmp_path / "gemma").mkdir()
    (tmp_path / "gemma" / "__init__.py").write_text("__version__ = '9.9'\n")
    runtime = RUNTIMES["gemma-jax"].with_source(str(tmp_path))
    assert runtime.report["gemma"] == "9.9"
    assert set(runtime.report) == {"gemma", "jax", "flax"}
    for argv in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a", "-c", "commit.gpgsign=false", "commit", "-qm", "a"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *argv], check=True)
    assert re.fullmatch(r"9\.9 at [0-9a-f]{10}", runtime.report["gemma"])


def test_differences_of_logits_are_listed_by_pass(place: Path) -> None:
    found = outcome(SMALL_WINDOW, place, canvas_positions_from_zero)
    assert set(found.largest_by_pass) == {"prompt", "canvas", "conditioned", "commit", "next"}
    assert found.largest_by_pass["prompt"] < 1e-4 < found.largest_by_pass["canvas"]


@full
def test_a_runtime_that_fails_is_one_line_with_its_own_words(tmp_path: Path) -> None:
    runtime = replace(RUNTIMES["transformers"], name="broken")
    with pytest.raises(Exception, match="broken failed on"):
        runtime.run(tmp_path, runtime.python())
