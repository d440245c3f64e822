"""Questions with given answers: what the model is shown, how its slots are read, and what is refused."""

from __future__ import annotations

import re
import time
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.errors import InputError
from dgemma.tasks.calibration import Calibration
from dgemma.tasks.context import Ids, TaskContext
from dgemma.tasks.decide import NO, YES, Choice, Decided, Decision, Question, decide
from dgemma.tasks.rounds import drive
from tasks.label_tree import NEWLINE, Lines
from tasks.scripted import BOS, TEMPLATE, TOKENIZER, Scripted, encode, task_context

CONTEXT = "The file holds the number of bytes."
LABELS = [
    "yes",
    "no",
    "maybe",
    "not sure",
    "not at all",
    "true",
    "functional",
    "function",
    "12",
    "123",
    "é 😀",
]


def big(**changes: Any) -> TaskContext:
    return task_context(**{"canvas_len": 64, "max_positions": 2048, **changes})


def question(*labels: str | bool, kind: Any = "choice", text: str = "Which one is it?") -> Question:
    return Question(kind=kind, instructions=text, choices=tuple(Choice(value=one) for one in labels))


def ask(model: Scripted, questions: list[Question], context: Any = CONTEXT, **options: Any) -> Decided:
    """One canvas of noise is one opinion, and enough: a rule has no other."""
    return drive(decide(model.task, context, questions, **{"draws": 1, **options}), model)


def expected(model: Lines, number: int, labels: list[str]) -> tuple[float, ...]:
    """By brute force over all that a line may read."""
    return model.shares((), [encode(f"{number}: {label}") for label in labels], NEWLINE)


# Against brute force


@settings(max_examples=40)
@given(
    questions=st.lists(
        st.lists(st.sampled_from(LABELS), min_size=2, max_size=5, unique=True), min_size=1, max_size=4
    ),
    seed=st.integers(0, 99),
)
def test_choices_are_as_likely_as_by_brute_force(questions: list[list[str]], seed: int) -> None:
    model = Lines(big(), seed=seed)
    found = ask(model, [question(*labels) for labels in questions])
    assert len(found.decisions) == len(questions)
    for number, (labels, decision) in enumerate(zip(questions, found.decisions, strict=True), start=1):
        assert decision.probabilities == pytest.approx(expected(model, number, labels), rel=1e-9)
        assert sum(decision.probabilities) == pytest.approx(1.0, abs=1e-9)
        assert decision.choice == labels[decision.probabilities.index(max(decision.probabilities))]


def test_the_order_of_choices_changes_no_request_and_no_bit() -> None:
    labels = ("not sure", "not at all", "yes")
    found = {}
    for order in permutations(labels):
        model = Lines(big())
        (decision,) = ask(model, [question(*order)]).decisions
        key = tuple(decision.probabilities[order.index(label)] for label in labels)
        found[key] = model.rounds
    assert len(found) == 1
    assert len(next(iter(found.values()))) > 1, "some labels share their first words"


def test_the_order_of_levels_is_the_callers() -> None:
    """Levels have an order that means something: it is shown as it is."""
    one, other = Lines(big()), Lines(big())
    ask(one, [question("low", "high", kind="score")])
    ask(other, [question("high", "low", kind="score")])
    assert "- low\n- high" in TOKENIZER.decode(one.written[0].prompt)
    assert "- high\n- low" in TOKENIZER.decode(other.written[0].prompt)


# More than a canvas


@pytest.mark.parametrize(("count", "canvases"), [(1, 1), (12, 1), (13, 2), (40, 4)])
def test_questions_that_do_not_fit_on_one_canvas_are_split_and_come_back_in_order(
    count: int, canvases: int
) -> None:
    """A line has five tokens at most, or six where its number has two digits; a canvas has 64."""
    model = Lines(big())
    questions = [
        Question(kind="predicate", instructions=f"Is it number {number}?", name=str(number))
        for number in range(1, count + 1)
    ]
    found = ask(model, questions, steps=4)
    assert [one.question.name for one in found.decisions] == [str(n) for n in range(1, count + 1)]
    for number, decision in enumerate(found.decisions, start=1):
        assert decision.probabilities == pytest.approx(expected(model, number, ["yes", "no"]), rel=1e-9)
    shown = [TOKENIZER.decode([*one.pinned.fixed.values()]) for one in model.written if one.pinned]
    # Each is asked on exactly one canvas, under its own number, and all are in every prompt.
    numbers = [int(number) for text in shown for number in re.findall(r"(\d+):", text)]
    assert numbers == list(range(1, count + 1))
    assert len(shown) == canvases
    assert len({one.prompt for one in model.written}) == 1
    assert found.prompt_tokens == len(model.written[0].prompt)
    assert found.forwards == 3 * len(model.written)


def test_as_many_questions_share_a_canvas_as_have_room() -> None:
    labels = ("one", "two")
    line = len(encode("1: one\n"))
    assert len(encode("1: two\n")) == line == 4
    for count, canvases in ((1, 1), (2, 1), (3, 2), (4, 2), (5, 3)):
        model = Lines(big(canvas_len=2 * line))
        ask(model, [question(*labels)] * count)
        assert len(model.written) == canvases


# Values


def test_a_predicate_tells_how_likely_it_is_so() -> None:
    class Says(Lines):
        def weight(self, line: Ids, word: int) -> float:
            return 3.0 if TOKENIZER.decode([word]).startswith(" y") else 1.0

    (found,) = ask(Says(big()), [Question(kind="predicate", instructions="Is it so?", name="so")]).decisions
    assert found.question.choices == (YES, NO)
    assert found.probability == pytest.approx(0.75)
    assert (found.choice, found.index, found.confidence) == ("yes", 0, found.probability)
    assert found.to_json() == {"type": "predicate", "name": "so", "probability": found.probability}


def test_a_choice_tells_its_value_and_all_probabilities() -> None:
    found = Decision(question=question(False, "maybe", True), probabilities=(0.2, 0.3, 0.5))
    assert found.choice is True
    assert (found.index, found.confidence) == (2, 0.5)
    assert found.to_json() == {
        "type": "choice",
        "name": None,
        "choice": True,
        "confidence": 0.5,
        "probabilities": [
            {"value": False, "probability": 0.2},
            {"value": "maybe", "probability": 0.3},
            {"value": True, "probability": 0.5},
        ],
    }


def test_a_score_is_the_mean_level() -> None:
    found = Decision(question=question("low", "middle", "high", kind="score"), probabilities=(0.2, 0.3, 0.5))
    assert found.score == pytest.approx(0.2 * 0 + 0.3 * 1 + 0.5 * 2)
    shown = found.to_json()
    assert shown["score"] == found.score
    assert shown["type"] == "score"
    assert "choice" not in shown
    assert shown["probabilities"] == [
        {"label": "low", "value": 0, "probability": 0.2},
        {"label": "middle", "value": 1, "probability": 0.3},
        {"label": "high", "value": 2, "probability": 0.5},
    ]


def test_of_equal_choices_the_first_is_chosen() -> None:
    assert Decision(question=question("a", "b"), probabilities=(0.5, 0.5)).choice == "a"


def test_truths_are_written_in_small_letters_and_given_back_as_truths() -> None:
    model = Lines(big())
    (found,) = ask(model, [question(True, False)]).decisions
    assert isinstance(found.choice, bool)
    assert found.probabilities == pytest.approx(expected(model, 1, ["true", "false"]), rel=1e-9)


def test_a_calibration_is_applied_to_each_question() -> None:
    warm = Calibration(temperature=2.0)
    questions = [question("yes", "no"), question("a", "b", "c")]
    plain = ask(Lines(big()), questions).decisions
    soft = ask(Lines(big()), questions, calibration=warm).decisions
    for one, other in zip(plain, soft, strict=True):
        assert other.probabilities == warm.apply(one.probabilities)
        assert other.probabilities != one.probabilities


def test_what_is_told_of_a_decision_is_what_it_took() -> None:
    model = Lines(big(seed=9))
    found = ask(model, [question("yes", "no")], steps=7)
    assert found.seed == 9
    assert {one.params.max_denoising_steps for one in model.written} == {7}
    assert {one.params.temperature for one in model.written} == {0.0}


# What the model is shown

ASKED = "1. Which one is it?\n- no: not so\n- yes"
DESCRIBED = Question(
    kind="choice", instructions="Which one is it?", choices=(YES, Choice(value="no", description="not so"))
)
MESSAGES = [
    {"role": "user", "content": "How long is it?"},
    {"role": "assistant", "content": "Ten bytes."},
    {"role": "user", "content": "Why?"},
]


def shown_for(task: TaskContext, context: Any) -> str:
    model = Lines(task)
    ask(model, [DESCRIBED], context)
    (prompt,) = {one.prompt for one in model.written}
    return TOKENIZER.decode(prompt, controls=True)


def test_without_a_template_a_text_is_followed_by_the_questions() -> None:
    shown = shown_for(big(), CONTEXT)
    assert shown.startswith(f"<bos>{CONTEXT}\n\n")
    assert shown.endswith(f"\n{ASKED}\n")


def test_without_a_template_a_conversation_is_a_transcript() -> None:
    shown = shown_for(big(), MESSAGES)
    assert shown.startswith("<bos>user: How long is it?\nassistant: Ten bytes.\nuser: Why?\n\n")
    assert shown.endswith(f"\n{ASKED}\n")


def test_with_a_template_a_text_and_the_questions_are_one_turn() -> None:
    shown = shown_for(big(template=TEMPLATE), CONTEXT)
    assert shown.startswith(f"<bos><|turn>user\n{CONTEXT}\n\n")
    assert shown.endswith(f"\n{ASKED}<turn|>\n<|turn>model\n")


@pytest.mark.parametrize("last", ["user", "assistant"])
def test_with_a_template_the_questions_are_part_of_the_last_turn_or_one_of_their_own(last: str) -> None:
    messages = MESSAGES if last == "user" else MESSAGES[:2]
    shown = shown_for(big(template=TEMPLATE), messages)
    assert shown.startswith("<bos><|turn>user\nHow long is it?<turn|>\n<|turn>model\nTen bytes.<turn|>\n")
    assert shown.endswith(f"\n{ASKED}<turn|>\n<|turn>model\n")
    assert shown.count("<|turn>user") == 2
    assert ("Why?\n\nAnswer each question" in shown) == (last == "user")
    assert len(MESSAGES) == 3, "what the caller gave stays as it is"


def test_questions_alone_may_be_asked_of_no_conversation_at_all() -> None:
    assert "<|turn>user\nAnswer each question" in shown_for(big(template=TEMPLATE), [])


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["plain", "template"])
def test_an_input_as_long_as_the_context_allows_is_taken_and_a_longer_one_refused(template: Any) -> None:
    def needed(words: int) -> int:
        model = Lines(big(max_positions=1 << 20, template=template))
        return ask(model, [question("yes", "no")], "of" + " of" * words).prompt_tokens

    size = needed(100) + 64
    ask(Lines(big(max_positions=size, template=template)), [question("yes", "no")], "of" + " of" * 100)
    with pytest.raises(
        InputError, match=rf"have {size - 63} tokens; this model's context of {size} .* Shorten"
    ):
        ask(Lines(big(max_positions=size, template=template)), [question("yes", "no")], "of" + " of" * 101)


# What is refused


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ((True, "true"), "two choices read 'true'; the model could not tell them apart"),
        (("no", "yes", "no"), "two choices read 'no'"),
        ((False, "false"), "two choices read 'false'"),
        (("yes",), "a question has 1 choices; give 2 to 255"),
        ((), "a question has 0 choices"),
        (tuple(map(str, range(256))), "a question has 256 choices"),
        (("yes", ""), "one of the choices is empty; each needs a text"),
        (("yes", " \n"), "one of the choices is empty"),
    ],
)
def test_choices_that_cannot_be_told_apart_are_refused(labels: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        question(*labels)
    with pytest.raises(InputError, match=re.escape(message.replace("choices", "levels"))):
        question(*labels, kind="score")


def test_a_kind_that_is_not_known_is_refused() -> None:
    with pytest.raises(InputError, match="a question is of kind 'guess'; kinds: predicate, choice, score"):
        question("a", "b", kind="guess")


def test_a_choice_of_several_lines_is_refused_or_read() -> None:
    try:
        (found,) = ask(Lines(big()), [question("a", "a\nb")]).decisions
    except InputError:
        return
    assert sum(found.probabilities) == pytest.approx(1.0)


@pytest.mark.parametrize("count", [0, 401])
def test_no_questions_and_too_many_are_refused(count: int) -> None:
    with pytest.raises(InputError, match=f"there are {count} questions; ask 1 to 400"):
        ask(Lines(big()), [question("yes", "no")] * count)


def test_a_choice_longer_than_a_canvas_is_refused_by_the_number_of_its_question() -> None:
    questions = [question("yes", "no"), question("yes", " of" * 70)]
    with pytest.raises(
        InputError, match="a choice of question 2 has too many tokens for a canvas of 64; shorten"
    ):
        ask(Lines(big()), questions)


def test_long_choices_that_begin_alike_are_refused_without_delay() -> None:
    alike = "a " * 20_000
    began = time.process_time()
    with pytest.raises(InputError, match="too many tokens for a canvas"):
        ask(Lines(big(max_positions=50_000)), [question(f"{alike}x", f"{alike}y")])
    assert time.process_time() - began < 2


def test_choices_that_the_tokenizer_reads_alike_are_refused() -> None:
    with pytest.raises(InputError, match="no two of them alike"):
        ask(Lines(big()), [question("a b", "a\u2581b")])


@pytest.mark.parametrize("name", ["steps", "draws"])
@pytest.mark.parametrize("value", [0, -1, 65, True, 1.0, "1", None], ids=repr)
def test_steps_and_draws_that_mean_nothing_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name} is {value!r}; it must be a whole number from 1 to 64"):
        ask(Lines(big()), [question("yes", "no")], **{name: value})


def test_several_canvases_of_noise_are_read_for_each_question() -> None:
    """By the checkpoint's choice, or as many as are asked for; each is a seed of its own."""
    for options, seeds in (({}, [9, 10, 11, 12]), ({"draws": 2}, [9, 10])):
        model = Lines(big(seed=9))
        found = drive(decide(model.task, CONTEXT, [question("one", "two")], **options), model)
        assert [one.seed for one in model.written] == seeds
        assert len({(one.prompt, str(one.pinned)) for one in model.written}) == 1
        assert found.seed == 9
        assert found.forwards == len(seeds), "a step each"


def test_a_canvas_begins_where_the_prompt_ends() -> None:
    model = Lines(big())
    ask(model, [question("one", "two")])
    (request,) = model.written
    assert request.prompt[0] == BOS
    assert request.pinned is not None
    opening = [request.pinned.fixed[at] for at in range(min(request.pinned.among))]
    assert TOKENIZER.decode(opening) == "1:"
    assert {TOKENIZER.decode([word]) for word in request.pinned.among[len(opening)]} == {" one", " two"}


@pytest.mark.parametrize("value", [1, 0, 2.5, ("a",)])
def test_a_choice_that_is_no_text_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InputError, match="must be a text, true or false"):
        Question(kind="choice", instructions="?", choices=(Choice(value=value), Choice(value="b")))
