"""Runs: the same results in any batch and with any limit; a failure harms nobody else."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dgemma
from dgemma import InputError, LanguageModel
from dgemma.evaluation.report import EvaluationReport
from dgemma.evaluation.results import AnswerStats
from dgemma.evaluation.runner import Evaluation, evaluate
from dgemma.evaluation.task import EvaluationPlan
from sums_task import OPTIONS, SEED, Sums, timeless

# What a result depends on


def test_results_do_not_depend_on_the_batch(lm: LanguageModel, whole: EvaluationReport) -> None:
    assert len({result.written.text for result in whole.results if result.written}) == 10
    for batch in (1, 3, 16):
        again = evaluate(lm, Sums(), options=OPTIONS, seed=SEED, batch=batch)
        assert timeless(again) == timeless(whole)
        assert again.scores == whole.scores


def test_results_do_not_depend_on_the_limit(lm: LanguageModel, whole: EvaluationReport) -> None:
    some = evaluate(lm, Sums(), options=OPTIONS, seed=SEED, batch=4, limit=5)
    assert timeless(some) == timeless(whole)[:5]
    assert some.stopped is None


def test_an_example_can_be_asked_again_alone(lm: LanguageModel, whole: EvaluationReport) -> None:
    result = whole.results[7]
    prompt = Sums().prompt({"number": 7})
    answer = lm.chat(prompt, seed=result.seed, **OPTIONS)
    assert result.written == AnswerStats.of(answer, result.written.seconds if result.written else 0)
    other = evaluate(lm, Sums(), options=OPTIONS, seed=SEED + 1, limit=1)
    assert other.results[0].seed != whole.results[0].seed


def test_a_seed_is_drawn_and_named(lm: LanguageModel) -> None:
    seeds = {evaluate(lm, Sums(), options=OPTIONS, limit=1).settings["seed"] for _ in range(3)}
    assert len(seeds) == 3


def test_progress_hears_every_result(lm: LanguageModel) -> None:
    heard: list[int] = []
    evaluate(lm, Sums(), options=OPTIONS, limit=3, batch=2, progress=lambda r: heard.append(r.number))
    assert heard == [0, 1, 2]


# How prompts are read


class Asking(Sums):
    def __init__(self, prompt: Any) -> None:
        self._prompt = prompt

    def prompt(self, example: dict[str, Any]) -> Any:
        return self._prompt


def prompt_tokens(lm: LanguageModel, prompt: Any, task: type[Asking] = Asking, **choices: Any) -> int:
    report = evaluate(lm, task(prompt), options=OPTIONS, limit=1, **choices)
    written = report.results[0].written
    assert written is not None, report.results[0].failure
    return written.prompt_tokens


def test_text_is_one_user_turn_unless_raw(lm: LanguageModel) -> None:
    def rendered(*messages: dict[str, str], **choices: bool) -> int:
        return len(lm.chat_template.render(list(messages), **choices))

    user = {"role": "user", "content": "Hello there"}
    system = {"role": "system", "content": "Be brief."}
    text = 1 + len(lm.tokenizer.encode("Hello there"))
    assert prompt_tokens(lm, "Hello there") == rendered(user) > text
    assert prompt_tokens(lm, "Hello there", raw=True) == text
    assert prompt_tokens(lm, "Hello there", type("Raw", (Asking,), {"raw": True})) == text
    assert prompt_tokens(lm, [system, user]) == rendered(system, user)
    assert prompt_tokens(lm, [2, 17, 30]) == 3
    assert prompt_tokens(lm, "Hello there", system="Be brief.") == rendered(system, user)
    # The caller's system text takes the place of the task's.
    theirs = {"role": "system", "content": "Talk on and on, and then some."}
    assert prompt_tokens(lm, [theirs, user], system="Be brief.") == rendered(system, user)


THINKING = """{{ '<bos>' }}{% if enable_thinking %}{{ '<|think|>' }}{% endif %}\
{% for message in messages %}{{ '<|turn>' + message['role'] + '\n' + message['content'] + '<turn|>\n' }}\
{% endfor %}{{ '<|turn>model\n' }}"""


def test_thinking_is_switched_on_where_the_template_can(lm: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="this checkpoint's chat template cannot switch it"):
        evaluate(lm, Sums(), thinking=True)
    lm.save(tmp_path / "thinks")
    (tmp_path / "thinks" / "chat_template.jinja").write_text(THINKING)
    thinks = dgemma.load(tmp_path / "thinks")
    assert prompt_tokens(thinks, "Hello", thinking=True) == 1 + prompt_tokens(thinks, "Hello")


def test_a_model_without_a_template_continues_text(lm: LanguageModel, tmp_path: Path) -> None:
    lm.save(tmp_path / "bare")
    for file in (tmp_path / "bare").glob("chat_template*"):
        file.unlink()
    config = json.loads((tmp_path / "bare" / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "bare" / "tokenizer_config.json").write_text(json.dumps(config))
    bare = dgemma.load(tmp_path / "bare")
    assert prompt_tokens(bare, "Hello") == 1 + len(bare.tokenizer.encode("Hello"))
    with pytest.raises(InputError, match="system needs the chat template, and this model has none"):
        evaluate(bare, Sums(), system="Be brief.")
    report = evaluate(bare, Asking([{"role": "user", "content": "x"}]), limit=1)
    assert "has no chat template" in str(report.results[0].failure)


@pytest.mark.parametrize(
    ("prompt", "choices", "reason"),
    [
        ([{"role": "user", "content": "x"}], {"raw": True}, "the prompt is messages, and raw leaves"),
        ([2, 3], {"system": "x"}, "the prompt is token ids, which take no system text"),
        ([], {}, r"the prompt is \[\]; give text, a list of messages, or token ids"),
        (["a", "b"], {}, "give text, a list of messages, or token ids"),
        ([True], {}, "give text, a list of messages, or token ids"),
        (None, {}, "the prompt is None"),
        ([{"role": "wizard", "content": "x"}], {}, "has role 'wizard'"),
        ([10**9], {}, "holds token 1000000000"),
    ],
)
def test_a_prompt_that_cannot_be_read_fails_its_example(
    prompt: Any, choices: dict[str, Any], reason: str, lm: LanguageModel
) -> None:
    report = evaluate(lm, Asking(prompt), limit=1, **choices)
    assert report.failed == 1
    assert re.search(reason, str(report.results[0].failure))


def test_choices_that_contradict_are_refused_before_anything_runs(lm: LanguageModel) -> None:
    with pytest.raises(InputError, match="thinking needs the chat template, and raw leaves it out"):
        evaluate(lm, Sums(), raw=True, thinking=True)


# Options


class Choosy(Sums):
    def options(self) -> dict[str, Any]:
        return {"max_tokens": 7, "max_denoising_steps": 3, "entropy_bound": 0.2}


def test_the_callers_options_override_the_tasks(lm: LanguageModel) -> None:
    def options(**given: Any) -> dict[str, Any]:
        found: dict[str, Any] = (
            Evaluation(lm, Choosy(), EvaluationPlan(options=given)).report().settings["options"]
        )
        return found

    own = options()
    assert (own["max_tokens"], own["max_denoising_steps"], own["entropy_bound"]) == (7, 3, 0.2)
    mine = options(max_tokens=9)
    assert (mine["max_tokens"], mine["max_denoising_steps"]) == (9, 3)
    preset = options(preset="fast", entropy_bound=0.25)
    assert (preset["max_tokens"], preset["max_denoising_steps"], preset["entropy_bound"]) == (7, 24, 0.25)
    written = evaluate(lm, Choosy(), limit=1, options={"ignore_end": True}).results[0].written
    assert written is not None
    assert (written.tokens, written.steps) == (7, (3,))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"limit": 0}, "limit is 0; it must be a whole number of at least 1"),
        ({"limit": True}, "limit is True"),
        ({"batch": 0}, "batch is 0"),
        ({"batch": None}, "batch is None"),
        ({"seed": 1 << 70}, "seed is 1180591620717411303424"),
        ({"options": {"seed": 1}}, "options holds a seed; give it as seed"),
        ({"options": {"max_tokns": 1}}, "unknown option 'max_tokns'; did you mean 'max_tokens'?"),
        ({"options": {"preset": "fats"}}, "did you mean 'fast'?"),
    ],
)
def test_wrong_choices_are_refused(choices: dict[str, Any], message: str, lm: LanguageModel) -> None:
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        evaluate(lm, Sums(), **choices)


def test_wrong_options_of_a_task_are_its_own(lm: LanguageModel) -> None:
    task = type("Wrong", (Sums,), {"options": lambda self: {"max_tokens": -1}})()
    with pytest.raises(InputError, match=r"options\(\) of task 'sums': max_tokens is -1"):
        evaluate(lm, task)


# Failures


def test_a_prompt_that_is_too_long_harms_no_other(lm: LanguageModel, whole: EvaluationReport) -> None:
    class Long(Sums):
        def prompt(self, example: dict[str, Any]) -> Any:
            return [2] * 9000 if example["number"] == 2 else super().prompt(example)

    report = evaluate(lm, Long(), options=OPTIONS, seed=SEED, batch=4)
    found, expected = timeless(report), timeless(whole)
    assert found[:2] + found[3:] == expected[:2] + expected[3:]
    assert (report.n, report.failed) == (10, 1)
    failed = report.results[2]
    assert "9000 tokens" in str(failed.failure)
    assert (failed.scores, failed.written, failed.groups) == ({}, None, ("low",))
    # It counts as 0, in the whole and in its group.
    lengths = [result.scores["length"] for result in whole.results]
    assert report.scores["length"].mean == pytest.approx((sum(lengths) - lengths[2]) / 10)
    assert report.scores["length"].n == 10
    in_group = report.to_json()["groups"]["low"]
    assert (in_group["n"], in_group["failed"], in_group["scores"]["even"]["n"]) == (4, 1, 4)


@pytest.mark.parametrize("method", ["prompt", "groups", "score"])
def test_an_error_of_the_task_fails_one_example_and_keeps_the_rest(
    method: str, lm: LanguageModel, whole: EvaluationReport
) -> None:
    def broken(self: Sums, example: dict[str, Any], *rest: Any) -> Any:
        if example["number"] == 3:
            raise KeyError("nothing here")
        return getattr(Sums, method)(self, example, *rest)

    task = type("Broken", (Sums,), {method: broken})()
    report = evaluate(lm, task, options=OPTIONS, seed=SEED, batch=4)
    failed = report.results[3]
    assert str(failed.failure).startswith(f"{method}() of task 'sums' raised KeyError: 'nothing here' (test_")
    assert report.to_json()["failures"] == [{"number": 3, "reason": failed.failure}]
    found, expected = timeless(report), timeless(whole)
    assert found[:3] + found[4:] == expected[:3] + expected[4:]
    if method == "score":  # the answer was there, and is kept
        assert found[3].written == expected[3].written


def test_a_batch_that_does_not_fit_into_memory_is_tried_one_by_one(
    lm: LanguageModel, whole: EvaluationReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = LanguageModel.generate

    def small_memory(self: LanguageModel, prompts: Any, **options: Any) -> Any:
        if len(prompts) > 1:
            raise torch.OutOfMemoryError
        return generate(self, prompts, **options)

    monkeypatch.setattr(LanguageModel, "generate", small_memory)
    assert timeless(evaluate(lm, Sums(), options=OPTIONS, seed=SEED, batch=4)) == timeless(whole)

    def no_memory(self: LanguageModel, prompts: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(LanguageModel, "generate", no_memory)
    report = evaluate(lm, Sums(), options=OPTIONS, batch=4)
    assert report.failed == report.n == 10
    assert report.results[0].failure == "OutOfMemoryError"
    assert (report.scores, report.steps_mean, report.seconds_per_example) == ({}, None, None)
    json.dumps(report.to_json())


def test_our_own_mistakes_are_not_counted_as_the_models(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: LanguageModel, prompts: Any, **options: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(LanguageModel, "generate", broken)
    with pytest.raises(AssertionError):
        evaluate(lm, Sums(), options=OPTIONS)


def test_examples_that_break_off_keep_what_was_there(lm: LanguageModel, whole: EvaluationReport) -> None:
    class Short(Sums):
        def __init__(self, count: int) -> None:
            self.count = count

        def examples(self) -> Iterator[Any]:
            yield from super().examples()[: self.count]
            raise OSError("the disk is gone")

    report = evaluate(lm, Short(6), options=OPTIONS, seed=SEED, batch=4)
    assert timeless(report) == timeless(whole)[:6]
    assert str(report.stopped).startswith("example 6: examples() of task 'sums' raised OSError: the disk is")
    with pytest.raises(InputError, match=r"example 0: examples\(\) of task 'sums' raised OSError"):
        evaluate(lm, Short(0), options=OPTIONS)


def test_a_task_without_examples_is_refused(lm: LanguageModel) -> None:
    empty = type("Empty", (Sums,), {"examples": lambda self: []})()
    with pytest.raises(InputError, match="task 'sums' has no examples; there is nothing to run"):
        evaluate(lm, empty)


# Figures of a run


def test_a_causal_run_has_no_steps(lm: LanguageModel) -> None:
    report = evaluate(lm, Sums(), options={"decode": "causal", "max_tokens": 3, "ignore_end": True}, limit=2)
    assert (report.steps_mean, report.steps_p90, report.tokens_per_forward) == (None, None, 1.0)


def test_rows_of_a_batch_share_its_time(lm: LanguageModel) -> None:
    begin = time.perf_counter()
    report = evaluate(lm, Sums(), options=OPTIONS, batch=5)
    elapsed = time.perf_counter() - begin
    seconds = [result.written.seconds for result in report.results if result.written]
    assert len(set(seconds[:5])) == len(set(seconds[5:])) == 1
    assert 0 < sum(seconds) <= elapsed


def test_an_evaluation_can_be_reported_on_at_any_time(lm: LanguageModel, whole: EvaluationReport) -> None:
    evaluation = Evaluation(lm, Sums(), EvaluationPlan(options=OPTIONS, seed=SEED, batch=4, limit=6))
    assert evaluation.total == 6
    running = evaluation.run()
    next(running)
    next(running)
    report = evaluation.report()
    assert timeless(report) == timeless(whole)[:2]
    assert report.stopped == "it was not run to its end"
    running.close()
