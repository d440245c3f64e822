"""The real thing: `dgemma serve` with a real engine, asked by the clients people have.

Its answers are compared with those of the same checkpoint in this process, token for token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from inceptionai import AsyncInception, Inception
from openai import AsyncOpenAI, OpenAI

import dgemma
from dgemma import Answer, LanguageModel
from dgemma.server.text import CheckpointText
from server.real_server import ADAPTERS, STEPS, RealServer, serving, write_adapters, write_model
from server.served import WEATHER, eventually

KEY = "a-key"
MESSAGES: Any = [{"role": "user", "content": "Why is the sea salty?"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "seed": 7, "max_tokens": 40}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def adapters(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_adapters(model_path, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def models(model_path: Path, adapters: dict[str, Path]) -> dict[str, LanguageModel]:
    """What is served, in this process: the base and each adapter, by its served name."""
    base = dgemma.load(model_path, exact=True)
    return {"tiny": base, **{name: base.with_adapter(path) for name, path in adapters.items()}}


@pytest.fixture(scope="module")
def lm(models: dict[str, LanguageModel]) -> LanguageModel:
    return models["tiny"]


@pytest.fixture(scope="module")
def server(model_path: Path, adapters: dict[str, Path]) -> Iterator[RealServer]:
    flags = [word for name, path in adapters.items() for word in ("--adapter", f"{name}={path}")]
    with serving(str(model_path), "--exact", *flags, environment={"DGEMMA_API_KEY": KEY}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def mercury(server: RealServer) -> Iterator[Inception]:
    with Inception(base_url=server.address, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(lm: LanguageModel) -> Answer:
    return lm.chat(MESSAGES, seed=7, max_tokens=40, logprobs=3)


def text_of(answer: Any, index: int = 0) -> str:
    return str(answer.choices[index].message.content)


# Whole answers


def test_an_answer_is_that_of_the_python_api_token_for_token(
    client: OpenAI, lm: LanguageModel, expected: Answer
) -> None:
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3)
    choice = answer.choices[0]
    assert choice.message.content == expected.text
    assert choice.finish_reason == str(expected.finish_reason) == "length"
    assert expected.logprobs is not None
    assert choice.logprobs is not None
    listed = choice.logprobs.content or []
    pieces = CheckpointText(lm.tokenizer, None)
    assert [entry.token for entry in listed] == [pieces.token_text(token).text for token in expected.tokens]
    for entry, words in zip(listed, expected.logprobs, strict=True):
        found = [(top.token, top.logprob) for top in entry.top_logprobs]
        assert found == [(pieces.token_text(token).text, pytest.approx(value)) for token, value in words]
        assert entry.logprob == entry.top_logprobs[0].logprob
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(expected.tokens) == 40
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    extra = choice.model_extra or {}
    assert extra["dgemma"]["seed"] == 7
    assert tuple(extra["dgemma"]["steps"]) == expected.steps == (STEPS, STEPS)


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 1.5, "top_p": 0.9}, {"temperature": 1.5, "top_p": 0.9}),
        ({"extra_body": {"top_k": 5, "max_denoising_steps": 2}}, {"top_k": 5, "max_denoising_steps": 2}),
        ({"extra_body": {"decode": "causal"}}, {"decode": "causal"}),
        ({"extra_body": {"decode": "lossless", "draft_steps": 1}}, {"decode": "causal"}),
        ({"extra_body": {"decode": "auto"}}, {"decode": "causal"}),
        (
            {"extra_body": {"decode": "verified", "draft_steps": 2, "verify_threshold": 0.01}},
            {"decode": "verified", "draft_steps": 2, "verify_threshold": 0.01},
        ),
        ({"extra_body": {"acceptance": "fixed"}}, {"acceptance": "fixed"}),
        ({"reasoning_effort": "high"}, {"thinking": True}),
        ({"reasoning_effort": "none"}, {}),
        ({"tools": [WEATHER]}, {"tools": [WEATHER]}),
        ({"tools": [WEATHER], "tool_choice": "none"}, {}),
        ({"max_completion_tokens": 9}, {"max_tokens": 9}),
    ],
)
def test_what_is_asked_for_means_what_it_means_in_python(
    client: OpenAI, lm: LanguageModel, asked: dict[str, Any], options: dict[str, Any]
) -> None:
    answer = client.chat.completions.create(**CHAT, **asked)
    alone = lm.chat(MESSAGES, **{"seed": 7, "max_tokens": 40, **options})
    assert text_of(answer) == alone.text
    assert answer.choices[0].finish_reason == str(alone.finish_reason)
    assert not answer.choices[0].message.tool_calls
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == alone.prompt_tokens


def test_the_same_seed_gives_the_same_text_and_n_answers_have_seeds_in_a_row(
    client: OpenAI, lm: LanguageModel, expected: Answer
) -> None:
    first = client.chat.completions.create(**CHAT, n=2)
    assert [choice.index for choice in first.choices] == [0, 1]
    assert text_of(first) == text_of(client.chat.completions.create(**CHAT)) == expected.text
    assert text_of(first, 1) == lm.chat(MESSAGES, seed=8, max_tokens=40).text
    assert text_of(first) != text_of(first, 1)
    assert first.usage is not None
    assert first.usage.prompt_tokens == expected.prompt_tokens


def test_a_seed_that_was_drawn_can_be_asked_for_again(client: OpenAI) -> None:
    unseeded = {name: value for name, value in CHAT.items() if name != "seed"}
    first = client.chat.completions.create(**unseeded)
    drawn = (first.choices[0].model_extra or {})["dgemma"]["seed"]
    assert text_of(client.chat.completions.create(**unseeded, seed=drawn)) == text_of(first)


def test_an_answer_ends_before_a_stop_string(client: OpenAI, expected: Answer) -> None:
    stop = expected.text[20:24]
    answer = client.chat.completions.create(**CHAT, stop=["never in it", stop])
    assert text_of(answer) == expected.text[: expected.text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.choices[0].model_extra or {})["dgemma"]["stop_string"] == stop


@pytest.mark.parametrize("decode", ["diffuse", "causal", "lossless", "verified"])
def test_a_bias_that_outweighs_everything_is_all_that_is_written(
    client: OpenAI, lm: LanguageModel, decode: str
) -> None:
    (token,) = lm.tokenizer.encode("the")
    answer = client.chat.completions.create(
        **CHAT | {"max_tokens": 12}, logit_bias={str(token): 100}, extra_body={"decode": decode}
    )
    assert text_of(answer) == "the" * 12


def test_texts_and_token_ids_are_continued(client: OpenAI, lm: LanguageModel) -> None:
    prompts = ["The sea is", "Once upon"]
    answer = client.completions.create(model="tiny", prompt=prompts, seed=3, max_tokens=20, logprobs=2)
    alone = lm.generate(prompts, seed=3, max_tokens=20)
    assert [choice.text for choice in answer.choices] == [found.text for found in alone]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.tokens or []) == 20
    assert lm.tokenizer.bos_id is not None
    ids = [lm.tokenizer.bos_id, *lm.tokenizer.encode(prompts[0])]
    by_ids = client.completions.create(model="tiny", prompt=ids, seed=3, max_tokens=20)
    assert by_ids.choices[0].text == alone[0].text


# Streams


@pytest.mark.parametrize("diffusing", [False, True])
def test_a_stream_joins_to_the_same_text_with_drafts_beside_it(
    client: OpenAI, expected: Answer, diffusing: bool
) -> None:
    chunks = list(
        client.chat.completions.create(
            **CHAT,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"diffusing": diffusing},
        )
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == expected.text
    assert choices[-1].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 40
    drafts = [choice.to_dict()["draft"] for choice in choices if "draft" in choice.to_dict()]
    assert bool(drafts) == diffusing
    steps = [(draft["canvas"], draft["step"]) for draft in drafts]
    assert steps == sorted(steps)
    assert all(draft["text"] for draft in drafts)


def test_a_completion_is_streamed_to_the_same_text(client: OpenAI, lm: LanguageModel) -> None:
    stream = client.completions.create(model="tiny", prompt="The sea is", seed=3, max_tokens=40, stream=True)
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == lm.generate("The sea is", seed=3, max_tokens=40).text


def test_openais_accumulator_ends_at_the_same_message(client: OpenAI, expected: Answer) -> None:
    stop = expected.text[20:24]  # an answer that ends by its length is an error there
    with client.chat.completions.stream(**CHAT, stop=stop, extra_body={"diffusing": True}) as stream:
        for _ in stream:
            pass
        assert text_of(stream.get_final_completion()) == expected.text[: expected.text.index(stop)]


def test_the_async_client_reads_the_same_many_at_once(
    server: RealServer, lm: LanguageModel, expected: Answer
) -> None:
    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0) as client:

            async def whole(seed: int) -> str:
                return text_of(await client.chat.completions.create(**CHAT | {"seed": seed}))

            async def streamed(seed: int) -> str:
                stream = await client.chat.completions.create(**CHAT | {"seed": seed}, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return list(await asyncio.gather(whole(7), streamed(7), whole(8), streamed(8)))

    other = lm.chat(MESSAGES, seed=8, max_tokens=40).text
    assert asyncio.run(ask()) == [expected.text, expected.text, other, other]


def test_a_client_that_leaves_a_stream_frees_its_slot(client: OpenAI, server: RealServer) -> None:
    stream = client.chat.completions.create(**CHAT | {"max_tokens": 4000}, stream=True)
    next(iter(stream))
    stream.close()
    eventually(lambda: server.metric("dgemma_slots_in_use", KEY) == 0)
    eventually(lambda: server.metric("dgemma_requests_in_progress", KEY) == 0)


# What is given of an answer, and what is returned of a prompt


GIVEN: dict[str, Any] = {
    "pins": [
        {"at": 2, "text": "blue"},
        {"at": 10, "any_of": [" a", "e", 70]},
        {"at": 36, "token_ids": [65, 66]},
    ],
    "canvas": {"text": "The sea is salt and wide and deep and old.", "read_only": [[20, 24]]},
}


def test_what_is_given_of_an_answer_gives_the_text_that_it_gives_in_python(
    client: OpenAI, lm: LanguageModel
) -> None:
    """Through two canvases."""
    wanted = lm.chat(MESSAGES, seed=7, max_tokens=40, ignore_end=True, **GIVEN)
    assert wanted.pinned
    answer: Any = client.chat.completions.create(**CHAT, extra_body={**GIVEN, "ignore_end": True})
    assert text_of(answer) == wanted.text
    spans = answer.choices[0].dgemma["pinned"]
    assert [at for begin, end in spans for at in range(begin, end)] == list(wanted.pinned)
    asked: dict[str, Any] = {"model": "tiny", "prompt": "Why", "seed": 7, "max_tokens": 40}
    written = client.completions.create(**asked, extra_body=GIVEN).choices[0].text
    assert written == lm.generate("Why", seed=7, max_tokens=40, **GIVEN).text
    assert written != client.completions.create(**asked).choices[0].text
    chunks = client.completions.create(**asked, extra_body=GIVEN, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == written
    # vLLM's names, for a whole canvas.
    seed = list(range(64, 64 + lm.config.canvas_len))
    names = {"diffusion_seed_canvas": seed, "diffusion_pinned": [0, 5]}
    answer = client.completions.create(**asked, extra_body={"vllm_xargs": names})
    canvas = {"token_ids": seed, "read_only": [[0, 1], [5, 6]]}
    assert answer.choices[0].text == lm.generate("Why", seed=7, max_tokens=40, canvas=canvas).text


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"pins": [{"at": 40, "text": "a"}]},
            "pins",
            "position 40 is pinned; the answer has positions 0 to 39",
        ),
        ({"pins": [{"at": 0, "token_ids": [10**30]}]}, "pins", "this vocabulary ends at"),
        ({"pins": [{"at": 10**30, "token_ids": [5]}]}, "pins", "answer has positions 0 to 39"),
        ({"canvas": {"token_ids": [5] * 65}}, "canvas", "the canvases of the answer have positions 0 to 63"),
        ({"canvas": "a" * 30, "decode": "causal"}, "decode", "only a canvas can hold pins"),
    ],
)
def test_what_no_answer_can_hold_is_refused_with_its_field(
    client: OpenAI, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="Why", max_tokens=40, extra_body=fields)
    assert caught.value.param == param
    assert message in str(caught.value)


def test_a_prompt_has_the_log_probabilities_of_the_causal_pass(client: OpenAI, lm: LanguageModel) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "seed": 3, "logprobs": 2}
    alone = client.completions.create(**asked, echo=True, max_tokens=0).choices[0]
    both = client.completions.create(**asked, echo=True, max_tokens=5).choices[0]
    plain = client.completions.create(**asked, max_tokens=5).choices[0]
    streamed = client.completions.create(**asked, echo=True, max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == both.text
    assert alone.text == "Once upon a time"
    assert both.text == alone.text + plain.text
    assert alone.logprobs is not None
    assert both.logprobs is not None
    assert plain.logprobs is not None
    values = alone.logprobs.token_logprobs
    assert values is not None
    assert both.logprobs.token_logprobs == [*values, *(plain.logprobs.token_logprobs or ())]
    ids = [lm.tokenizer.bos_id or 0, *lm.tokenizer.encode("Once upon a time")]
    with torch.inference_mode():
        logits = lm.logits(lm.encode(torch.tensor([ids]), lm.new_cache(1)))[0].log_softmax(-1)
    assert values[0] is None
    truth = [float(logits[at, token]) for at, token in enumerate(ids[1:])]
    assert values[1:] == pytest.approx(truth, abs=1e-4)
    chat: Any = client.chat.completions.create(**CHAT, extra_body={"prompt_logprobs": 1})
    assert chat.prompt_logprobs[0] is None
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


# Mercury's client


def test_mercury_reads_the_same_text_whole_and_streamed(mercury: Inception, expected: Answer) -> None:
    chat = {name: value for name, value in CHAT.items() if name != "seed"}
    answer = mercury.chat.completions.create(**chat, extra_params={"seed": 7})
    assert text_of(answer) == expected.text
    assert answer.usage.completion_tokens == 40
    stream = mercury.chat.completions.create(**chat, stream=True, diffusing=True, extra_body={"seed": 7})
    choices = [chunk.choices[0] for chunk in stream if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == expected.text
    assert any("draft" in (choice.model_extra or {}) for choice in choices)


def test_mercury_offers_tools_and_effort(mercury: Inception, lm: LanguageModel) -> None:
    answer = mercury.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=40,
        tools=[WEATHER],
        reasoning_effort="instant",
        extra_params={"seed": 7},
    )
    assert text_of(answer) == lm.chat(MESSAGES, tools=[WEATHER], seed=7, max_tokens=40).text


def test_mercurys_async_client_reads_the_same(server: RealServer, expected: Answer) -> None:
    chat = {name: value for name, value in CHAT.items() if name != "seed"}

    async def ask() -> str:
        async with AsyncInception(base_url=server.address, api_key=KEY, max_retries=0) as client:
            stream = await client.chat.completions.create(**chat, stream=True, extra_body={"seed": 7})
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == expected.text


# Adapters


def test_the_models_are_the_base_and_each_adapter(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", *ADAPTERS]
    assert client.models.retrieve("sums").id == "sums"


def test_adapters_served_side_by_side_write_what_each_writes_alone(
    server: RealServer, models: dict[str, LanguageModel]
) -> None:
    """Base and adapters in the same steps of the engine: fewer than the canvases' own steps."""
    asked = [(name, seed) for seed in (7, 8, 9) for name in models]
    names = ("dgemma_engine_steps_total", "dgemma_engine_denoise_forwards_total")
    before = [server.metric(name, KEY) for name in names]

    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0) as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(**CHAT | {"model": name, "seed": seed})
                    for name, seed in asked
                )
            )
            return [text_of(answer) for answer in answers]

    found = asyncio.run(ask())
    steps, forwards = (server.metric(name, KEY) - old for name, old in zip(names, before, strict=True))
    assert found == [models[name].chat(MESSAGES, seed=seed, max_tokens=40).text for name, seed in asked]
    assert len(set(found)) == len(asked)
    assert steps < forwards == len(asked) * 2 * STEPS


# What was read before


def test_a_repeated_prompt_is_not_read_again_and_gets_the_same_answer(client: OpenAI) -> None:
    asked: dict[str, Any] = {**CHAT, "messages": [{"role": "user", "content": "Tell me a story. " * 20}]}
    first, second = (client.chat.completions.create(**asked) for _ in range(2))
    cached = []
    for answer in (first, second):
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
    assert second.usage is not None
    assert cached[0] == 0 < cached[1] < second.usage.prompt_tokens
    assert text_of(first) == text_of(second)


def test_an_adapter_never_goes_on_from_what_the_base_has_read(
    client: OpenAI, models: dict[str, LanguageModel]
) -> None:
    messages: Any = [{"role": "user", "content": "Sing me a song. " * 20}]
    for name in ("tiny", "sums"):
        answer = client.chat.completions.create(**CHAT | {"messages": messages, "model": name})
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert text_of(answer) == models[name].chat(messages, seed=7, max_tokens=40).text


# Errors


@pytest.mark.parametrize(
    ("asked", "param", "code", "words"),
    [
        ({"extra_body": {"temprature": 1}}, "temprature", "unknown_parameter", "mean 'temperature'?"),
        ({"temperature": -1}, "temperature", "invalid_value", "temperature is -1"),
        ({"max_tokens": 9000}, "max_tokens", "context_length_exceeded", "context leaves 8160"),
        ({"frequency_penalty": 1}, "frequency_penalty", "unsupported_parameter", "not supported"),
        ({"logit_bias": {"2048": 1}}, "logit_bias", "invalid_value", "token ids from 0 to 2047"),
        ({"messages": []}, "messages", "invalid_value", "messages"),
        ({"messages": [{"role": "user", "content": "x " * 9000}]}, "messages", "context_length_exceeded",
         "no room for a canvas of 32"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "messages", "invalid_value", "usr"),
        ({"tools": [{"type": "function"}]}, "tools", "invalid_value", "tool"),
        ({"n": 17}, "n", "invalid_value", "at most 16"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_the_clients_error_with_its_field(
    client: OpenAI, asked: dict[str, Any], param: str, code: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**CHAT, **asked})
    assert (caught.value.param, caught.value.code) == (param, code)
    assert words in caught.value.message


def test_an_unknown_model_and_a_wrong_key_are_errors_of_their_own_kind(
    client: OpenAI, server: RealServer
) -> None:
    with pytest.raises(openai.NotFoundError, match="did you mean 'sums'") as caught:
        client.chat.completions.create(**CHAT | {"model": "sum"})
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    for key in ("another", KEY + "x", KEY[:-1]):
        with OpenAI(base_url=f"{server.address}/v1", api_key=key, max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                stranger.chat.completions.create(**CHAT)
            with pytest.raises(openai.AuthenticationError):
                stranger.models.list()


# Time


def test_a_deadline_ends_an_answer_with_what_there_is(client: OpenAI) -> None:
    answer = client.chat.completions.create(**CHAT | {"max_tokens": 4000}, extra_body={"deadline_s": 0.3})
    assert answer.choices[0].finish_reason == "length"
    assert (answer.choices[0].model_extra or {})["dgemma"]["finish_reason"] == "deadline"
    assert text_of(answer)


def test_a_client_that_gives_up_waiting_is_not_answered_any_further(
    client: OpenAI, server: RealServer
) -> None:
    def left() -> list[str]:
        return [entry["path"] for entry in server.log() if entry.get("status") == 499]

    before = len(left())
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(**CHAT | {"max_tokens": 4000}, timeout=0.3)
    eventually(lambda: len(left()) > before)
    assert left()[-1] == "/v1/chat/completions"
    eventually(lambda: server.metric("dgemma_slots_in_use", KEY) == 0)
