"""What a server does where a request says nothing: --default."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgemma.errors import InputError
from dgemma.params import PRESETS, GenerationParams
from dgemma.server.app import create_app
from dgemma.server.defaults import NAMES, SAMPLING, read_defaults
from dgemma.server.http.settings import Default, Settings
from dgemma.server.run import check_files
from server.fake_engine import THINK, FakeEngine, FakeText
from server.served import CHAT, COMPLETIONS, HELLO, ONCE, app_of, ask, post
from server.test_settings import settings_from


def defaults(*given: str) -> tuple[Default, ...]:
    return tuple(map(Default.parse, given))


def params_of(given: tuple[Default, ...], path: str = COMPLETIONS, **fields: Any) -> GenerationParams:
    engine = FakeEngine()
    body = {**(ONCE if path == COMPLETIONS else HELLO), **fields}
    response = post(app_of(engine, defaults=given), path, body)
    assert response.status_code == 200, response.text
    return engine.requests[0].params


def is_thought_of(given: tuple[Default, ...], path: str = CHAT, **fields: Any) -> bool:
    engine = FakeEngine()
    body = {**HELLO, **fields} if path == CHAT else {"model": "dgemma", **fields}
    response = post(app_of(engine, defaults=given), path, body)
    assert response.status_code == 200, response.text
    return THINK in engine.requests[0].prompt


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_a_request_does_not_say_is_the_servers_default_and_its_own_values_win(path: str) -> None:
    given = defaults("temperature=0.7", "max_denoising_steps=9", "acceptance=fixed")
    found = params_of(given, path)
    assert (found.temperature, found.max_denoising_steps, found.acceptance) == (0.7, 9, "fixed")
    assert found.entropy_bound == GenerationParams().entropy_bound
    own = params_of(given, path, temperature=0, max_denoising_steps=48)
    assert (own.temperature, own.max_denoising_steps, own.acceptance) == (0, 48, "fixed")


def test_a_preset_of_the_request_is_as_if_there_were_no_default() -> None:
    given = defaults("preset=fast", "temperature=0.7", "confidence_threshold=0.5")
    fast = params_of(given)
    assert fast.max_denoising_steps == PRESETS["fast"]["max_denoising_steps"]
    assert fast.confidence_threshold == 0.5
    balanced = params_of(given, preset="balanced")
    assert balanced.temperature == 0.7
    for name in {name for preset in PRESETS.values() for name in preset}:
        assert getattr(balanced, name) == getattr(GenerationParams(), name)
    assert params_of(given, preset="thorough").max_denoising_steps == 96


def test_pins_have_a_canvas_whatever_the_default() -> None:
    given = defaults("decode=causal")
    assert params_of(given).decode == "causal"
    assert params_of(given, pins=[{"at": 0, "token_ids": [65]}], max_tokens=4).decode == "diffuse"
    # A causal token is sampled, so it is looked for in a longer list.
    assert params_of(given, logprobs=1).logprobs == 20
    assert params_of((), logprobs=1).logprobs == 1


def test_thinking_is_on_unless_the_request_says_otherwise() -> None:
    on = defaults("thinking=true")
    assert is_thought_of(on)
    assert not is_thought_of(())
    assert not is_thought_of(defaults("thinking=false"))
    assert not is_thought_of(on, reasoning_effort="none")
    assert not is_thought_of(on, chat_template_kwargs={"enable_thinking": False})
    assert is_thought_of((), reasoning_effort="low")


def test_thinking_is_the_same_on_every_endpoint_of_chats() -> None:
    on, messages = defaults("thinking=true"), HELLO["messages"]
    assert is_thought_of(on, "/v1/responses", input="Hello")
    assert not is_thought_of(on, "/v1/responses", input="Hello", reasoning={"effort": "none"})
    said: dict[str, Any] = {"messages": messages, "max_tokens": 8}
    assert is_thought_of(on, "/v1/messages", **said)
    assert not is_thought_of(on, "/v1/messages", **said, thinking={"type": "disabled"})
    for given in (on, ()):
        reply = post(app_of(defaults=given), "/tokenize", {"messages": messages})
        assert (THINK in reply.json()["tokens"]) == bool(given)


def test_the_models_tell_them() -> None:
    app = app_of(defaults=defaults("temperature=0.5", "thinking=true"))
    (model,) = ask(app, "GET", "/v1/models").json()["data"]
    found = model["default_parameters"]
    assert (found["temperature"], found["thinking"], found["max_denoising_steps"]) == (0.5, True, 48)
    assert set(found) == set(NAMES) - {"preset"}


def test_flags_and_variable_are_read() -> None:
    found = settings_from("--default", "temperature=0.5", "--default", "preset=fast").defaults
    assert found == (Default(name="temperature", value=0.5), Default(name="preset", value="fast"))
    found = settings_from(DGEMMA_DEFAULT="temperature=0.5,thinking=true").defaults
    assert found == (Default(name="temperature", value=0.5), Default(name="thinking", value=True))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["temperature=hot"], "--default temperature is 'hot'; it should be a valid number."),
        (["temperature=-1"], "--default temperature is -1; it should be greater than or equal to 0."),
        (["temperature=NaN"], "--default temperature is nan"),
        (["temprature=1"], "did you mean 'temperature'?"),
        (["max_tokens=5"], "--default 'max_tokens' has no default of its own. Names: temperature, "),
        (["preset=fastest"], "--default preset is 'fastest'"),
        (["thinking=yes"], "--default thinking is 'yes'; give true or false."),
        (["t_min=3", "t_max=1"], "--default t_min is 3"),
        (["top_k=3", "top_k=4"], "--default top_k is given twice; give one value."),
        (["top_k=null"], "--default top_k is null; give a value."),
    ],
)
def test_a_wrong_default_is_refused_before_a_model_is_loaded(given: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_files(Settings(defaults=defaults(*given)))
    assert message in str(caught.value)


def test_a_calibration_that_cannot_be_read_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read as a calibration"):
        check_files(Settings(calibration=tmp_path / "missing.json"))


@pytest.mark.parametrize("text", ["temperature", "=1", "temperature="])
def test_a_default_is_a_name_and_a_value(text: str) -> None:
    with pytest.raises(InputError, match="give it as name=value"):
        Default.parse(text)


def test_what_does_not_go_with_the_checkpoint_ends_the_start() -> None:
    engine = FakeEngine()
    engine._model = replace(engine.model, defaults=GenerationParams(t_min=0.1, t_max=0.2))
    given = defaults("t_min=0.3")
    check_files(Settings(defaults=given))
    with pytest.raises(InputError, match=r"t_min is 0\.3, t_max is 0\.2"):
        create_app(Settings(defaults=given), engine, FakeText())


def test_a_model_that_cannot_think_ends_the_start() -> None:
    class Thoughtless(FakeText):
        def render_chat(self, *arguments: Any, **options: Any) -> tuple[int, ...]:
            raise InputError("this chat template has no thinking.", field="enable_thinking")

    given = defaults("thinking=true")
    with pytest.raises(InputError, match="--default thinking: this chat template has no thinking"):
        create_app(Settings(defaults=given), FakeEngine(), Thoughtless())


def test_every_name_is_an_option() -> None:
    assert set(SAMPLING) - {"preset"} <= vars(GenerationParams()).keys()
    assert read_defaults(()).sampling == {}
