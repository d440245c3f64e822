"""Questions with given answers get probabilities, in OpenAI's shape and in Mercury's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inceptionai import Inception
from openai import OpenAI

from dgemma.errors import InputError
from dgemma.tasks.calibration import Calibration
from dgemma.tasks.decide import Choice, Question
from server.canvas_bodies import DECIDE, DECIDE_BY_NAME, DECISIONS, HOW, INPUT, SYSTEM_ONE, UNHAPPY, WHAT
from server.canvas_served import KEY, served_tiny, tiny
from server.fake_engine import FakeEngine, Script
from server.raw_client import RawClient
from server.served import app_of, error_of, post, run, run_unhurried
from text.bundled import TOKENIZER


def whole_of(body: dict[str, Any], engine: FakeEngine | None = None, path: str = DECISIONS) -> dict[str, Any]:
    response = post(app_of(engine), path, body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def prompt_of(body: dict[str, Any]) -> str:
    engine = FakeEngine()
    whole_of(body, engine)
    return TOKENIZER.decode(engine.requests[0].prompt)


# With a real engine, by the clients people have


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served_tiny() as address:
        yield address


def test_openais_client_gets_what_the_python_api_decides(address: str) -> None:
    questions = [
        Question(kind="predicate", instructions="Is the customer unhappy?"),
        Question(
            kind="choice",
            instructions="What is it about?",
            choices=(
                Choice(value="delivery", description="how it came"),
                Choice(value=True),
                Choice(value="price"),
            ),
        ),
        Question(
            kind="score",
            instructions="How angry?",
            choices=(Choice(value="calm"), Choice(value="furious")),
        ),
    ]
    expected = tiny().decide(INPUT, questions, seed=0)
    permuted = {**WHAT, "choices": WHAT["choices"][::-1]}  # type: ignore[index]
    with OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        decision = client.decisions.create(**DECIDE)
        again: Any = client.decisions.create(**DECIDE | {"questions": [UNHAPPY, permuted, HOW]})
    predicate, choice, score = decision.answers
    assert predicate.type == "predicate"
    assert predicate.name == "unhappy"
    assert predicate.probability == expected[0].probability
    assert choice.type == "choice"
    assert choice.name is None
    assert choice.choice == expected[1].choice
    assert [type(p.value) for p in choice.probabilities] == [str, bool, str]
    assert sum(p.probability for p in choice.probabilities) == pytest.approx(1)
    assert choice.confidence == max(p.probability for p in choice.probabilities)
    assert score.type == "score"
    assert [(p.value, p.label) for p in score.probabilities] == [(0, "calm"), (1, "furious")]
    assert score.score == pytest.approx(sum(p.value * p.probability for p in score.probabilities))
    assert decision.usage.total_tokens == decision.usage.input_tokens > 40
    assert decision.usage.output_tokens == decision.usage.output_tokens_details.reasoning_tokens == 0
    assert decision.usage.input_tokens_details.cached_tokens >= 0
    type(decision).model_validate(decision.to_dict())
    by_value = {p.value: p.probability for p in again.answers[1].probabilities}
    assert by_value == {p.value: p.probability for p in choice.probabilities}


def test_mercurys_client_gets_its_answers_by_name(address: str) -> None:
    with Inception(base_url=address, api_key=KEY, max_retries=0) as mercury:
        decision = mercury.decisions.create(**DECIDE_BY_NAME)
    answers: Any = decision.answers
    assert list(answers) == list(DECIDE_BY_NAME["questions"])
    assert answers["unhappy"].type == "noul"
    assert 0 <= answers["unhappy"].noul <= 1
    about = answers["about"]
    assert sum(about.probabilities.values()) == pytest.approx(1)
    assert about.confidence == about.probabilities[about.choice]
    angry = answers["angry"]
    assert angry.legend == {"0": "not at all", "1": {"much": True}, "2": ["very", "much"]}
    assert sum(angry.probabilities.values()) == pytest.approx(1)
    assert angry.score == pytest.approx(sum(int(n) * p for n, p in angry.probabilities.items()))
    assert answers["sure"].probabilities == {"the only one": 1.0}
    assert decision.usage.input_tokens > 40
    type(decision).model_validate(decision.to_dict())


# What is asked for, without a model


def test_the_same_questions_have_the_same_answers_and_another_seed_may_look_again() -> None:
    assert whole_of(DECIDE)["answers"] == whole_of(DECIDE)["answers"]
    assert whole_of(DECIDE)["answers"] != whole_of({**DECIDE, "seed": 5})["answers"]


def test_the_order_of_choices_changes_nothing() -> None:
    def found(choices: list[dict[str, Any]]) -> dict[Any, float]:
        (answer,) = whole_of({**DECIDE, "questions": [{**WHAT, "choices": choices}]})["answers"]
        return {entry["value"]: entry["probability"] for entry in answer["probabilities"]}

    choices: Any = WHAT["choices"]
    assert found(choices) == found(choices[::-1]) == found([choices[1], choices[0], choices[2]])


def test_system_one_is_the_same_for_a_state() -> None:
    assert whole_of(DECIDE_BY_NAME, path=SYSTEM_ONE) == whole_of(DECIDE_BY_NAME)
    error = error_of(post(app_of(), SYSTEM_ONE, DECIDE))
    assert (error["param"], error["code"]) == ("input", "unknown_parameter")


def test_one_option_alone_asks_the_engine_nothing() -> None:
    engine = FakeEngine()
    questions = {"sure": DECIDE_BY_NAME["questions"]["sure"]}
    reply = whole_of({**DECIDE_BY_NAME, "questions": questions}, engine)
    assert reply["answers"]["sure"]["confidence"] == 1.0
    assert reply["usage"] == {"input_tokens": 0, "output_tokens": 0}
    assert engine.requests == []


def test_a_conversation_with_calls_is_told_in_words() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "Be kind."}]},
        {"role": "user", "content": [
            {"type": "input_text", "text": "Where is it?", "prompt_cache_breakpoint": {"mode": "explicit"}},
            {"type": "input_json", "data": {"order": 7}},
        ]},
        {"type": "function_call", "call_id": "c1", "name": "track", "arguments": '{"order": 7}'},
        {"type": "function_call_output", "call_id": "c1", "output": "on its way"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "note", "input": "late"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [
            {"type": "input_text", "text": "ok"},
        ]},
        {"role": "assistant", "phase": "final_answer", "content": [
            {"type": "output_text", "text": "It is on its way."}, {"type": "refusal", "refusal": "No more."},
        ]},
        {"role": "system", "content": "Later word."},
    ]  # fmt: skip
    text = prompt_of({**DECIDE, "input": items})
    spoken = [
        "Be brief.\n\nBe kind.", 'Where is it?\n{"order": 7}', 'Calls track: {"order": 7}',
        "Result of track: on its way", "Calls note: late", "Result of note: ok",
        "It is on its way.\nNo more.", "system: Later word.", "Is the customer unhappy?",
    ]  # fmt: skip
    assert sorted(spoken, key=text.index) == spoken


def test_a_state_is_shown_as_json_and_a_text_as_it_is() -> None:
    assert '{"review": "The parcel' in prompt_of(DECIDE_BY_NAME)
    assert f"{INPUT}\n\n" in prompt_of({**DECIDE_BY_NAME, "state": INPUT})
    assert "[1, 2]" in prompt_of({**DECIDE_BY_NAME, "state": [1, 2]})
    assert "- yes: cross" in prompt_of(DECIDE_BY_NAME)
    assert "2. about\n- delivery: how it came\n- price" in prompt_of(DECIDE_BY_NAME), "a name asks for itself"


def question(**fields: Any) -> dict[str, Any]:
    return {"questions": [{**WHAT, **fields}]}


def choosing(*values: Any) -> dict[str, Any]:
    return question(choices=[{"value": value} for value in values])


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,xx"}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": None}, "input", "input is missing; give it, or state."),
        ({"state": "x"}, "state", "state is given and so is input"),
        ({"input": 3}, "input", "input is 3; it should be a valid string."),
        ({"input": []}, "input", "input is a list; it should have at least 1 item"),
        ({"input": [3]}, "input.0", "input.0 is 3; it should be an object."),
        ({"input": [{"role": "user"}]}, "input.0.content", "is missing"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input.0.role", "input.0.role is 'nobody'"),
        ({"input": [{"type": "file"}]}, "input.0.type", "input.0.type is 'file'; it must be one of"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input.0.content.0", "is an image"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "input.0.call_id",
            "no call before it has this id",
        ),
        ({"questions": []}, "questions", "questions is a list; it should have at least 1 item"),
        ({"questions": [UNHAPPY] * 401}, "questions", "at most 400 items"),
        ({"questions": [{"type": "maybe"}]}, "questions.0.type", "must be one of 'predicate', 'choice'"),
        ({"questions": [{"instructions": "x"}]}, "questions.0.type", "is missing"),
        (question(instructions=[IMAGE]), "questions.0.instructions.0", "this model reads text only"),
        (choosing("a"), "questions.0.choices", "at least 2 items"),
        (choosing(*map(str, range(256))), "questions.0.choices", "at most 255 items"),
        (choosing("a", "a"), "questions.0.choices", "two choices read 'a'"),
        (choosing(True, "true"), "questions.0.choices", "two choices read 'true'"),
        (choosing("", "b"), "questions.0.choices", "one of the choices is empty"),
        (choosing(1, "b"), "questions.0.choices.0.value", "should be a valid"),
        (choosing("word " * 40, "b"), "questions", "too many tokens for a canvas"),
        (question(chioces=[]), "questions.0.chioces", "unknown field"),
        ({"questions": [{**HOW, "levels": [{"label": "a"}]}]}, "questions.0.levels", "at least 2 items"),
        ({"stream": True}, "stream", "the answer comes whole"),
        ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options", "as memory allows"),
        ({"temperature": 1}, "temperature", "unknown field"),
    ],
)  # fmt: skip
def test_what_cannot_be_decided_is_refused_by_name(fields: dict[str, Any], param: str, message: str) -> None:
    response = post(app_of(), DECISIONS, {**DECIDE, **fields})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param), error
    assert message in error["message"]


def named(**fields: Any) -> dict[str, Any]:
    return {"questions": {"q": {**DECIDE_BY_NAME["questions"]["about"], **fields}}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"state": None}, "input", "input is missing; give it, or state."),
        ({"state": 3}, "state", "state is 3"),
        ({"questions": {}}, "questions", "at least 1 item"),
        ({"questions": [UNHAPPY]}, "questions", "should be a valid dictionary"),
        (named(type="predicate"), "questions.q.type", "must be one of 'noul', 'choice', 'score'"),
        (named(criteria=None), "questions.q.criteria", "should be a valid dictionary"),
        (named(criteria={}), "questions.q.criteria", "at least 1 item"),
        (named(criteria={"": None, "b": None}), "questions.q.criteria", "one of the choices is empty"),
        (named(type="score", criteria=["a"]), "questions.q.criteria", "at least 2 items"),
        (named(type="noul", criteria={"maybe": "x"}), "questions.q.criteria.maybe", "unknown field"),
        (
            {"state": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}]},
            "state",
            "holds an image",
        ),
    ],
)
def test_what_of_a_state_cannot_be_decided_is_refused_by_name(
    fields: dict[str, Any], param: str, message: str
) -> None:
    response = post(app_of(), DECISIONS, {**DECIDE_BY_NAME, **fields})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param), error
    assert message in error["message"]


def test_what_is_too_long_says_so() -> None:
    for body, param in (
        (DECIDE | {"input": "word " * 5000}, "input"),
        (DECIDE_BY_NAME | {"state": "x " * 5000}, "state"),
    ):
        error = error_of(post(app_of(), DECISIONS, body))
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    error = error_of(post(app_of(max_prompt_tokens=30), DECISIONS, DECIDE))
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


def test_neutral_fields_change_nothing() -> None:
    neutral = {
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "prompt_cache_options": {"mode": "implicit"},
    }
    assert whole_of({**DECIDE, **neutral})["answers"] == whole_of(DECIDE)["answers"]


def test_a_calibration_makes_answers_less_sure_and_chooses_the_same(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    Calibration(temperature=3.0).save(file)
    plain = whole_of(DECIDE)["answers"][1]
    response = post(app_of(calibration=file), DECISIONS, DECIDE)
    calibrated = response.json()["answers"][1]
    assert calibrated["choice"] == plain["choice"]
    assert calibrated["confidence"] < plain["confidence"]
    assert sum(entry["probability"] for entry in calibrated["probabilities"]) == pytest.approx(1)
    file.write_text("{}")
    with pytest.raises(InputError, match="is not a calibration"):
        app_of(calibration=file)


def test_half_an_answer_is_none() -> None:
    app = app_of(FakeEngine(Script(holds_at=0)))
    response = post(app, DECISIONS, {**DECIDE, "deadline_s": 0.02}, by=run_unhurried)
    assert (response.status_code, error_of(response)["code"]) == (504, "timeout")


def test_a_busy_engine_says_when_to_come_back() -> None:
    engine = FakeEngine()
    engine.busy_for_s = 3
    assert post(app_of(engine), DECISIONS, DECIDE).headers["retry-after"] == "3"


def test_leaving_ends_all_requests_of_a_decision() -> None:
    async def leave() -> FakeEngine:
        engine = FakeEngine(Script(holds_at=0))
        client = RawClient(app_of(engine), DECISIONS, DECIDE)
        while not engine.running:
            await asyncio.sleep(0)
        client.leave()
        await asyncio.wait_for(client.task, 60)
        assert engine.running == 0
        return engine

    assert run(leave()).finished == []
