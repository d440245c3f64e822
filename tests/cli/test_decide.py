"""`dgemma decide` as a user types it: questions typed or from files, tables, honest calibrations."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dgemma
from cli.canvas_model import CanvasModel, documented, load_once, run
from dgemma.cli.views import progress
from dgemma.tasks.calibration import Calibration
from dgemma.tasks.decide import Choice, Question

Capture = pytest.CaptureFixture[str]
SPAM = ("--ask", "Is it spam?")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CanvasModel:
    fake = CanvasModel()
    monkeypatch.setitem(dgemma.__dict__, "load", fake.load)  # imports no torch
    monkeypatch.setattr("dgemma.cli.options.check_checkpoint", lambda model: None)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 1e9)  # no line more on a slow machine
    monkeypatch.chdir(tmp_path)
    return fake


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    return lambda data: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


# Questions


def test_typed_questions_have_the_answers_that_follow_them(model: CanvasModel, capsys: Capture) -> None:
    argv = ("--ask", "A?", "--ask", "B?", "--choices", "x, y,z", "--ask", "C?", "--levels", "low,high")
    assert run(capsys, "decide", "text", *argv)[0] == 0
    assert model.calls[0]["questions"] == [
        Question(kind="predicate", instructions="A?"),
        Question(kind="choice", instructions="B?", choices=tuple(Choice(value=v) for v in "xyz")),
        Question(kind="score", instructions="C?", choices=(Choice(value="low"), Choice(value="high"))),
    ]


def test_a_file_of_questions_is_as_the_decisions_api_has_it_and_comes_before_typed_ones(
    model: CanvasModel, capsys: Capture
) -> None:
    raw = [
        {"type": "predicate", "name": "spam", "instructions": "Is it spam?"},
        {
            "type": "choice",
            "instructions": "Who?",
            "choices": [{"value": True}, {"value": "b", "description": "the other"}, "c"],
        },
        {"type": "score", "instructions": "How much?", "levels": [{"label": "0"}, {"label": "1"}]},
    ]
    expected = [
        Question(kind="predicate", name="spam", instructions="Is it spam?"),
        Question(
            kind="choice",
            instructions="Who?",
            choices=(Choice(value=True), Choice(value="b", description="the other"), Choice(value="c")),
        ),
        Question(kind="score", instructions="How much?", choices=(Choice(value="0"), Choice(value="1"))),
        Question(kind="predicate", instructions="And?"),
    ]
    for whole in (raw, {"model": "gpt-6-luna", "questions": raw}):
        Path("q.json").write_text(json.dumps(whole))
        assert run(capsys, "decide", "text", "--questions", "q.json", "--ask", "And?")[0] == 0
        assert model.calls[-1]["questions"] == expected


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("{", "q.json is not JSON: "),
        ("[" * 100_000, "q.json is not JSON: "),
        ("[]", "q.json holds no list of questions."),
        ('{"questions": 3}', "q.json holds no list of questions."),
        ("[3]", "q.json, question 1 is not an object"),
        ('[{"type": "predicat", "instructions": "x"}]', "did you mean 'predicate'?"),
        ('[{"type": [], "instructions": "x"}]', "q.json, question 1: type is []"),
        ('[{"type": "predicate"}]', "question 1: instructions is None; it must be a text."),
        ('[{"type": "predicate", "instructions": "\\ud800"}]', "not UTF-8"),
        ('[{"type": "predicate", "instructions": "x", "choices": []}]', "unknown field 'choices'"),
        ('[{"type": "choice", "instructions": "x", "choice": []}]', "did you mean 'choices'?"),
        ('[{"type": "choice", "instructions": "x"}]', "choices is missing"),
        ('[{"type": "choice", "instructions": "x", "choices": ["a"]}]', "has 1 choices; give 2 to 255."),
        ('[{"type": "choice", "instructions": "x", "choices": ["a", "a"]}]', "two choices read 'a'"),
        ('[{"type": "choice", "instructions": "x", "choices": ["a", 3]}]', "one of its choices has no value"),
        ('[{"type": "choice", "instructions": "x", "choices": [{"value": 3}]}]', "value is 3; it must be"),
        (
            '[{"type": "score", "instructions": "x", "levels": [{"label": true}]}]',
            "label is True; it must be",
        ),
        (
            '[{"type": "predicate", "instructions": "x", "name": "n"}, '
            '{"type": "predicate", "instructions": "y", "name": "n"}]',
            "two questions are called 'n'",
        ),
        (json.dumps([{"type": "predicate", "instructions": "x"}] * 401), "there are 401 questions"),
    ],
)
def test_questions_that_make_no_sense_are_one_line_before_anything_is_loaded(
    raw: str, said: str, model: CanvasModel, capsys: Capture
) -> None:
    Path("q.json").write_text(raw)
    status, out, err = run(capsys, "decide", "text", "--questions", "q.json")
    assert (status, out, model.loads) == (2, "", [])
    assert err.startswith("dgemma decide: ")
    assert said in err
    assert err.count("\n") == 1


# The input


def test_the_input_is_a_text_a_file_or_stdin(
    model: CanvasModel, stdin: Callable[[bytes], None], capsys: Capture
) -> None:
    Path("mail.txt").write_bytes("\ufeffDear Sir,\r\nbye\r\n".encode())
    stdin("aus der Röhre\n".encode())
    for word in ("just a text", "@mail.txt", "-"):
        assert run(capsys, "decide", word, *SPAM)[0] == 0
    assert [call["input"] for call in model.calls] == ["just a text", "Dear Sir,\nbye", "aus der Röhre"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["  ", *SPAM], "the input is '  '; it must hold some text."),
        (["@empty", *SPAM], "the input is ''; it must hold some text."),
        (["@none", *SPAM], "none cannot be read: No such file or directory."),
        (["@bad", *SPAM], "bad is not UTF-8: byte 0 is 0xff"),
        (["bad", *SPAM], "INPUT 'bad' is a file; @bad reads it."),
        (["@.", *SPAM], ". is a directory; give a file of text."),
        (["text"], "no question; give --ask"),
        (["text", "--ask", " "], "--ask 1: instructions is ' '"),
        (["text", *SPAM, "--choices", "a"], "--ask 1: a question has 1 choices"),
        (["text", *SPAM, "--choices", "a,,b"], "value is ''; it must be a text."),
        (["text", *SPAM, "--steps", "0"], "--steps is 0; it must be from 1 to 1024."),
        (["text", *SPAM, "--seed", str(1 << 70)], "seed is"),
        (["text", *SPAM, "--calibration", "none"], "none cannot be read as a calibration"),
        (["text", *SPAM, "--calibration", "empty"], "empty cannot be read as a calibration"),
    ],
)
def test_what_cannot_be_decided_is_one_line_before_anything_is_loaded(
    argv: list[str], said: str, model: CanvasModel, capsys: Capture
) -> None:
    Path("empty").write_text("\n")
    Path("bad").write_bytes(b"\xff")
    status, out, err = run(capsys, "decide", *argv)
    assert (status, out, model.loads) == (2, "", [])
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([*SPAM], "no INPUT; give INPUT, or MODEL and INPUT"),
        (["bundled:text", *SPAM], "no INPUT"),
        (["text", "--choices", "a,b"], "--choices belongs to the --ask before it, and there is none"),
        (["text", *SPAM, "--levels", "a,b", "--choices", "a,b"], "has its answers already"),
        (["text", *SPAM, "--fit", "out"], "--fit and --examples go together"),
        (["m", "text", *SPAM, "--fit", "out", "--examples", "e"], "with --fit there is no INPUT"),
        ([*SPAM, "--fit", "out", "--examples", "e", "--calibration", "c"], "Give one of them"),
    ],
)
def test_wrong_words_have_status_two(argv: list[str], said: str, model: CanvasModel, capsys: Capture) -> None:
    status, out, err = run(capsys, "decide", *argv)
    assert (status, out, model.loads) == (2, "", [])
    assert said in err


def test_options_reach_the_model_and_without_a_seed_the_answer_is_still_the_same(
    model: CanvasModel, capsys: Capture
) -> None:
    assert run(capsys, "decide", "text", *SPAM)[0] == 0
    question = Question(kind="predicate", instructions="Is it spam?")
    given: dict[str, Any] = {"input": "text", "questions": [question], "calibration": None}
    assert model.calls[0] == {**given, "steps": 1, "draws": 4, "seed": 0}
    assert model.loads[0]["model"] == "bundled:text"
    assert (
        run(capsys, "decide", "m", *SPAM, "--steps", "7", "--draws", "2", "text", "--seed", "3", "--exact")[0]
        == 0
    )
    assert model.calls[1] == {**given, "steps": 7, "draws": 2, "seed": 3}
    assert (model.loads[1]["model"], model.loads[1]["exact"]) == ("m", True)


# What comes out


def asked(model: CanvasModel, capsys: Capture, *argv: str) -> str:
    model.think = lambda text, question: {2: (0.25, 0.75), 3: (0.5, 0.3, 0.2)}[len(question.choices)]
    spam = ("--ask", "Is it\nspam?")
    status, out, err = run(
        capsys, "decide", "text", *spam, "--ask", "How?", "--levels", "low,mid,high", *argv
    )
    assert (status, err) == (0, "")
    return str(out)


def test_in_a_pipe_each_line_tells_question_answer_and_probability(
    model: CanvasModel, capsys: Capture
) -> None:
    rows = [line.split() for line in asked(model, capsys).splitlines()]
    assert rows == [
        ["question", "answer", "probability"],
        ["Is", "it", "spam?", "yes", "0.250"],
        ["Is", "it", "spam?", "no", "*", "0.750"],
        ["How?", "low", "*", "0.500"],
        ["How?", "mid", "0.300"],
        ["How?", "high", "0.200"],
        ["How?", "score,", "0", "to", "2", "0.700"],
    ]


def test_on_a_terminal_probabilities_are_bars_and_a_question_stands_once(
    model: CanvasModel, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")  # narrow: then questions are wrapped, and bars stay whole
    out = asked(model, capsys)
    assert out.count("spam?") == out.count("How?") == 1
    bars = [(line.count("█"), line.count("░")) for line in out.splitlines() if "░" in line or "█" in line]
    assert bars == [(5, 15), (15, 5), (10, 10), (6, 14), (4, 16)]


def test_json_has_one_answer_per_question_in_their_order(model: CanvasModel, capsys: Capture) -> None:
    out = asked(model, capsys, "--json")
    assert out.count("\n") == 1
    found = json.loads(out)
    assert list(found) == ["answers", "calibration", "seconds", "seed"]
    spam, how = found["answers"]
    assert spam == {"type": "predicate", "name": None, "probability": 0.25}
    assert (how["type"], how["score"], how["confidence"]) == ("score", pytest.approx(0.7), 0.5)
    assert [one["probability"] for one in how["probabilities"]] == [0.5, 0.3, 0.2]
    assert (found["calibration"], found["seed"]) == (None, 0)


def test_a_calibration_changes_how_sure_the_answer_is(model: CanvasModel, capsys: Capture) -> None:
    Calibration(temperature=2.0).save("c")
    found = json.loads(asked(model, capsys, "--json", "--calibration", "c"))
    assert found["calibration"] == 2.0
    assert found["answers"][0]["probability"] == pytest.approx(1 / (1 + 3**0.5))


# Calibrations


def too_sure(text: str, question: Question) -> tuple[float, ...]:
    """Says 0.99 and is right three times of four."""
    sides = (0.99, *(0.01 / (len(question.choices) - 1),) * (len(question.choices) - 1))
    return sides if "!" in text else sides[::-1]


def examples(count: int, **more: Any) -> list[dict[str, Any]]:
    """In each half every fourth one has the other label."""
    found = []
    for number in range(count):
        spam, odd_one = number // 2 % 2 == 0, number // 2 % 4 == 3
        text = f"text {number}{'!' * spam}"
        found.append({"input": text, "label": "yes" if spam != odd_one else "no", **more})
    return found


def write_examples(lines: list[Any]) -> None:
    Path("e.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")


FIT = (*SPAM, "--fit", "out.json", "--examples", "e.jsonl")


def test_a_calibration_is_fitted_on_every_second_example_and_judged_on_the_others(
    model: CanvasModel, capsys: Capture
) -> None:
    model.think = too_sure
    lines = examples(32)
    for line in lines[1::2]:  # those held out are all wrong: what is told of them cannot come from the others
        line["label"] = "no" if "!" in line["input"] else "yes"
    write_examples(lines)
    status, out, err = run(capsys, "decide", *FIT, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert documented(found)
    assert list(found) == ["file", "temperature", "fitted", "held_out"]
    # At which 0.99 becomes 0.75.
    assert found["temperature"] == pytest.approx(math.log(99) / math.log(3), rel=1e-3)
    assert found["fitted"] == {
        "examples": 16,
        "accuracy": 0.75,
        "error_before": pytest.approx(0.24),
        "error_after": pytest.approx(0.0, abs=1e-3),
    }
    assert found["held_out"] == {
        "examples": 16,
        "accuracy": 0.0,
        "error_before": pytest.approx(0.99),
        "error_after": pytest.approx(0.75, abs=1e-3),
    }
    assert Calibration.load("out.json").temperature == found["temperature"]
    out = run(capsys, "decide", "a!", *SPAM, "--calibration", "out.json", "--json")[1]
    assert json.loads(out)["answers"][0]["probability"] == pytest.approx(0.75, abs=1e-3)


def test_a_person_gets_a_table_of_both_halves(model: CanvasModel, capsys: Capture) -> None:
    model.think = too_sure
    write_examples(examples(32))
    status, out, err = run(capsys, "decide", "m", *FIT)
    assert (status, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["examples", "n", "accuracy", "error", "before", "error", "after"],
        ["fitted", "16", "0.750", "0.240", "0.000"],
        ["held", "out", "16", "0.750", "0.240", "0.000"],
        [],
        ["temperature", "4.183"],
        ["written", "out.json"],
    ]
    assert model.loads[0]["model"] == "m"


def test_an_example_names_its_question_and_its_label_in_any_spelling(
    model: CanvasModel, capsys: Capture
) -> None:
    raw = [
        {"type": "predicate", "instructions": "?"},
        {"type": "choice", "instructions": "?", "name": "who", "choices": [{"value": True}, {"value": "b"}]},
        {"type": "score", "instructions": "?", "levels": [{"label": "1"}, {"label": "2"}, {"label": "3"}]},
    ]
    Path("q.json").write_text(json.dumps(raw))
    wanted = [
        (0, True, 0),
        (0, "no", 1),
        ("who", True, 0),
        ("who", "b", 1),
        (1, "true", 0),
        (2, 3, 2),
        (2, "1", 0),
    ]
    for which, label, right in wanted:
        number = 1 if which == "who" else which

        def think(
            text: str, question: Question, asked: Any = raw[number], right: int = right
        ) -> tuple[float, ...]:
            """Sure of the right choice of the right question, and of the first of the others."""
            sure = right if question.kind == asked["type"] else 0
            rest = 0.1 / (len(question.choices) - 1)
            return tuple(0.9 if place == sure else rest for place in range(len(question.choices)))

        model.think = think
        write_examples([{"input": f"{n}", "question": which, "label": label} for n in range(4)])
        argv = ("--questions", "q.json", "--fit", "o", "--examples", "e.jsonl", "--json")
        found = json.loads(run(capsys, "decide", *argv)[1])
        assert found["held_out"]["accuracy"] == 1.0, (which, label)


def test_the_same_input_is_read_once_with_all_questions(model: CanvasModel, capsys: Capture) -> None:
    lines = [{"input": f"text {n // 2}", "question": n % 2, "label": "yes"} for n in range(8)]
    write_examples(lines)
    assert run(capsys, "decide", *FIT, "--ask", "Is it ham?")[0] == 0
    assert [call["input"] for call in model.calls] == [f"text {n}" for n in range(4)]
    assert all(len(call["questions"]) == 2 for call in model.calls)


@pytest.mark.parametrize(
    ("lines", "out", "said"),
    [
        (["x"], "o", "e.jsonl, line 1 is not an object"),
        ([{"label": "yes"}], "o", "line 1: input is None; it must be a text."),
        ([{"input": "\ud800", "label": "yes"}], "o", "not UTF-8"),
        ([{"input": "a"}], "o", "line 1: label is missing"),
        (
            [*examples(4), {"input": "a", "label": "maybe"}],
            "o",
            "line 5: label is 'maybe'; it must be one of yes, no.",
        ),
        ([{"input": "a", "label": "yes", "question": 1}], "o", "question is 1; it must be 0 to 0."),
        ([{"input": "a", "label": "yes", "question": True}], "o", "question is True"),
        (examples(3), "o", "e.jsonl has 3 examples; 4 are the fewest"),
        (examples(4), "e.jsonl", "e.jsonl exists and is not a calibration; choose another name."),
        (examples(4), ".", ". cannot be written: Is a directory."),
        (examples(4), "none/o", "--fit none/o: there is no directory none."),
    ],
)
def test_examples_or_a_file_that_will_not_do_are_one_line_before_anything_is_loaded(
    lines: list[Any], out: str, said: str, model: CanvasModel, capsys: Capture
) -> None:
    write_examples(lines)
    before = Path("e.jsonl").read_text()
    status, printed, err = run(capsys, "decide", *SPAM, "--fit", out, "--examples", "e.jsonl")
    assert (status, printed, model.loads) == (2, "", [])
    assert said in err
    assert err.count("\n") == 1
    assert Path("e.jsonl").read_text() == before


def test_an_earlier_calibration_may_be_fitted_anew(model: CanvasModel, capsys: Capture) -> None:
    model.think = too_sure
    write_examples(examples(8))
    Calibration(temperature=9.0).save("out.json")
    assert run(capsys, "decide", *FIT)[0] == 0
    assert Calibration.load("out.json").temperature < 9.0


def test_progress_counts_examples(
    model: CanvasModel, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    write_examples(examples(4))
    err = run(capsys, "decide", *FIT)[2]
    assert err.splitlines() == [f"decide: {number} of 4 examples" for number in (1, 2, 3, 4)]


def test_an_interrupted_fit_leaves_no_file(model: CanvasModel, capsys: Capture) -> None:
    def interrupt() -> None:
        if len(model.calls) == 2:
            raise KeyboardInterrupt

    model.before_each = interrupt
    write_examples(examples(4))
    assert run(capsys, "decide", *FIT) == (130, "", "dgemma decide: interrupted\n")
    assert not Path("out.json").exists()


# The real model


def test_the_bundled_model_decides_as_its_python_api_does(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dgemma, "load", load_once)
    monkeypatch.chdir(tmp_path)
    argv = ("Free money", *SPAM, "--ask", "Which?", "--choices", "mail,code", "--json", "--steps", "1")
    status, out, err = run(capsys, "decide", *argv)
    assert (status, err) == (0, "")
    spam, which = json.loads(out)["answers"]
    lm: Any = load_once("bundled:text", dtype="auto")
    questions = [
        Question(kind="predicate", instructions="Is it spam?"),
        Question(kind="choice", instructions="Which?", choices=(Choice(value="mail"), Choice(value="code"))),
    ]
    expected = lm.decide("Free money", questions, steps=1, seed=0)
    assert spam["probability"] == pytest.approx(expected[0].probability, abs=1e-3)
    assert which["probabilities"][1]["probability"] == pytest.approx(expected[1].probabilities[1], abs=1e-3)
    assert 0 < spam["probability"] < 1
