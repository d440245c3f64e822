"""The cost model: ceilings as derived by hand, efficiencies fitted to figures, errors that show."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from dgemma.bench.devices import CONTRADICTIONS, DEVICES, PUBLISHED, device_named
from dgemma.bench.predict import (
    CAUSAL_EFFICIENCY,
    EFFICIENCY,
    FORMATS,
    RELEASED,
    cache_bytes,
    causal_seconds,
    ceiling,
    compare,
    default_format,
    experts_touched,
    fit_efficiency,
    fitted_to,
    growth,
    predict,
    step_seconds,
    weight_bytes,
)
from dgemma.bench.predict_page import markdown_tables, predict_json, predict_page
from dgemma.checkpoint.presets import PRESETS
from dgemma.errors import InputError

DOCS = Path(__file__).parents[2] / "docs" / "performance-model.md"


@pytest.mark.parametrize(
    ("device", "form", "tokens_per_s"),
    [("h100", "fp8", 1837), ("rtx5090", "nvfp4", 1408), ("dgx-spark", "nvfp4", 215)],
)
def test_ceilings_are_those_of_the_derivation_by_hand(device: str, form: str, tokens_per_s: float) -> None:
    step = step_seconds(RELEASED, DEVICES[device], form, efficiency=1.0)
    assert 256 / (17 * step.seconds) == pytest.approx(tokens_per_s, rel=0.03)
    assert step.limited_by == "memory"


def test_bytes_and_operations_of_a_step_are_those_of_the_geometry() -> None:
    step = step_seconds(RELEASED, DEVICES["h100"], "fp8", context=0)
    assert step.bytes == pytest.approx(22.84e9 + 1.66e9 + 2 * 0.738e9 * 2, rel=0.01)
    # 4.58 B weights per token, and attention inside the canvas on top.
    assert step.operations == pytest.approx(2 * 256 * 4.58e9, rel=0.02)


@pytest.mark.parametrize(("form", "ratio"), [("bf16", 2.2), ("nvfp4", 4.4)])
def test_equal_efficiency_favours_diffusion_as_derived(form: str, ratio: float) -> None:
    found = predict(RELEASED, DEVICES["b200"], form, context=0)
    assert found.equal_ratio == pytest.approx(ratio, rel=0.03)


@pytest.mark.parametrize(("form", "gigabytes"), [("bf16", 52), ("nvfp4", 18.82), ("int4", 16.4)])
def test_weights_are_as_large_as_the_published_checkpoints(form: str, gigabytes: float) -> None:
    vision = 2 * 0.55
    assert weight_bytes(RELEASED, form) / 1e9 + vision == pytest.approx(gigabytes, rel=0.01)


def test_one_token_touches_its_own_experts_and_a_canvas_all() -> None:
    assert experts_touched(RELEASED, 1) == pytest.approx(8)
    assert experts_touched(RELEASED, 256) == pytest.approx(128, rel=1e-6)
    assert causal_seconds(RELEASED, DEVICES["h100"], "fp8").experts_touched == pytest.approx(8)


def test_sliding_layers_stop_reading_at_their_window() -> None:
    full = sum(4 * layer.num_kv_heads * layer.head_dim for layer in RELEASED.layers if layer.head_dim == 512)
    grown = cache_bytes(RELEASED, 100_000) - cache_bytes(RELEASED, 50_000)
    assert grown == 50_000 * full


def test_efficiency_is_the_geometric_mean_of_the_class() -> None:
    h100, h200 = fitted_to("datacenter gpu", "diffusion")
    assert (h100.device, h200.device) == ("h100", "h200")  # fixed steps are stated: the L40S does not count
    product = h100.figure / ceiling(h100) * h200.figure / ceiling(h200)
    assert EFFICIENCY["datacenter gpu"] == pytest.approx(product**0.5)
    assert all(0 < value < 1 for value in (*EFFICIENCY.values(), *CAUSAL_EFFICIENCY.values()))


def test_a_class_without_a_figure_says_so_and_takes_the_others() -> None:
    assert fitted_to("cpu", "diffusion") == ()
    others = [value for name, value in EFFICIENCY.items() if name != "cpu"]
    assert min(others) < EFFICIENCY["cpu"] < max(others)
    assert "no published figure" in predict_page("epyc-9755")


def test_a_figure_above_its_ceiling_is_not_fitted_to() -> None:
    above = [one for one in PUBLISHED if one.figure > ceiling(one)]
    assert [(one.device, one.kind) for one in above] == [("dgx-spark", "causal")]
    assert fitted_to("unified memory", "causal") == ()


def test_a_figure_left_out_does_not_help_to_predict_itself() -> None:
    spark = next(one for one in PUBLISHED if one.device == "dgx-spark" and one.figure == 152)
    assert compare(spark).error == pytest.approx(0)  # the only one of its class
    assert abs(compare(spark).error_left_out) > 0.2
    assert fit_efficiency("diffusion", without=spark)["unified memory"] != EFFICIENCY["unified memory"]


def test_fixed_steps_are_predicted_within_a_tenth() -> None:
    for published in PUBLISHED:
        if published.steps is not None:
            assert abs(compare(published).error) < 0.1, published


def test_published_names_are_known_and_every_contradiction_has_its_figures() -> None:
    for published in PUBLISHED:
        assert published.device in DEVICES
        assert published.weight_format in FORMATS
    assert set(CONTRADICTIONS) <= {one.device for one in PUBLISHED}


def test_dgemmas_convention_has_one_forward_less_per_canvas() -> None:
    device = DEVICES["h100"]
    one = predict(RELEASED, device, "fp8", tokens=256)
    assert 16 * one.step.seconds <= one.answer_s < 17 * one.step.seconds
    three = predict(RELEASED, device, "fp8", tokens=3 * 256)
    assert 47 * one.step.seconds < three.answer_s < 51 * one.step.seconds


def test_a_short_answer_pays_for_its_whole_canvas() -> None:
    device = DEVICES["h100"]
    short, full = (predict(RELEASED, device, "fp8", tokens=count) for count in (64, 256))
    assert short.tokens_per_s == pytest.approx(full.tokens_per_s / 4)
    assert short.causal_tokens_per_s == full.causal_tokens_per_s


def test_apple_is_limited_by_compute_and_slower_by_diffusion_as_published() -> None:
    found = predict(RELEASED, DEVICES["mac-studio"], "int8")
    assert found.limited_by == "compute"
    assert found.ratio < 1
    assert "slower than left to right" in predict_page("mac-studio")


def test_company_costs_diffusion_its_advantage() -> None:
    curves = growth(RELEASED, DEVICES["h100"], "fp8")
    last = curves["concurrency"][-1]
    assert last.value == 64
    assert last.ratio < curves["concurrency"][0].ratio
    for points in (curves["concurrency"], curves["canvas"]):
        speeds = [one.tokens_per_s for one in points]
        assert all(b >= a * (1 - 1e-9) for a, b in pairwise(speeds))
    contexts = [one.tokens_per_s for one in curves["context"]]
    assert contexts == sorted(contexts, reverse=True)
    assert curves["context"][-1].value == 262_144


def test_the_default_format_fits_unless_none_does() -> None:
    for device in DEVICES.values():
        assert predict(RELEASED, device, default_format(RELEASED, device)).fits
    assert not predict(RELEASED, DEVICES["rtx4090"], "bf16").fits
    assert default_format(RELEASED, DEVICES["h100"]) == "fp8"
    assert default_format(RELEASED, DEVICES["b200"]) == "nvfp4"


@pytest.mark.parametrize("preset", ["tiny", "small", "medium"])
def test_other_geometries_are_predicted_without_the_released_models_figures(preset: str) -> None:
    config = PRESETS[preset].config
    found = predict(config, DEVICES["h100"], "bf16", tokens=config.canvas_len)
    assert found.tokens_per_s > 0
    assert found.comparisons == ()
    assert "published" not in predict_page("h100", config=config).split("efficiency of class", 1)[0]


def test_a_page_ends_with_one_sentence_and_names_contradictions() -> None:
    for name in DEVICES:
        lines = predict_page(name).splitlines()
        assert lines[-1].startswith("On the ")
        assert "left to right" in lines[-1]
        assert "nothing was run by us" in lines[1]
        for text in CONTRADICTIONS.get(name, ()):
            assert f"contradiction: {text}" in lines


def test_json_has_what_the_page_has() -> None:
    found = json.loads(json.dumps(predict_json("dgx-station")))
    assert found["device"]["name"] == "dgx-station"
    assert {one["published"]["figure"] for one in found["comparisons"]} == {800, 2000}
    assert found["contradictions"]
    assert set(found["growth"]) == {"context", "concurrency", "canvas"}
    assert found["measured_by_us"] is False


def test_unknown_names_are_refused_with_a_suggestion() -> None:
    with pytest.raises(InputError, match=r"did you mean 'h100'.*Known: h100, h200"):
        device_named("h10")
    assert device_named("H100").name == "h100"
    with pytest.raises(InputError, match="did you mean 'nvfp4'"):
        step_seconds(RELEASED, DEVICES["h100"], "nvfp")
    for wrong in ({"steps": 0}, {"tokens": 0}, {"canvases": 0}, {"context": -1}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))} is"):
            predict(RELEASED, DEVICES["h100"], "fp8", **wrong)


def test_lossless_pays_in_proportion_to_what_a_canvas_adds() -> None:
    found = predict(RELEASED, DEVICES["h100"], "fp8")
    assert [one.tokens_per_canvas for one in found.lossless] == [4, 8, 16, 32]
    for one in found.lossless:
        seconds = 5 * found.step.seconds  # four draft steps, one that verifies
        assert one.tokens_per_s == pytest.approx(one.tokens_per_canvas / seconds)
        assert one.ratio == pytest.approx(one.tokens_per_s / found.causal_tokens_per_s)
    short = predict(replace(RELEASED, canvas_len=16), DEVICES["h100"], "fp8")
    assert [one.tokens_per_canvas for one in short.lossless] == [4, 8, 16]


def test_the_documented_tables_are_the_models() -> None:
    text = DOCS.read_text()
    for table in markdown_tables().split("\n\n"):
        assert table in text, f"not in {DOCS.name}:\n{table}"


def test_predicting_imports_no_torch() -> None:
    code = "import dgemma.bench.predict_page, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
