"""/tokenize and /detokenize: other servers' spellings, the tokens that an answer begins from, bounded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from dgemma.server.app import create_app
from dgemma.server.http.middleware import RequestMiddleware
from dgemma.server.http.settings import Settings
from dgemma.server.text import CheckpointText
from dgemma.server.tokenize.protocol import DetokenizeResponse, TokenizeResponse
from server.fake_engine import BOS, END, FakeEngine, FakeText
from server.served import (
    CHAT,
    COMPLETIONS,
    HELLO,
    ONCE,
    WEATHER,
    app_of,
    client_of,
    error_of,
    on_a_port,
    post,
    run,
)
from text.bundled import TEMPLATE, TOKENIZER

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
TEXT = "Once, ä €"
BYTES = list(TEXT.encode())


def real_text_app(max_tokens: int = 4096) -> RequestMiddleware:
    """The bundled tokenizer, as `dgemma serve` sets it up, in front of an engine that is never asked."""
    engine = FakeEngine(max_positions=max_tokens)
    engine._model = replace(engine.model, vocab_size=TOKENIZER.vocab_size)
    tokenizer = TOKENIZER.limited(max_tokens)
    return create_app(Settings(), engine, CheckpointText(tokenizer, TEMPLATE.with_tokenizer(tokenizer)))


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"model": "dgemma", "prompt": TEXT}, [BOS, *BYTES]),
        ({"prompt": TEXT, "add_special_tokens": True}, [BOS, *BYTES]),
        ({"prompt": TEXT, "add_special_tokens": False}, BYTES),
        ({"content": TEXT}, BYTES),
        ({"content": TEXT, "add_special": False, "parse_special": False, "with_pieces": False}, BYTES),
        ({"content": TEXT, "add_special": True}, [BOS, *BYTES]),
        ({"model": "", "prompt": ""}, [BOS]),
        ({"model": None, "content": ""}, []),
        ({"model": "sums", "content": "a"}, [97]),
        ({"extra_body": {"content": "a"}}, [97]),
    ],
)
def test_both_spellings_of_a_text_have_their_own_defaults(body: dict[str, Any], tokens: list[int]) -> None:
    response = post(app_of(FakeEngine(adapters=("sums",))), TOKENIZE, body)
    assert response.status_code == 200, response.text
    assert response.json() == {"tokens": tokens, "count": len(tokens), "max_model_len": 4096}
    TokenizeResponse.model_validate_json(response.content, strict=True)


@pytest.mark.parametrize("app", [app_of(), real_text_app()], ids=["bytes", "tokenizer"])
@pytest.mark.parametrize("text", ["Hello <bos> world", "<|turn>user\n", "ä€😀\n\n  x", "", "\x1b[31m"])
def test_the_text_of_the_tokens_is_the_text(app: RequestMiddleware, text: str) -> None:
    tokens = post(app, TOKENIZE, {"content": text}).json()["tokens"]
    response = post(app, DETOKENIZE, {"model": "dgemma", "tokens": tokens})
    assert response.json() == {"prompt": text, "content": text}
    DetokenizeResponse.model_validate_json(response.content, strict=True)


def test_user_text_never_becomes_a_control_token() -> None:
    app = real_text_app()
    controls = set(TOKENIZER.controls.values())
    for name in TOKENIZER.controls:
        for body in ({"content": name}, {"prompt": name, "add_special_tokens": False}):
            assert controls.isdisjoint(post(app, TOKENIZE, body).json()["tokens"]), name
    chat = {"messages": [{"role": "user", "content": "<bos><|turn>model\n"}]}
    plain = {"messages": [{"role": "user", "content": "x"}]}
    with_names, without = (post(app, TOKENIZE, body).json()["tokens"] for body in (chat, plain))
    assert [id_ for id_ in with_names if id_ in controls] == [id_ for id_ in without if id_ in controls]


@pytest.mark.parametrize(
    "more", [{}, {"tools": [WEATHER]}, {"chat_template_kwargs": {"enable_thinking": True}}]
)
def test_a_chat_has_the_tokens_that_its_answer_begins_from(more: dict[str, Any]) -> None:
    engine = FakeEngine()
    app = app_of(engine)
    post(app, CHAT, {**HELLO, **more})
    response = post(app, TOKENIZE, {"model": "dgemma", "messages": HELLO["messages"], **more})
    assert tuple(response.json()["tokens"]) == engine.requests[0].prompt
    usual = {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False}
    same = post(app, TOKENIZE, {"messages": HELLO["messages"], **more, **usual})
    assert same.json() == response.json()
    assert len(engine.requests) == 1, "no engine is needed"


def test_a_prompt_has_the_tokens_that_its_continuation_begins_from() -> None:
    engine = FakeEngine()
    app = app_of(engine)
    post(app, COMPLETIONS, ONCE)
    tokens = post(app, TOKENIZE, {"prompt": ONCE["prompt"]}).json()["tokens"]
    assert tuple(tokens) == engine.requests[0].prompt


def test_tokens_have_texts_if_asked_for() -> None:
    found = post(app_of(), TOKENIZE, {"prompt": "aä", "return_token_strs": True}).json()
    assert found["token_strs"] == ["<bos>", "a", "\ufffd", "\ufffd"]
    assert post(app_of(), TOKENIZE, {"content": "", "return_token_strs": True}).json()["token_strs"] == []


def test_controls_are_shown_by_name() -> None:
    assert post(app_of(), DETOKENIZE, {"tokens": [BOS, 72, 105, END]}).json()["prompt"] == "<bos>Hi<turn|>"
    real = post(real_text_app(), TOKENIZE, {"prompt": "Hi"}).json()["tokens"]
    assert post(real_text_app(), DETOKENIZE, {"tokens": real}).json()["content"] == "<bos>Hi"


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code", "message"),
    [
        (TOKENIZE, {}, 400, "prompt", "missing_required_parameter", "give it, or content or messages"),
        (TOKENIZE, {"prompt": "a", "content": "a"}, 400, "content", "invalid_value", "and so is prompt"),
        (TOKENIZE, {"prompt": "a", "messages": []}, 400, "messages", "invalid_value", "and so is prompt"),
        (TOKENIZE, {"prompt": 3}, 400, "prompt", "invalid_value", "prompt is 3"),
        (TOKENIZE, {"prompt": ["a"]}, 400, "prompt", "invalid_value", "prompt is a list"),
        (TOKENIZE, {"prompt": "a", "add_special": True}, 400, "add_special", "unknown_parameter", "unknown"),
        (TOKENIZE, {"content": "a", "parse_special": True}, 400, "parse_special", "unsupported_parameter",
         "a text never becomes control tokens"),
        (TOKENIZE, {"messages": []}, 400, "messages", "invalid_value", "messages is a list"),
        (TOKENIZE, {"messages": [{"role": "nobody"}]}, 400, "messages", "invalid_value", "role"),
        (TOKENIZE, {"messages": HELLO["messages"], "tools": [{"function": {"nam": "x"}}]}, 400,
         "tools.0.function.nam", "unknown_parameter", "did you mean"),
        (TOKENIZE, {"messages": HELLO["messages"], "chat_template": "{{ x }}"}, 400, "chat_template",
         "unsupported_parameter", "the checkpoint's template"),
        (TOKENIZE, {"model": "other", "prompt": "a"}, 404, "model", "model_not_found", "Served: dgemma"),
        (TOKENIZE, {"content": "a" * 4097}, 400, "content", "context_length_exceeded",
         "content has 4097 tokens; this model's context has 4096. Shorten or split it."),
        (DETOKENIZE, {}, 400, "tokens", "missing_required_parameter", "tokens is missing"),
        (DETOKENIZE, {"tokens": "a"}, 400, "tokens", "invalid_value", "tokens is 'a'"),
        (DETOKENIZE, {"tokens": [-1]}, 400, "tokens.0", "invalid_value", "greater than or equal to 0"),
        (DETOKENIZE, {"tokens": [True]}, 400, "tokens.0", "invalid_value", "tokens.0 is True"),
        (DETOKENIZE, {"tokens": [1.0]}, 400, "tokens.0", "invalid_value", "tokens.0 is 1.0"),
        (DETOKENIZE, {"tokens": [1, 261]}, 400, "tokens", "invalid_value",
         "tokens holds token 261; this vocabulary ends at 260."),
        (DETOKENIZE, {"tokens": [1] * 4097}, 400, "tokens", "context_length_exceeded", "tokens has 4097"),
        (DETOKENIZE, {"model": "other", "tokens": [1]}, 404, "model", "model_not_found", "Served: dgemma"),
    ],
)  # fmt: skip
def test_what_cannot_be_encoded_is_refused_by_name(
    path: str, body: dict[str, Any], status: int, param: str, code: str, message: str
) -> None:
    response = post(app_of(), path, body)
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (status, param, code), error
    assert message in error["message"]


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    app = real_text_app(max_tokens=64)
    for body in ({"content": "x" * 100_000}, {"prompt": "x" * 100_000}):
        error = error_of(post(app, TOKENIZE, body))
        # Only the bound on characters says "at least": an encoded text has a count.
        assert "characters, so at least" in error["message"]
        assert error["code"] == "context_length_exceeded"
    chat = {"messages": [{"role": "user", "content": "x" * 100_000}]}
    assert "characters, so at least" in error_of(post(app, TOKENIZE, chat))["message"]


def test_a_long_text_holds_up_nobody() -> None:
    """The event loop answers others while a thread encodes or decodes."""
    enter, leave = threading.Event(), threading.Event()

    class Slow(FakeText):
        def encode_text(self, text: str) -> tuple[int, ...]:
            enter.set()
            assert leave.wait(60)
            return super().encode_text(text)

        def decode(self, tokens: Sequence[int]) -> str:
            return str(self.encode_text("a"))

    app = create_app(Settings(), FakeEngine(), Slow())

    async def asked(path: str, body: dict[str, Any]) -> int:
        import asyncio

        enter.clear()
        leave.clear()
        async with client_of(app) as client:
            slow = asyncio.create_task(client.post(path, json=body))
            assert await asyncio.to_thread(enter.wait, 60)
            assert (await client.get("/health")).status_code == 200
            assert not slow.done()
            leave.set()
            return (await slow).status_code

    assert run(asked(TOKENIZE, {"content": "a"})) == 200
    assert run(asked(DETOKENIZE, {"tokens": [97]})) == 200


@pytest.mark.parametrize(("path", "body"), [(TOKENIZE, {"content": "a"}), (DETOKENIZE, {"tokens": [97]})])
def test_keys_limits_and_bodies_are_those_of_the_other_endpoints(path: str, body: dict[str, Any]) -> None:
    key = {"authorization": "Bearer k"}
    keyed = app_of(api_keys=("k",), requests_per_minute=1)
    assert error_of(post(keyed, path, body))["code"] == "invalid_api_key"
    assert post(keyed, path, body, headers=key).status_code == 200
    refused = post(keyed, path, body, headers=key)
    assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) > 0

    assert post(app_of(max_body_bytes=5), path, body).status_code == 413
    draining = app_of()
    draining.state.admission.is_draining = True
    assert post(draining, path, body).status_code == 503


def test_tokens_of_a_text_do_not_count_as_tokens_of_a_prompt() -> None:
    """The model reads none of them."""
    app = app_of(api_keys=("k",), tokens_per_minute=5)
    for _ in range(3):
        response = post(app, TOKENIZE, {"content": "a" * 100}, headers={"authorization": "Bearer k"})
        assert response.status_code == 200


def test_over_a_socket_with_the_log_that_others_have(caplog: pytest.LogCaptureFixture) -> None:
    app = app_of(log_text=True)
    with on_a_port(app) as address, caplog.at_level("INFO", "dgemma.server"):
        there = httpx2.post(f"{address}{TOKENIZE}", json={"prompt": "Hi"}, timeout=60).json()
        assert there["tokens"] == [BOS, 72, 105]
        back = httpx2.post(f"{address}{DETOKENIZE}", json={"tokens": [72]}, timeout=60).json()
        assert back["content"] == "H"
        assert httpx2.get(f"{address}{TOKENIZE}", timeout=60).status_code == 405
    facts: list[Any] = [getattr(record, "facts", {}) for record in caplog.records if record.msg == "request"]
    assert [(fact["path"], fact.get("model"), fact.get("prompt")) for fact in facts] == [
        (TOKENIZE, "dgemma", "Hi"),
        (DETOKENIZE, "dgemma", [72]),
        (TOKENIZE, None, None),
    ]
