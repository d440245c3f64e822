"""Both losses of a checkpoint on a text, and what they say of its causal pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dgemma
from dgemma.cli.main import main
from dgemma.errors import InputError
from dgemma.evaluation.likelihood import TokenPair, log_likelihoods
from dgemma.language_model import LanguageModel
from dgemma.training.both_sides import BothSides, measure_both_sides

TEXTS = ("Please send two lamps to Ann.", "Lunch tomorrow at noon, in the castle, with Tom and with Eve.")


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return dgemma.load("bundled:forms")


def sides(causal: float, noisy: float | None) -> BothSides:
    return BothSides(
        examples=1, causal=causal, diffusion=1.0, diffusion_by_noise=(0.1, None, None, None, noisy)
    )


def test_the_causal_loss_is_that_of_the_causal_pass(lm: LanguageModel) -> None:
    found = measure_both_sides(lm, [{"text": text} for text in TEXTS])
    tokenizer = lm.tokenizer
    assert tokenizer.bos_id is not None
    assert tokenizer.eos_id is not None
    pairs = [TokenPair((tokenizer.bos_id,), (*tokenizer.encode(text), tokenizer.eos_id)) for text in TEXTS]
    expected = -sum(likelihood.log_prob for _, likelihood in log_likelihoods(lm, pairs))
    assert found.causal == pytest.approx(expected / sum(len(pair.continuation) for pair in pairs), rel=1e-4)
    assert found.examples == 2


def test_end_tokens_that_fill_a_canvas_do_not_count(lm: LanguageModel) -> None:
    """A canvas of a short text is mostly such tokens, which are easy."""
    found = measure_both_sides(lm, [{"text": TEXTS[0]}] * 20)
    assert found.diffusion > 3


def test_no_response_of_an_example_counts_its_fill_and_tokens_may_follow(lm: LanguageModel) -> None:
    ids = lm.tokenizer.encode(TEXTS[1])
    record = {"tokens": ids, "responses": [[2, 4], [6, 8]]}
    assert measure_both_sides(lm, [record] * 20).diffusion > 3


def test_a_causal_pass_is_kept_if_it_beats_a_canvas_of_noise() -> None:
    assert sides(2.0, 3.0).kept_causal is True
    assert "can rest on it" in sides(2.0, 3.0).report()
    assert sides(3.0, 2.0).kept_causal is False
    assert "noise.encoder_weight" in sides(3.0, 2.0).report()
    assert sides(3.0, None).kept_causal is None
    assert "causal pass predicts" not in sides(3.0, None).report()


def test_a_stream_has_no_end_to_measure(lm: LanguageModel) -> None:
    with pytest.raises(InputError, match="give a file, or a list"):
        measure_both_sides(lm, iter([{"text": "a"}]))


def test_the_commands_print_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "held-out.txt"
    file.write_text("\n".join(TEXTS))
    assert main(["eval", "bundled:forms", f"loss:{file}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["examples"] == 1
    assert main(["selfcheck", "bundled:forms", "--dtype", "float32"]) == 0
    printed = capsys.readouterr().out
    assert "PASSED" in printed
    assert "bundled:forms on a short English text:\ncausal pass" in printed
    assert main(["selfcheck", "bundled:forms", "--dtype", "float32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["causal"] > 0
