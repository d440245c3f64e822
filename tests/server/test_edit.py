"""An edit is one message with tagged parts; its answer is the region, rewritten."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from inceptionai import Inception

from dgemma.server.edit.prompt import EditPrompt, parse_edit_message
from server.canvas_bodies import EDIT, EDIT_ASKED, EDIT_CONTENT, REGION
from server.canvas_served import KEY, served_tiny, tiny
from server.fake_engine import FakeEngine, Script
from server.raw_client import RawClient
from server.served import app_of, ask, error_of, post, run, run_unhurried


def saying(content: Any) -> dict[str, Any]:
    return {"model": "dgemma", "messages": [{"role": "user", "content": content}]}


def in_region(text: str) -> str:
    return f"<|code_to_edit|>{text}<|/code_to_edit|>"


# The message


def test_the_parts_of_a_message_are_told_apart() -> None:
    assert parse_edit_message(EDIT_CONTENT) == EditPrompt(
        before="current_file_path: greet.py\nimport os\n\n",
        region=REGION,
        after='\n\ngreet("you")\n',
        instruction="Recently viewed:\ncode_snippet_file_path: other.py\nx = 1\n\n"
        "Recent changes:\n--- greet.py\n+++ greet.py\n-def hello():\n+def greet(nmae):",
    )


def test_what_is_said_outside_of_all_tags_is_the_instruction() -> None:
    read = parse_edit_message(f"Mend it, \n{in_region('a b')}\n please. ")
    assert (read.before, read.region, read.after) == ("", "a b", "")
    assert read.instruction == "Mend it, \n\n please."


def test_a_file_beside_the_region_is_something_to_know_of() -> None:
    read = parse_edit_message(f"<|current_file_content|>\nx = 1\n<|/current_file_content|>{in_region('x')}")
    assert (read.before, read.region, read.instruction) == ("", "x", "The file:\nx = 1")


@pytest.mark.parametrize(
    ("inside", "region"),
    [
        ("\na\n", "a"),
        ("a", "a"),
        ("\n\na\n\n", "\na\n"),
        ("\r\na\r\n", "a"),
        ("<|cursor|>", ""),
        ("\n<|cursor|>a", "a"),
        ("<|other|>", "<|other|>"),
        ("<|turn>", "<|turn>"),
    ],
)
def test_breaks_beside_the_tags_are_not_the_regions_own(inside: str, region: str) -> None:
    assert parse_edit_message(in_region(inside)).region == region


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("Mend it.", "there is no <|code_to_edit|>"),
        (in_region("a") + in_region("b"), "<|code_to_edit|> stands there twice"),
        ("<|code_to_edit|>a", "<|code_to_edit|> is not closed; put <|/code_to_edit|> after it"),
        ("a<|/code_to_edit|>", "<|/code_to_edit|> closes nothing"),
        ("<|current_file_content|>" + in_region("a"), "<|current_file_content|> is not closed"),
        ("<|code_to_edit|><|current_file_content|><|/code_to_edit|>", "close that one first"),
        (
            f"<|edit_diff_history|>{in_region('a')}<|/edit_diff_history|>",
            "stands within <|edit_diff_history|>",
        ),
        ("<|current_file_content|><|code_to_edit|><|/current_file_content|>", "closes nothing"),
        (in_region("<|cursor|>a<|cursor|>"), "<|cursor|> stands there 2 times"),
        ("<|cursor|>" + in_region("a"), "<|cursor|> stands outside of <|code_to_edit|>"),
        ("<|edit_diff_history|><|/edit_diff_history|>" * 2 + in_region("a"), "stands there twice"),
    ],
)
def test_a_message_that_is_not_tagged_as_it_should_be_is_refused(content: str, message: str) -> None:
    response = post(app_of(), EDIT, saying(content))
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, "messages")
    assert message in error["message"]


# The request


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"stream": True}, "stream", "the answer comes whole"),
        ({"n": 2}, "n", "not supported"),
        ({"stop": ["x"]}, "stop", "not supported"),
        ({"presence_penalty": 1}, "presence_penalty", "not supported"),
        ({"max_tokens": 3}, "max_tokens", "comes back as a whole"),
        ({"messages": []}, "messages", "messages is a list; it"),
        ({"messages": EDIT_ASKED["messages"] * 2}, "messages", "messages is a list; it"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role", "should be 'user'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "is missing"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "should be a valid string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type",
            "",
        ),
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
    ],
)
def test_what_an_edit_cannot_have_is_refused_by_name(
    fields: dict[str, Any], param: str, message: str
) -> None:
    response = post(app_of(), EDIT, {**EDIT_ASKED, **fields})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("content", "settings"),
    [
        (in_region("word " * 5000), {}),
        (in_region("word " * 700), {}),
        ("word " * 100 + in_region("a"), {"max_prompt_tokens": 50}),
    ],
)
def test_what_is_too_long_says_so(content: str, settings: dict[str, Any]) -> None:
    error = error_of(post(app_of(**settings), EDIT, saying(content)))
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_parts_of_text_are_one_message_and_the_usual_changes_nothing() -> None:
    parts = [{"type": "text", "text": EDIT_CONTENT[:50]}, {"type": "text", "text": EDIT_CONTENT[50:]}]
    usual = {"stream": False, "n": 1, "presence_penalty": 0, "max_tokens": 1024, "seed": 7}
    replies = [
        post(app_of(), EDIT, {**body, "seed": 7, **more}).json()
        for body, more in ((EDIT_ASKED, {}), (saying(parts), usual))
    ]
    assert replies[0]["choices"] == replies[1]["choices"]


# The answer


@pytest.mark.parametrize("at", [0, 4, len(REGION)])
def test_a_cursor_has_no_effect_and_is_not_part_of_the_region(at: int) -> None:
    plain, with_cursor = (
        post(app_of(), EDIT, {**saying(in_region(text)), "seed": 7}).json()["choices"]
        for text in (REGION, f"{REGION[:at]}<|cursor|>{REGION[at:]}")
    )
    assert with_cursor == plain
    for change in plain[0]["dgemma"]["changes"]:
        assert REGION[change["start"] : change["stop"]] == change["old"]
    assert plain[0]["dgemma"]["changes"]


def test_that_a_cursor_has_no_effect_is_said_where_the_endpoint_is_described() -> None:
    schemas = ask(app_of(), "GET", "/openapi.json").json()["components"]["schemas"]
    described = schemas["UserMessage"]["properties"]["content"]["description"]
    assert "<|cursor|> in it, which is without effect" in described


def test_a_deadline_gives_the_region_as_it_was() -> None:
    app = app_of(FakeEngine(Script(holds_at=0)))
    choice = post(app, EDIT, {**EDIT_ASKED, "deadline_s": 0.02}, by=run_unhurried).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (REGION, "length")
    assert choice["dgemma"]["finish_reason"] == "deadline"


def test_leaving_ends_all_requests_of_an_edit() -> None:
    async def leave() -> FakeEngine:
        engine = FakeEngine(Script(holds_at=0))
        client = RawClient(app_of(engine), EDIT, EDIT_ASKED)
        while engine.running < 2:
            await asyncio.sleep(0)
        client.leave()
        await asyncio.wait_for(client.task, 60)
        assert engine.running == 0
        return engine

    assert run(leave()).finished == []


def test_mercurys_client_gets_what_the_python_api_writes() -> None:
    read = parse_edit_message(EDIT_CONTENT)
    expected = tiny().edit(
        read.region, read.instruction, before=read.before, after=read.after, seed=7, temperature=0.5
    )
    with served_tiny() as address, Inception(base_url=address, api_key=KEY, max_retries=0) as mercury:
        answer = mercury.edit.completions.create(
            **EDIT_ASKED, max_tokens=200, temperature=0.5, extra_body={"seed": 7}
        )
    assert (answer.object, answer.choices[0].message.role) == ("edit.completion", "assistant")
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == "stop"
    details = (answer.choices[0].model_extra or {})["dgemma"]
    assert [(change["old"], change["new"]) for change in details["changes"]] == [
        (change.old, change.new) for change in expected.changes
    ]
    assert answer.usage.completion_tokens == len(tiny().tokenizer.encode(expected.text))
    type(answer).model_validate(answer.to_dict())
