"""The file of results: a resumed run equals an uninterrupted one, and no other file is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dgemma
from dgemma import Answer, InputError, LanguageModel, LoraSettings
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.durable_files import LineFile
from dgemma.evaluation.report import EvaluationReport
from dgemma.evaluation.results import AnswerStats, ResultsFile, mark_of, read_results, seed_of, stored_run
from dgemma.evaluation.runner import evaluate, fingerprint
from sums_task import OPTIONS, SEED, Sums, timeless


class Interrupted(Sums):
    """Ctrl-C while example 6 is scored."""

    def score(self, example: dict[str, Any], answer: Answer) -> Mapping[str, float]:
        if example["number"] == 6:
            raise KeyboardInterrupt
        return super().score(example, answer)


def test_a_resumed_run_equals_an_uninterrupted_one(
    lm: LanguageModel, whole: EvaluationReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run.jsonl"
    with pytest.raises(KeyboardInterrupt):
        evaluate(lm, Interrupted(), options=OPTIONS, seed=SEED, batch=4, out=out, model="tiny")
    assert sorted(read_results(out).results) == [0, 1, 2, 3, 4, 5]
    with out.open("ab") as file:
        file.write(b'{"number": 6, "mark": "cut off')  # a crash in the middle of a line
    asked: list[int] = []
    generate = LanguageModel.generate

    def counted(self: LanguageModel, prompts: Any, **options: Any) -> Any:
        asked.append(len(prompts))
        return generate(self, prompts, **options)

    monkeypatch.setattr(LanguageModel, "generate", counted)
    # The file's seed is taken, if none is given.
    resumed = evaluate(lm, Sums(), options=OPTIONS, batch=3, out=out, model="tiny")
    assert timeless(resumed) == timeless(whole)
    assert sum(asked) == 4
    stored = read_results(out)
    assert stored.model == "tiny"
    assert [stored.results[n] for n in range(10)] == list(resumed.results)
    assert len(out.read_text().splitlines()) == 11
    again = evaluate(lm, Sums(), options=OPTIONS, seed=SEED, out=out)
    assert again.results == resumed.results
    assert sum(asked) == 4
    assert len(out.read_text().splitlines()) == 11


def test_what_failed_is_tried_again(lm: LanguageModel, tmp_path: Path) -> None:
    class Mended(Sums):
        broken = True

        def score(self, example: dict[str, Any], answer: Answer) -> Mapping[str, float]:
            if self.broken and example["number"] == 1:
                raise ValueError("not yet")
            return super().score(example, answer)

    out = tmp_path / "run.jsonl"
    task = Mended()
    for _ in range(2):
        assert evaluate(lm, task, options=OPTIONS, seed=SEED, limit=3, out=out).failed == 1
    task.broken = False
    mended = evaluate(lm, task, options=OPTIONS, seed=SEED, limit=3, out=out)
    assert mended.failed == 0
    assert read_results(out).results[1] == mended.results[1]  # the later line counts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 6}, "seed is 5, not 6"),
        ({"options": {**OPTIONS, "max_tokens": 41}}, "options.max_tokens is 40, not 41. Choose another file"),
        ({"system": "x"}, "system is None, not 'x'"),
    ],
)
def test_a_file_of_other_settings_is_refused_and_left_alone(
    changes: dict[str, Any], message: str, lm: LanguageModel, tmp_path: Path
) -> None:
    out = tmp_path / "run.jsonl"
    common: dict[str, Any] = {"options": OPTIONS, "seed": SEED, "limit": 1, "out": out}
    evaluate(lm, Sums(), **common)
    before = out.read_bytes()
    with pytest.raises(InputError, match=f"run.jsonl holds results of other settings: .*{message}"):
        evaluate(lm, Sums(), **{**common, **changes})
    assert out.read_bytes() == before


def test_examples_that_changed_are_noticed(lm: LanguageModel, tmp_path: Path) -> None:
    class Changed(Sums):
        def examples(self) -> Any:
            return [{**example, "wanted": "other"} for example in super().examples()]

    out = tmp_path / "run.jsonl"
    evaluate(lm, Sums(), options=OPTIONS, seed=SEED, limit=1, out=out)
    with pytest.raises(InputError, match=r"example 0 is another one than in .*run.jsonl; the task has chan"):
        evaluate(lm, Changed(), options=OPTIONS, seed=SEED, limit=1, out=out)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"my notes\n", "is not a file of results; `dgemma eval --out FILE` writes one"),
        (b"no end of line", "is not a file of results"),
        (b'{"kind": "dgemma-eval-1", "model": "", "settings": 3}\n', "is not a file of results"),
        (b'{"kind": "dgemma-eval-1", "model": "", "settings": {}}\n{"number": 0}\n', "line 2 is not the res"),
        (b'{"kind": "dgemma-eval-1", "model": "", "settings": {}}\nx\n', "line 2 is not the result of an"),
    ],
)
def test_a_file_that_is_no_run_is_refused_and_left_alone(
    content: bytes, message: str, lm: LanguageModel, tmp_path: Path
) -> None:
    out = tmp_path / "run.jsonl"
    out.write_bytes(content)
    with pytest.raises(InputError, match=message):
        evaluate(lm, Sums(), options=OPTIONS, out=out)
    assert out.read_bytes() == content


def test_an_empty_file_is_begun_and_others_are_named(lm: LanguageModel, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    out.touch()
    evaluate(lm, Sums(), options=OPTIONS, limit=1, out=out)
    assert len(read_results(out).results) == 1
    with pytest.raises(InputError, match=r"none.jsonl cannot be read: No such file"):
        read_results(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="cannot be written: No such file or directory"):
        evaluate(lm, Sums(), out=tmp_path / "no" / "where.jsonl")


def test_a_seed_in_the_file_that_is_none_is_a_difference(lm: LanguageModel, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    evaluate(lm, Sums(), options=OPTIONS, seed=SEED, limit=1, out=out)
    out.write_text(out.read_text().replace('"seed": 5}', '"seed": "five"}'))
    with pytest.raises(InputError, match="seed is 'five', not"):
        evaluate(lm, Sums(), options=OPTIONS, limit=1, out=out)


@pytest.mark.parametrize(
    "tail", [b'{"number": 1, "ma', bytes(3000), b'{"nu' + bytes(90) + b'l}\n{"number": 2}\n']
)
def test_a_torn_end_is_dropped(tail: bytes, lm: LanguageModel, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    evaluate(lm, Sums(), options=OPTIONS, seed=SEED, limit=1, out=out)
    before = out.read_bytes()
    out.write_bytes(before + tail)
    evaluate(lm, Sums(), options=OPTIONS, seed=SEED, limit=1, out=out)
    assert out.read_bytes() == before


def test_a_torn_first_line_is_begun_again(lm: LanguageModel, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    out.write_bytes(b'{"kind": "dgemma-eval-1", "model": "ti')
    evaluate(lm, Sums(), options=OPTIONS, seed=SEED, limit=1, out=out)
    assert len(out.read_bytes().splitlines()) == 2


def test_two_runs_do_not_write_one_file(lm: LanguageModel, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    first = ResultsFile(out, None, model="tiny", settings={})
    with pytest.raises(InputError, match=r"run\.jsonl is being written by another process; wait for it"):
        ResultsFile(out, stored_run(out), model="tiny", settings={})
    first.close()
    ResultsFile(out, stored_run(out), model="tiny", settings={}).close()


def test_a_file_that_grew_before_it_was_locked_is_left_alone(lm: LanguageModel, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    ResultsFile(out, None, model="tiny", settings={}).close()
    before = out.read_bytes()
    with pytest.raises(InputError, match=r"run\.jsonl was changed meanwhile; run it again"):
        ResultsFile(out, None, model="tiny", settings={})
    assert out.read_bytes() == before


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read: Is a directory"):
        stored_run(tmp_path)


def test_a_file_that_is_refused_is_not_kept_locked(tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    out.write_text("another program's\n")
    with pytest.raises(InputError, match="is not a file of results") as refused:
        ResultsFile(out, None, model="tiny", settings={})
    LineFile(out).close()
    assert refused.value.field == "path"


def test_a_full_disk_is_said_with_a_remedy() -> None:
    with pytest.raises(InputError, match=r"cannot be written: No space left on device\. Free some space"):
        ResultsFile("/dev/full", None, model="tiny", settings={})


# What the file knows its run by


def test_the_fingerprint_tells_trained_weights_apart(lm: LanguageModel, tmp_path: Path) -> None:
    write_random(tmp_path / "a", PRESETS["tiny"].config, dtype="F32", seed=1)
    same, other = dgemma.load(tmp_path / "a"), dgemma.load(tmp_path / "a")
    assert fingerprint(same) == fingerprint(lm)
    assert len(fingerprint(lm)) == 16
    with torch.no_grad():
        for weight in other.transformer.parameters():
            weight += 1e-4 * torch.randn_like(weight)
    assert fingerprint(other) != fingerprint(lm)


def test_marks_tell_examples_apart_where_they_can() -> None:
    assert mark_of({"a": 1}, "x") == mark_of({"a": 1}, "x")
    assert len({mark_of({"a": 1}, "x"), mark_of({"a": 2}, "x"), mark_of({"a": 1}, "y")}) == 3
    shown = AnswerStats(
        text="", finish_reason="stop", decode="diffuse", tokens=0, forwards=0, steps=(), prompt_tokens=0,
        seconds=0.0,
    )  # fmt: skip
    assert mark_of(shown, "x") != mark_of(replace(shown, text="z"), "x")
    assert mark_of(object(), "x") == mark_of(object(), "x")  # no address of memory in it


def test_seeds_are_fixed_for_good() -> None:
    """Files of earlier versions must go on with the same seeds."""
    assert [seed_of(5, 0), seed_of(5, 1), seed_of(6, 0)] == [1465283036, 3101376431, 2369882140]


def test_adapters_and_their_scales_have_fingerprints_of_their_own(lm: LanguageModel) -> None:
    models = [lm, *(lm.with_adapter(LoraSettings(alpha=alpha)) for alpha in (8.0, 16.0))]
    assert len({fingerprint(model) for model in models}) == 3
