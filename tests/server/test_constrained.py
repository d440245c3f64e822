"""Answers that keep to a form, over a socket, read by the clients people have.

The weights are random: nothing but the constraint can make an answer valid.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx2
import openai
import pytest
from inceptionai import Inception
from openai import OpenAI
from pydantic import BaseModel, Field

from server.real_server import RealServer, serving, write_model
from server.served import WEATHER
from text.bundled import TOKENIZER

MESSAGES: Any = [{"role": "user", "content": "Who lives by the sea?"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "seed": 7, "max_tokens": 80}
CONTROLS = TOKENIZER.controls
# Makes a random model think, or call: of what it may write it takes this.
THINK = {str(CONTROLS["<|channel>"]): 100}
CALL = {str(CONTROLS["<|tool_call>"]): 100}
NO_CALL = dict.fromkeys(CALL, -100)


class Job(enum.Enum):
    SAILOR = "sailor"
    COOK = "ship's cook"


class Address(BaseModel):
    street: str
    number: int = Field(ge=1, le=999)


class Person(BaseModel):
    """Nested, with an enum, a list, an optional part and a union."""

    name: str
    age: int
    job: Job
    tags: list[Literal["old", "young", "né"]]
    home: Address | None
    weight: float | None


class Look(BaseModel):
    """The weather of a place."""

    place: str
    days: int
    unit: Literal["C", "F"]


class Sail(BaseModel):
    """Go there."""

    to: Address
    knots: float


LOOK, SAIL = (openai.pydantic_function_tool(kind) for kind in (Look, Sail))
KINDS: dict[str, type[BaseModel]] = {"Look": Look, "Sail": Sail}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    model: Path = write_model(tmp_path_factory.mktemp("model") / "tiny", steps=2)
    with serving(str(model)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.address}/v1", api_key="any", max_retries=0) as client:
        yield client


def content_of(answer: Any, index: int = 0) -> str:
    choice = answer.choices[index]
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    return str(choice.message.content)


# Text of a form


def test_openais_parse_gives_objects_of_the_model_for_every_seed(client: OpenAI) -> None:
    answer = client.chat.completions.parse(**CHAT, n=6, response_format=Person)
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Person)
        assert choice.finish_reason == "stop"
    assert len({choice.message.content for choice in answer.choices}) == 6
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 6 * 80
    alone = client.chat.completions.parse(**CHAT | {"seed": 8}, response_format=Person)
    assert alone.choices[0].message.parsed == answer.choices[1].message.parsed, "answer i has seed + i"


def test_openais_stream_ends_with_an_object_of_the_model(client: OpenAI) -> None:
    options = {"stream_options": {"include_usage": True}, "extra_body": {"diffusing": True}}
    with client.chat.completions.stream(**CHAT, response_format=Person, **options) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.done" in kinds
    whole = client.chat.completions.parse(**CHAT, response_format=Person)
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed
    assert isinstance(final.choices[0].message.parsed, Person)
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("decode", ["diffuse", "causal", "auto"])
def test_json_mode_gives_objects(client: OpenAI, decode: str) -> None:
    answer = client.chat.completions.create(
        **CHAT | {"max_tokens": 40},
        n=2,
        response_format={"type": "json_object"},
        extra_body={"decode": decode},
    )
    for index in range(2):
        assert isinstance(json.loads(content_of(answer, index)), dict)


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_is_kept_to_strict_or_not(client: OpenAI, strict: bool | None) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 8}},
              "required": ["n"]}  # fmt: skip
    asked: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": strict}}
    answer = client.chat.completions.create(**CHAT, response_format=asked)
    assert 3 <= json.loads(content_of(answer))["n"] <= 8


CODE = r"[A-Z]{2}-\d{3,5}(, [a-z]+)*"
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"regex": CODE}, "code"),
    ({"guided_regex": CODE}, "code"),
    ({"structured_outputs": {"regex": CODE}}, "code"),
    ({"choice": ["red", "green", "déjà vu"]}, "choice"),
    ({"guided_choice": ["red", "green", "déjà vu"]}, "choice"),
    ({"structured_outputs": {"choice": ["red", "green", "déjà vu"]}}, "choice"),
    ({"json_schema": NUMBERS}, "numbers"),
    ({"json_schema": json.dumps(NUMBERS)}, "numbers"),
    ({"guided_json": NUMBERS}, "numbers"),
    ({"structured_outputs": {"json": json.dumps(NUMBERS)}}, "numbers"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": NUMBERS}}}, "numbers"),
    ({"json_object": True}, "object"),
    ({"structured_outputs": {"json_object": True}}, "object"),
    ({"response_format": {"type": "json_object"}}, "object"),
]


def check(text: str, kind: str) -> None:
    match kind:
        case "code":
            assert re.fullmatch(CODE, text)
        case "choice":
            assert text in ("red", "green", "déjà vu")
        case "numbers":
            found = json.loads(text)
            assert 2 <= len(found) <= 4
            assert all(type(item) is int for item in found)
        case "object":
            assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(("asked", "kind"), FORMS, ids=lambda value: next(iter(value), "")[:30])
def test_every_name_of_a_form_is_honoured_by_chats_and_completions(
    client: OpenAI, asked: dict[str, Any], kind: str
) -> None:
    short = CHAT | {"max_tokens": 40}
    check(content_of(client.chat.completions.create(**short, extra_body=asked)), kind)
    answer = client.completions.create(
        model="tiny", prompt=["Once upon", "The sea"], seed=3, max_tokens=40, extra_body=asked
    )
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    for choice in answer.choices:
        check(choice.text, kind)


def test_a_thought_comes_before_the_form_and_is_no_part_of_it(client: OpenAI) -> None:
    asked = {**CHAT, "logit_bias": THINK, "extra_body": {"regex": "[0-9]+"}}
    answer = client.chat.completions.create(**asked, reasoning_effort="high")
    assert re.fullmatch("[0-9]+", content_of(answer))
    assert (answer.choices[0].message.model_extra or {})["reasoning_content"]
    answer = client.chat.completions.create(**asked)
    assert re.fullmatch("[0-9]+", content_of(answer))
    assert "reasoning_content" not in (answer.choices[0].message.model_extra or {})


def test_logprobs_are_those_of_words_that_may_stand_there(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        **CHAT, logprobs=True, top_logprobs=5, extra_body={"choice": ["yes", "no"]}
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    first = logprobs.content[0]
    assert all("yes".startswith(one.token) or "no".startswith(one.token) for one in first.top_logprobs)
    assert {one.token for one in first.top_logprobs} >= {first.token}


def test_mercurys_client_asks_for_json_and_calls_alike(server: RealServer) -> None:
    schema = Address.model_json_schema()
    with Inception(base_url=server.address, api_key="any", max_retries=0) as mercury:
        asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 80, "extra_params": {"seed": 7}}
        answer = mercury.chat.completions.create(
            **asked, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        )
        Address.model_validate_json(str(answer.choices[0].message.content))
        answer = mercury.chat.completions.create(**asked, tools=[LOOK], tool_choice="required")
        for call in answer.choices[0].message.tool_calls or []:
            Look.model_validate_json(call.function.arguments)
        assert answer.choices[0].finish_reason == "tool_calls"


def test_a_stop_string_still_ends_an_answer(client: OpenAI) -> None:
    answer = client.chat.completions.create(**CHAT, stop=["3"], extra_body={"regex": "[1-3]{40}"})
    assert re.fullmatch("[12]{0,40}", content_of(answer))


# Tool calls


def calls_of(answer: Any, index: int = 0) -> list[Any]:
    choice = answer.choices[index]
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    assert "unread_tool_calls" not in choice.model_extra.get("dgemma", {})
    assert choice.message.tool_calls
    return list(choice.message.tool_calls)


def check_arguments(calls: list[Any]) -> None:
    for call in calls:
        assert isinstance(call.function.parsed_arguments, KINDS[call.function.name])


def test_required_strict_tools_are_called_with_objects_of_their_models(client: OpenAI) -> None:
    answer = client.chat.completions.parse(**CHAT, n=6, tools=[LOOK, SAIL], tool_choice="required")
    for index in range(6):
        check_arguments(calls_of(answer, index))


def test_a_named_tool_is_called_once_if_calls_are_not_parallel(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        **CHAT,
        n=4,
        tools=[LOOK, SAIL],
        tool_choice={"type": "function", "function": {"name": "Sail"}},
        parallel_tool_calls=False,
        logit_bias=CALL,
    )
    for index in range(4):
        (call,) = calls_of(answer, index)
        assert isinstance(call.function.parsed_arguments, Sail)


def test_a_stream_of_calls_ends_with_objects_of_their_models(client: OpenAI) -> None:
    with client.chat.completions.stream(**CHAT, tools=[LOOK, SAIL], tool_choice="required") as stream:
        for _ in stream:
            pass
        check_arguments(calls_of(stream.get_final_completion()))


def test_strict_tools_that_may_be_called_are_called_rightly_or_not_at_all(client: OpenAI) -> None:
    asked = {**CHAT, "tools": [LOOK, SAIL]}
    called = client.chat.completions.parse(**asked, logit_bias=CALL).choices[0].message
    assert called.tool_calls  # text may stand before them
    check_arguments(list(called.tool_calls))
    said = client.chat.completions.create(**asked, logit_bias=NO_CALL).choices[0].message
    assert said.content
    assert not said.tool_calls


def test_speech_beside_strict_tools_that_is_cut_off_says_so(client: OpenAI) -> None:
    """A call that ends with the last token is whole; words that were not at their end are not."""
    never = {**NO_CALL, **{str(CONTROLS[name]): -100 for name in ("<eos>", "<turn|>") if name in CONTROLS}}
    answer = client.chat.completions.create(**CHAT | {"max_tokens": 20}, tools=[LOOK], logit_bias=never)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert (choice.model_extra or {})["dgemma"]["finish_reason"] == "length"
    chunks = client.chat.completions.create(
        **CHAT | {"max_tokens": 20}, tools=[LOOK], logit_bias=never, stream=True
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_a_form_and_tools_give_text_of_the_form_or_calls(client: OpenAI) -> None:
    asked = {**CHAT, "tools": [LOOK, SAIL], "response_format": Address}
    check_arguments(calls_of(client.chat.completions.parse(**asked, logit_bias=CALL)))
    answer = client.chat.completions.parse(**asked, logit_bias=NO_CALL)
    assert isinstance(answer.choices[0].message.parsed, Address)
    # Who must call writes no text, of whatever form.
    check_arguments(calls_of(client.chat.completions.parse(**asked, tool_choice="required")))


def test_a_tool_that_is_not_strict_is_called_by_its_schema_or_with_any_object(client: OpenAI) -> None:
    asked = {**CHAT, "tool_choice": "required", "parallel_tool_calls": False}
    plain = {**WEATHER, "function": {**WEATHER["function"], "parameters": Look.model_json_schema()}}
    (call,) = calls_of(client.chat.completions.create(**asked, tools=[plain]))
    Look.model_validate_json(call.function.arguments)
    # What no machine can keep to: described to the model, and no more.
    odd = {**WEATHER, "function": {"name": "odd", "parameters": {"not": {}}}}
    (call,) = calls_of(client.chat.completions.create(**asked, tools=[odd]))
    assert isinstance(json.loads(call.function.arguments), dict)
    (call,) = calls_of(
        client.chat.completions.create(**asked, tools=[{"type": "function", "function": {"name": "now"}}])
    )
    assert call.function.arguments == "{}"


def test_no_tool_is_called_where_none_may_be(client: OpenAI) -> None:
    answer = client.chat.completions.parse(**CHAT, tools=[LOOK], tool_choice="none", response_format=Address)
    assert isinstance(answer.choices[0].message.parsed, Address)


@pytest.mark.parametrize(("asked", "kind"), FORMS, ids=lambda value: next(iter(value), "")[:30])
def test_a_gap_has_a_form_too(client: OpenAI, asked: dict[str, Any], kind: str) -> None:
    answer = client.completions.create(
        model="tiny", prompt="The value is ", suffix=" and no other.", seed=3, max_tokens=14, extra_body=asked
    )
    check(answer.choices[0].text, kind)


def test_the_gaps_of_other_clients_have_a_form(server: RealServer) -> None:
    with Inception(base_url=server.address, api_key="any", max_retries=0) as client:
        gap: Any = {"model": "tiny", "prompt": "x = ", "suffix": "\ny = 2\n", "max_tokens": 8}
        answer = client.fim.completions.create(**gap, extra_body={"regex": "[0-9]{3}"})
        assert re.fullmatch("[0-9]{3}", answer.choices[0].text)
    body = {"input_prefix": "x = ", "input_suffix": "\n", "n_predict": 12, "json_schema": NUMBERS}
    told = httpx2.post(f"{server.address}/infill", json=body, timeout=60).json()
    check(told["content"], "numbers")


def test_a_gap_that_holds_no_text_of_its_form_is_refused(client: OpenAI, server: RealServer) -> None:
    gap: Any = {"model": "tiny", "prompt": "a", "suffix": "b", "max_tokens": 2}
    for regex, words in (("[0-9]{30}", "no text of the response format has"), ("[", "regex: the pattern")):
        with pytest.raises(openai.BadRequestError, match=re.escape(words)) as caught:
            client.completions.create(**gap, extra_body={"regex": regex})
        assert caught.value.param == "regex"
    body = {"input_prefix": "x", "json_schema": {"type": "strin"}}
    refusal = httpx2.post(f"{server.address}/infill", json=body, timeout=60)
    assert refusal.status_code == 400
    assert refusal.json()["error"]["param"] == "json_schema"


# Refusals


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"regex": "["}, "regex", "regex: the pattern"),
        ({"regex": r"(a)\1"}, "regex", "regex: "),
        ({"regex": 3}, "regex", "regex is 3"),
        ({"choice": []}, "choice", "choice is a list"),
        ({"choice": ["a", ""]}, "choice.1", "choice.1 is ''"),
        ({"choice": "a"}, "choice", "choice is 'a'"),
        ({"json_schema": []}, "json_schema", "json_schema is a list"),
        ({"json_schema": "{"}, "json_schema", "json_schema is no JSON"),
        ({"json_schema": {"type": "strin"}}, "json_schema", "strin"),
        ({"json_schema": False}, "json_schema", "contradicts itself"),
        ({"response_format": {"type": "jsn"}}, "response_format.type", "must be one of"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema", "is missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}},
         "response_format", "type"),
        ({"regex": "a", "choice": ["a"]}, "choice", "regex and choice are both given"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "both given"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "both given"),
        ({"structured_outputs": {"grammar": "a"}}, "structured_outputs.grammar", "unknown field"),
        ({"guided_grammar": "root ::= a"}, "guided_grammar", "grammars are not read"),
        ({"regex": "a", "ignore_end": True}, "ignore_end", "not supported with regex"),
        ({"regex": "a", "end_tokens": [5]}, "end_tokens", "not supported with regex"),
        ({"regex": "[ab]{300}", "max_tokens": 20}, "max_tokens", "the shortest text"),
        ({"tools": [{**LOOK, "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
         "tools", "tool 'f': "),
        ({"tools": [{"function": {"name": "a b"}}], "tool_choice": "required"}, "tools", "rename it"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_to_is_refused_with_its_field(
    client: OpenAI, asked: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**CHAT, "extra_body": asked})
    assert caught.value.param == param
    assert words in caught.value.message


def test_too_few_tokens_are_refused_by_the_name_that_was_used(client: OpenAI) -> None:
    chat = {name: value for name, value in CHAT.items() if name != "max_tokens"}
    for stream in (False, True):
        with pytest.raises(
            openai.BadRequestError, match="max_completion_tokens is 5; the shortest"
        ) as caught:
            client.chat.completions.create(
                **chat,
                max_completion_tokens=5,
                stream=stream,
                extra_body={"regex": "[a-z0-9]{200}"},
            )
        assert caught.value.param == "max_completion_tokens"
