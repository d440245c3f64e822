"""A text completion continues prompts of text or of tokens, several at once, whole or in chunks."""

from __future__ import annotations

from typing import Any

import pytest

from dgemma.errors import InputError
from dgemma.events import ToolCall
from dgemma.server.app import create_app
from dgemma.server.http.settings import Settings
from server.fake_engine import BOS, FakeEngine, FakeText, Script, answer_text
from server.served import COMPLETIONS, ONCE, app_of, events_of, post


def whole_of(engine: FakeEngine, **fields: Any) -> dict[str, Any]:
    response = post(app_of(engine), COMPLETIONS, {**ONCE, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def stream_of(engine: FakeEngine, **fields: Any) -> list[dict[str, Any]]:
    return events_of(post(app_of(engine), COMPLETIONS, {**ONCE, "stream": True, **fields}))


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", [(BOS, 97, 98)]),
        (["ab", "c"], [(BOS, 97, 98), (BOS, 99)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
        ("", [(BOS,)]),
    ],
)
def test_prompts_are_texts_or_token_ids(prompt: Any, prompts: list[tuple[int, ...]]) -> None:
    engine = FakeEngine()
    reply = whole_of(engine, prompt=prompt)
    assert [request.prompt for request in engine.requests] == prompts
    assert [choice["text"] for choice in reply["choices"]] == [
        answer_text(7 + index, ids) for index, ids in enumerate(prompts)
    ]
    assert reply["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_n_answers_of_each_prompt_stand_together() -> None:
    engine = FakeEngine()
    reply = whole_of(engine, prompt=["ab", "c"], n=2)
    assert [request.prompt for request in engine.requests] == [(BOS, 97, 98)] * 2 + [(BOS, 99)] * 2
    assert [choice["dgemma"]["seed"] for choice in reply["choices"]] == [7, 8, 9, 10]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("drafts", [False, True])
def test_the_texts_of_a_stream_join_to_the_whole_answer(drafts: bool) -> None:
    whole = whole_of(FakeEngine(), n=2)
    chunks = stream_of(FakeEngine(), n=2, diffusing=drafts, stream_options={"include_usage": True})
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine][-1] == "stop"
        assert all(c["text"] == "" for c in mine if "draft" in c)
        assert any("draft" in c for c in mine) == drafts
    assert chunks[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize("plain_commits", [False, True])
def test_log_probabilities_have_the_older_form(plain_commits: bool) -> None:
    script = Script(text="Äb", plain_commits=plain_commits)
    logprobs = whole_of(FakeEngine(script), logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\x84", "b", "<turn|>"]
    assert logprobs["text_offset"] == [0, 0, 1, 2], "a character counts when it is whole"
    assert logprobs["token_logprobs"] == [-0.1] * 4
    assert logprobs["top_logprobs"][2] == {"b": -0.1, "c": -1.1}
    chunks = [c for c in stream_of(FakeEngine(script), logprobs=2) if "logprobs" in c["choices"][0]]
    for field, values in logprobs.items():
        assert [v for c in chunks for v in c["choices"][0]["logprobs"][field]] == values


def test_the_chosen_token_has_a_log_probability_even_if_no_others_are_wanted() -> None:
    logprobs = whole_of(FakeEngine(Script(text="a")), logprobs=0)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.1, -0.1]
    assert logprobs["top_logprobs"] == [{}, {}]
    assert whole_of(FakeEngine())["choices"][0]["logprobs"] is None


def test_thoughts_and_calls_of_a_continued_text_are_not_lost() -> None:
    script = Script(text="b", thought="hm", tool_calls=(ToolCall(name="f"),))
    choice = whole_of(FakeEngine(script))["choices"][0]
    assert (choice["text"], choice["reasoning_content"]) == ("b", "hm")
    assert choice["dgemma"]["unread_tool_calls"][0]["name"] == "f"
    chunks = stream_of(FakeEngine(script))
    assert "".join(c["choices"][0].get("reasoning_content", "") for c in chunks) == "hm"


def test_a_prompt_without_any_token_is_refused() -> None:
    class Unmarked(FakeText):
        def encode_prompt(self, text: str) -> tuple[int, ...]:
            return tuple(text.encode())

    response = post(create_app(Settings(), FakeEngine(), Unmarked()), COMPLETIONS, {**ONCE, "prompt": ""})
    assert response.json()["error"]["message"] == "prompt holds no token; give it some text."


def test_an_error_of_the_text_is_about_the_prompt() -> None:
    class Refusing(FakeText):
        def encode_prompt(self, text: str) -> tuple[int, ...]:
            raise InputError("the character '☃' at position 0 has no token in this tokenizer; remove it.")

    response = post(create_app(Settings(), FakeEngine(), Refusing()), COMPLETIONS, ONCE)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
