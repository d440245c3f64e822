"""Tasks: what an object must have to be one, and whose mistake an error is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dgemma import Answer, FinishReason, InputError
from dgemma.evaluation.task import CheckedTask
from dgemma.evaluation.tasks.reasoning import ReasoningTask
from dgemma.evaluation.tasks.registry import NAMED, open_task


class Good:
    name = "good"

    def examples(self) -> list[int]:
        return [1, 2]

    def prompt(self, example: int) -> str:
        return f"{example}?"

    def score(self, example: int, answer: Answer) -> dict[str, float]:
        return {"right": float(answer.text == str(example))}


def answer(text: str) -> Answer:
    return Answer(text=text, tokens=(1,), finish_reason=FinishReason.STOP, seed=0, decode="diffuse")


def with_method(name: str, value: object) -> Good:
    task = Good()
    setattr(task, name, lambda *_: value)
    return task


def test_any_object_with_the_names_is_a_task() -> None:
    task = CheckedTask(Good())
    examples, total = task.examples()
    assert (list(examples), total) == ([1, 2], 2)
    assert task.prompt(1) == "1?"
    assert task.score(1, answer("1")) == {"right": 1.0}
    assert (task.options(), task.groups(1), task.raw) == ({}, (), False)


def test_what_is_optional_is_used() -> None:
    task = with_method("options", {"max_tokens": 5})
    task.groups = lambda example: ["odd" if example % 2 else "even", "all"]  # type: ignore[attr-defined]
    task.raw = True  # type: ignore[attr-defined]
    task.examples = lambda: iter([1])  # type: ignore[assignment, method-assign, return-value]
    checked = CheckedTask(task)
    assert checked.options() == {"max_tokens": 5}
    assert checked.groups(1) == ("odd", "all")
    assert checked.raw
    assert checked.examples()[1] is None  # an iterator does not tell its length


def test_scores_may_be_of_any_kind_of_number() -> None:
    import numpy

    task = CheckedTask(with_method("score", {"a": True, "b": 3, "c": numpy.float32(0.5)}))
    assert task.score(1, answer("")) == {"a": 1.0, "b": 3.0, "c": 0.5}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (object(), "the task is a object without examples, prompt, score; a task has name, examples"),
        (type("T", (Good,), {"score": None})(), "the task is a T without score"),
        (type("T", (Good,), {"name": " "})(), "the task's name is ' '; it must be a string"),
        (type("T", (Good,), {"name": 7})(), "the task's name is 7"),
    ],
)
def test_what_is_no_task_is_refused(task: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        CheckedTask(task)


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("options", [1], r"options\(\) of task 'good' gave \[1\]; it must give a mapping"),
        ("options", {"seed": 1}, r"options\(\) of task 'good' gives a seed"),
        ("examples", 5, r"examples\(\) of task 'good' gave 5; it must give a list or an iterator"),
        ("groups", "easy", r"groups\(\) of task 'good' gave 'easy'; it must give a list of strings"),
        ("groups", [3], r"gave \[3\]"),
        ("groups", 3, "gave 3"),
        ("score", 1.0, r"score\(\) of task 'good' gave 1.0; it must give a mapping"),
        ("score", {}, r"gave \{\}; it must give a mapping from names to numbers, with at least one"),
        ("score", {"a": float("nan")}, "gave 'a' = nan; names are strings, scores are finite numbers"),
        ("score", {"a": "1"}, "gave 'a' = '1'"),
        ("score", {1: 1}, "gave 1 = 1"),
    ],
)
def test_what_a_task_gives_is_checked(method: str, value: object, message: str) -> None:
    task = CheckedTask(with_method(method, value))
    arguments: dict[str, tuple[Any, ...]] = {"groups": (1,), "score": (1, answer("x"))}
    with pytest.raises(InputError, match=message):
        getattr(task, method)(*arguments.get(method, ()))


def test_an_error_of_the_task_names_call_and_line() -> None:
    class Broken(Good):
        def score(self, example: int, answer: Answer) -> dict[str, float]:
            return {"right": float(1 / int(answer.text))}

    task = CheckedTask(Broken())
    with pytest.raises(
        InputError,
        match=r"^score\(\) of task 'good' raised ZeroDivisionError: .* by zero \(test_task.py, line \d+\)\.$",
    ):
        task.score(1, answer("0"))

    class Refuses(Good):
        def prompt(self, example: int) -> str:
            raise InputError("no such puzzle.")

        def examples(self) -> Iterator[int]:  # type: ignore[override]
            yield 1
            raise OSError("the disk\nis gone")

    task = CheckedTask(Refuses())
    with pytest.raises(InputError, match=r"^prompt\(\) of task 'good': no such puzzle\.$"):
        task.prompt(1)
    examples, _ = task.examples()
    assert next(examples) == 1
    with pytest.raises(InputError, match=r"examples\(\) of task 'good' raised OSError: the disk is gone"):
        next(examples)


# Names on the command line

OWN = """
from dataclasses import dataclass

@dataclass
class Example:
    number: int

class Counting:
    name = "counting"
    def examples(self): return [Example(1), Example(2)]
    def prompt(self, example): return f"{example.number}?"
    def score(self, example, answer): return {"right": 1}

class Needy:
    def __init__(self, what): pass

class Nothing:
    pass

ready = Counting()
"""


def test_a_task_comes_from_a_file_of_python(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    assert open_task(f"{file}:Counting").name == "counting"
    task = open_task(f"{file}:ready")
    assert [task.prompt(example) for example in task.examples()] == ["1?", "2?"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "{}:Countin",
            "has no 'Countin'; did you mean 'Counting'\\? Its classes: .*Counting, Needy, Nothing",
        ),
        ("{}:Needy", r"Needy\(\) raised TypeError: .*missing 1 required positional argument: 'what'"),
        ("{}:Nothing", "the task is a Nothing without examples, prompt, score"),
        ("{}", "name a class in the file, as in task.py:TaskClass"),
        ("nowhere.py:Task", "nowhere.py does not exist; give the file of a task"),
        (
            "resoning-gym:chain_sum",
            "task 'resoning-gym:chain_sum' is not known; did you mean 'reasoning-gym'",
        ),
        ("sodoku-of-mine", "task 'sodoku-of-mine' is not known. Known: .*reasoning-gym.*FILE.py:CLASS"),
        ("nowhere.jsonl", "nowhere.jsonl cannot be read: No such file or directory"),
    ],
)
def test_a_task_that_is_not_there_is_refused(spec: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    with pytest.raises(InputError, match=message):
        open_task(spec.format(file))


def test_a_file_that_does_not_load_is_named(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("import surely_not_installed")
    with pytest.raises(InputError, match=r"own.py cannot be loaded: ModuleNotFoundError: .*surely_not"):
        open_task(f"{file}:Task")
    assert "dgemma_task_own" not in sys.modules


def test_a_name_with_details_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setitem(NAMED, "puzzle", lambda detail: (asked.append(detail), Good())[1])
    assert open_task("puzzle:hard:9").name == "good"
    assert open_task("puzzle").name == "good"
    assert asked == ["hard:9", ""]


# reasoning-gym


def test_reasoning_gym_asks_the_same_and_judges_its_own_answers() -> None:
    pytest.importorskip("reasoning_gym")
    task = open_task("reasoning-gym:chain_sum")
    assert task.name == "reasoning-gym:chain_sum"
    examples, total = CheckedTask(task).examples()
    first, second = next(examples), next(examples)
    assert total == 500
    assert first["question"] in task.prompt(first)
    assert task.prompt(first) != task.prompt(second)
    assert next(iter(open_task("reasoning-gym:chain_sum").examples())) == first
    for text in (first["answer"], f"So <answer>1</answer>, no: <answer> {first['answer']} </answer>."):
        assert task.score(first, answer(text)) == {"solved": 1.0, "score": 1.0}
    assert task.score(first, answer("I do not know"))["solved"] == 0.0
    short = ReasoningTask("chain_sum", size=3, max_terms=2)
    assert len(list(short.examples())) == 3


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("chain_some", {}, "has no dataset 'chain_some'; did you mean 'chain_sum'"),
        ("", {}, "has no dataset ''"),
        ("chain_sum", {"max_terms": 0}, "reasoning-gym refuses these settings of chain_sum: max_terms"),
        ("chain_sum", {"terms": 0}, "unexpected keyword argument 'terms'"),
    ],
)
def test_reasoning_gym_refuses_what_it_does_not_have(
    name: str, settings: dict[str, int], message: str
) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(InputError, match=message):
        ReasoningTask(name, **settings)


def test_reasoning_gym_says_how_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(InputError, match=r"cannot be imported.*`pip install reasoning-gym` installs it"):
        open_task("reasoning-gym:chain_sum")
