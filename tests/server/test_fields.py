"""No field is silently ignored: it is honoured, known to be neutral, or refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dgemma.server.app import ENDPOINTS
from dgemma.server.chat.protocol import UNSUPPORTED_IN_CHAT
from dgemma.server.completions.protocol import UNSUPPORTED_IN_COMPLETIONS
from dgemma.server.http.openapi import request_models
from dgemma.server.validation import NEUTRAL
from server.fake_engine import FakeEngine
from server.served import CHAT, COMPLETIONS, HELLO, ONCE, WEATHER, app_of, error_of, post

APP = app_of()


def refusal(body: dict[str, Any], path: str = CHAT, status: int = 400) -> dict[str, Any]:
    response = post(APP, path, {**(HELLO if path == CHAT else ONCE), **body})
    assert response.status_code == status, response.text
    return error_of(response)


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("max_denoising_step", "max_denoising_steps"),
        ("frequency_penalti", "frequency_penalty"),
        ("diffusion", "diffusing"),
    ],
)
def test_a_misspelt_field_is_refused_with_a_guess(field: str, meant: str) -> None:
    error = refusal({field: 1})
    assert error["param"] == field
    assert error["code"] == "unknown_parameter"
    assert f"did you mean {meant!r}?" in error["message"]


def test_a_misspelt_field_of_an_inner_object_is_refused_with_its_path() -> None:
    error = refusal({"stream": True, "stream_options": {"include_usge": True}})
    assert error["param"] == "stream_options.include_usge"
    assert "did you mean 'include_usage'?" in error["message"]
    error = refusal({"chat_template_kwargs": {"thinking": True}})
    assert error["param"] == "chat_template_kwargs.thinking"
    error = refusal({"tools": [{"type": "function", "function": {"name": "f", "parameter": {}}}]})
    assert error["param"] == "tools.0.function.parameter"
    assert "did you mean 'parameters'?" in error["message"]
    error = refusal({"tools": [{"type": "function", "function": {"name": "f"}, "strict": True}]})
    assert error["param"] == "tools.0.strict"


def test_a_name_that_is_near_to_nothing_gets_no_guess() -> None:
    assert refusal({"zzzzzzzz": 1})["message"] == "unknown field 'zzzzzzzz'."
    assert "did you mean" not in refusal({"x" * 200: 1})["message"]


@pytest.mark.parametrize("field", UNSUPPORTED_IN_CHAT)
def test_what_chat_cannot_honour_is_refused_by_name(field: str) -> None:
    error = refusal({field: {"type": "json_object"}})
    assert error["param"] == field
    assert error["code"] == "unsupported_parameter"
    assert "not supported" in error["message"]


@pytest.mark.parametrize("field", UNSUPPORTED_IN_COMPLETIONS)
def test_what_completions_cannot_honour_is_refused_by_name(field: str) -> None:
    error = refusal({field: 3}, COMPLETIONS)
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


def test_the_usual_value_of_an_unsupported_field_is_accepted() -> None:
    usual = {name: rule.usual[0] for name, rule in UNSUPPORTED_IN_CHAT.items() if rule.usual}
    assert post(APP, CHAT, {**HELLO, **usual}).status_code == 200
    assert post(APP, CHAT, {**HELLO, **dict.fromkeys(UNSUPPORTED_IN_CHAT)}).status_code == 200, "null"
    usual = {name: rule.usual[0] for name, rule in UNSUPPORTED_IN_COMPLETIONS.items() if rule.usual}
    assert post(APP, COMPLETIONS, {**ONCE, **usual}).status_code == 200
    assert refusal({"frequency_penalty": False})["param"] == "frequency_penalty", "false is not 0"


def test_what_sglangs_router_adds_to_a_request_is_accepted() -> None:
    added = {"no_stop_trim": False, "ignore_eos": False, "return_hidden_states": False}
    added["skip_special_tokens"] = True
    to_chats = {"continue_final_message": False, "separate_reasoning": True, "stream_reasoning": True}
    assert post(APP, COMPLETIONS, {**ONCE, **added, "echo": False, "stream": False}).status_code == 200
    assert post(APP, CHAT, {**HELLO, **added, **to_chats, "logprobs": False}).status_code == 200
    assert refusal({"ignore_eos": True})["param"] == "ignore_eos"


def test_neutral_fields_change_nothing_of_the_answer() -> None:
    neutral = {"user": "u", "metadata": {"k": "v"}, "safety_identifier": "s", "prompt_cache_key": "p"}
    assert neutral.keys() == set(NEUTRAL)
    plain, marked = (post(APP, CHAT, {**HELLO, **more}).json() for more in ({}, neutral))
    assert plain["choices"] == marked["choices"]
    assert refusal({"metadata": {"k": 1}})["param"] == "metadata.k"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"model": 3}, "model", "model is 3; it should be a valid string."),
        ({"messages": "hello"}, "messages", "messages is 'hello'; it should be a valid list."),
        ({"messages": []}, "messages", "messages is a list; it"),
        ({"messages": [3]}, "messages.0", "messages.0 is 3; it"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "messages", "message 1 has role 'usr'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0",
            "text only",
        ),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; it should be greater than or equal to 1."),
        ({"max_tokens": 2.5}, "max_tokens", "max_tokens is 2.5"),
        ({"max_tokens": "7"}, "max_tokens", "max_tokens is '7'; it should be a valid integer."),
        ({"max_tokens": True}, "max_tokens", "max_tokens is True"),
        ({"max_tokens": 5000}, "max_tokens", "max_tokens is 5000; this model's context leaves 4080."),
        (
            {"max_completion_tokens": 5000, "max_tokens": 6000},
            "max_completion_tokens",
            "max_completion_tokens is 5000",
        ),
        ({"temperature": -1}, "temperature", "temperature is -1; it should be greater than or equal to 0."),
        ({"temperature": 1 << 1023}, "temperature", "temperature is a huge number"),
        ({"seed": 1 << 64}, "seed", "seed is 18446744073709551616"),
        ({"seed": (1 << 64) - 1, "n": 2}, "seed", "that of the last answer would pass"),
        ({"n": 17}, "n", "n asks for 17 answers; this server writes at most 16"),
        ({"top_p": 0}, "top_p", "top_p is 0; it should be greater than 0."),
        ({"top_k": -1}, "top_k", "top_k is -1"),
        ({"t_min": 0.9}, "t_min", "t_min is 0.9, t_max is 0.8"),
        ({"stop": 3}, "stop", "stop is 3; it must be a string or a list of strings."),
        ({"stop": [""]}, "stop", "stop has a string of 0 characters"),
        ({"preset": "fats"}, "preset", "preset is 'fats'; did you mean 'fast'?"),
        ({"decode": "difuse"}, "decode", "decode is 'difuse'; did you mean 'diffuse'?"),
        ({"acceptance": "all"}, "acceptance", "acceptance is 'all'"),
        ({"deadline_s": 601}, "deadline_s", "this server ends answers after 600 seconds."),
        ({"end_tokens": [261]}, "end_tokens", "end_tokens holds 261; this vocabulary ends at 260."),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias has the key 'x'"),
        ({"logit_bias": {"007": 1}}, "logit_bias", "logit_bias has the key '007'"),
        ({"logit_bias": {"261": 1}}, "logit_bias", "logit_bias has the key '261'"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "logit_bias.5 is 101"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "logit_bias is an object; it"),
        ({"diffusing": True}, "diffusing", "diffusing is for streams"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream_options is for streams"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "include_obfuscation is True",
        ),
        ({"logprobs": 3}, "logprobs", "logprobs is 3; it should be a valid boolean."),
        ({"top_logprobs": 3}, "top_logprobs", "top_logprobs is given without logprobs"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools; give tools."),
        (
            {"tool_choice": {"type": "function", "function": {"name": "wether"}}, "tools": [WEATHER]},
            "tool_choice",
            "names the function 'wether', which is not among tools; did you mean 'weather'?",
        ),
        ({"tool_choice": {"type": "function"}, "tools": [WEATHER]}, "tool_choice", "is an object; give"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "is 'allowed_tools', which is not"),
        ({"tool_choice": 3}, "tool_choice", "tool_choice is 3; give 'auto'"),
        ({"tool_choice": "atuo"}, "tool_choice", "tool_choice is 'atuo'"),
        ({"tools": [WEATHER], "parallel_tool_calls": 0}, "parallel_tool_calls", "valid boolean"),
        ({"tools": [{"type": "custom"}]}, "tools", "tool 1 is not of the form"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
            "tools.0.function.strict",
            "give true or false",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": 3}}]},
            "tools.0.function.description",
            "description is 3; give a text.",
        ),
        ({"reasoning_effort": "hihg"}, "reasoning_effort", "did you mean 'high'?"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "reasoning_effort",
            "give one of them",
        ),
        ({"extra_body": 3}, "extra_body", "extra_body is 3; it must be an object"),
        ({"extra_body": {"seed": 3}}, "seed", "seed is given in the body and in extra_body"),
        ({"extra_body": {"sede": 3}}, "sede", "did you mean 'seed'?"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused_by_name(body: dict[str, Any], param: str, message: str) -> None:
    error = refusal(body)
    assert error["param"] == param
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": None}, "prompt", "prompt is missing; give it."),
        ({"prompt": []}, "prompt", "prompt is an empty list"),
        ({"prompt": [1, "a"]}, "prompt", "give a text, token ids, or a list of either."),
        ({"prompt": [[]]}, "prompt", "prompt is a list"),
        ({"prompt": [True]}, "prompt", "prompt is a list"),
        ({"prompt": 3}, "prompt", "prompt is 3"),
        ({"prompt": [5, 261]}, "prompt", "prompt holds token 261; this vocabulary ends at 260."),
        ({"prompt": [-1]}, "prompt", "prompt holds token -1"),
        ({"prompt": ["a"] * 9, "n": 2}, "prompt", "prompt asks for 18 answers"),
        ({"prompt": "x" * 4095}, "prompt", "then has no room for a canvas of 16. Shorten the prompt."),
        ({"logprobs": 21}, "logprobs", "logprobs is 21"),
        ({"max_completion_tokens": 3}, "max_completion_tokens", "did you mean 'max_tokens'?"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_wrong_value_of_a_completion_is_refused_by_name(
    body: dict[str, Any], param: str, message: str
) -> None:
    error = refusal(body, COMPLETIONS)
    assert error["param"] == param
    assert message in error["message"]


def test_what_is_too_long_for_the_model_has_a_code_of_its_own() -> None:
    assert refusal({"max_tokens": 5000})["code"] == "context_length_exceeded"
    error = error_of(post(app_of(max_prompt_tokens=4), COMPLETIONS, ONCE))
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == "prompt has 5 tokens; this server takes at most 4. Shorten the prompt."


@pytest.mark.parametrize("field", ["model", "messages"])
def test_a_missing_field_is_named(field: str) -> None:
    body = {name: value for name, value in HELLO.items() if name != field}
    error = error_of(post(APP, CHAT, body))
    assert (error["param"], error["code"]) == (field, "missing_required_parameter")


def test_an_unknown_model_is_not_found_and_a_near_one_is_suggested() -> None:
    error = refusal({"model": "dgema"}, status=404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "did you mean 'dgemma'?" in error["message"]


@pytest.mark.parametrize("value", [{}, [], "short", 0, -1, True, 1.5])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO),
        (COMPLETIONS, ONCE),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        ("/v1/responses", {"model": "dgemma", "input": "Hi"}),
        (
            "/v1/messages",
            {"model": "dgemma", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]},
        ),
    ],
)
def test_a_canvas_without_a_length_is_refused_by_name(path: str, body: dict[str, Any], value: Any) -> None:
    response = post(app_of(), path, {**body, "canvas_len": value})
    assert response.status_code == 400
    assert 'it must be a whole number of at least 1, or "auto".' in response.text.replace('\\"', '"')


def test_fields_that_are_honoured_reach_the_engine() -> None:
    engine = FakeEngine(adapters=("sums",))
    options: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_denoising_steps": 9, "t_min": 0.3, "t_max": 0.7,
        "acceptance": "confidence", "entropy_bound": 0.2, "min_confidence": 0.8, "accept_per_step": 4,
        "stability_threshold": 2, "confidence_threshold": 0.01, "decode": "causal", "ignore_end": True,
        "deadline_s": 5, "stop": "X", "canvas_len": 3,
    }  # fmt: skip
    body = {**HELLO, **options, "model": "sums", "max_tokens": 9, "max_completion_tokens": 8, "n": 2}
    body |= {"logit_bias": {"9": -100, "5": 1.5}, "end_tokens": [1, 2]}
    assert post(app_of(engine), CHAT, body).status_code == 200
    first, second = engine.requests
    assert (first.seed, second.seed) == (7, 8)
    assert first.id != second.id
    assert first.adapter == "sums"
    assert first.logit_bias == ((5, 1.5), (9, -100.0))
    params = first.params
    assert params == second.params
    assert params.max_tokens == 8, "both are upper bounds"
    assert params.seed is None, "the request's own seed counts"
    assert params.stop == ("X",)
    assert params.end_tokens == (1, 2)
    for name, value in options.items():
        if name != "stop":
            assert getattr(params, name) == value, name


def test_without_options_the_checkpoints_defaults_hold_and_the_server_sets_the_deadline() -> None:
    engine = FakeEngine()
    post(app_of(engine, request_timeout_s=77), CHAT, {**HELLO, "preset": "fast", "seed": None})
    request = engine.requests[0]
    assert request.params.end_tokens == engine.model.defaults.end_tokens
    assert request.params.deadline_s == 77
    assert request.params.max_denoising_steps == 24, "of the preset"
    assert 0 <= request.seed < 1 << 32
    assert request.adapter is None
    assert not request.drafts


def test_extra_params_of_mercurys_client_are_fields_like_others() -> None:
    engine = FakeEngine()
    body = {**HELLO, "extra_body": {"top_k": 5, "preset": None}}
    assert post(app_of(engine), CHAT, body).status_code == 200
    assert engine.requests[0].params.top_k == 5


def test_the_documented_table_names_every_field() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = "".join((docs / name).read_text() for name in ("server.md", "agents.md"))
    for kind, unsupported in request_models(ENDPOINTS).items():
        for name in (*kind.model_fields, *unsupported, "extra_body"):
            assert f"`{name}`" in page, name
