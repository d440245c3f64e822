"""What of an answer is given over HTTP: pins, a starting canvas, and vLLM's names."""

from __future__ import annotations

from typing import Any

import pytest

from dgemma.engine.request import PinnedTokens
from server.fake_engine import CANVAS_LEN, FakeEngine
from server.served import CHAT, COMPLETIONS, HELLO, ONCE, app_of, post

BODIES = {CHAT: HELLO, COMPLETIONS: ONCE}


def asked(path: str = COMPLETIONS, **fields: Any) -> PinnedTokens | None:
    """What the engine is asked to pin."""
    engine = FakeEngine()
    response = post(app_of(engine), path, {**BODIES[path], "max_tokens": 8, **fields})
    assert response.status_code == 200, response.text
    (request,) = engine.requests
    return request.pinned


def refusal(path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    response = post(app_of(FakeEngine()), path, {**BODIES[path], **fields})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("path", BODIES)
def test_pins_and_canvas_reach_the_engine(path: str) -> None:
    pinned = asked(
        path,
        pins=[{"at": 4, "text": "ab"}, {"at": 7, "any_of": ["x", 121]}],
        canvas={"text": "Äbc", "read_only": [[0, 1]]},
    )
    assert pinned == PinnedTokens(
        fixed={0: 0xC3, 1: 0x84, 4: 97, 5: 98}, among={7: (120, 121)}, begin={0: 0xC3, 1: 0x84, 2: 98, 3: 99}
    )


def test_each_answer_of_each_prompt_has_the_same_pins() -> None:
    engine = FakeEngine()
    post(
        app_of(engine), COMPLETIONS, {**ONCE, "prompt": ["a", "b"], "n": 2, "pins": [{"at": 0, "text": "x"}]}
    )
    assert [request.pinned for request in engine.requests] == [PinnedTokens(fixed={0: 120})] * 4


def test_nothing_given_is_nothing_pinned() -> None:
    for fields in ({}, {"pins": []}, {"vllm_xargs": {}}, {"pins": None, "canvas": None}):
        assert asked(**fields) is None


def test_vllms_canvas_is_a_whole_one_and_its_positions_stay() -> None:
    seed = list(range(CANVAS_LEN))
    pinned = asked(vllm_xargs={"diffusion_seed_canvas": seed, "diffusion_pinned": [3, 1, 3]})
    assert pinned == PinnedTokens(fixed={1: 1, 3: 3}, begin=dict(enumerate(seed)))
    assert pinned == asked(canvas={"token_ids": seed, "read_only": [[1, 2], [3, 4]]})
    assert asked(vllm_xargs={"diffusion_seed_canvas": seed}) == PinnedTokens(begin=dict(enumerate(seed)))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("diffusion_max_steps", "Give max_denoising_steps."),
        ("diffusion_read_only", "/v1/decisions reads probabilities after one step."),
        ("diffusion_canvas_length", "Give canvas_len."),
        ("diffusion_constrained", "Give regex, choice or json_schema."),
        ("diffusion_pined", "did you mean 'diffusion_pinned'?"),
    ],
)
def test_vllms_other_names_are_refused_with_what_is_here(name: str, remedy: str) -> None:
    error = refusal(vllm_xargs={name: 1})
    assert (error["param"], error["code"]) == ("vllm_xargs", "unsupported_parameter")
    assert error["message"].startswith(f"vllm_xargs.{name} is not supported: ")
    assert remedy.rstrip(".") in error["message"]


WHOLE = list(range(CANVAS_LEN))


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"pins": {"at": 0}}, "pins", "pins is an object; it should be a valid list"),
        ({"pins": [{"at": 0}]}, "pins", "pins.0 has none of text, token_ids, any_of"),
        ({"canvas": 5}, "canvas", "canvas is 5"),
        ({"canvas": {"text": "a", "read_only": [[0, 2]]}}, "canvas", "canvas.read_only.0 ends at 2"),
        ({"vllm_xargs": {"diffusion_pinned": [1]}}, "vllm_xargs", "needs diffusion_seed_canvas"),
        ({"vllm_xargs": {"diffusion_seed_canvas": [1]}}, "vllm_xargs", f"give {CANVAS_LEN} token ids"),
        ({"vllm_xargs": {"diffusion_seed_canvas": "ab"}}, "vllm_xargs", "give 16 token ids"),
        (
            {"vllm_xargs": {"diffusion_seed_canvas": WHOLE, "diffusion_pinned": [16]}},
            "vllm_xargs",
            "give positions from 0 to 15",
        ),
        ({"canvas": "a", "vllm_xargs": {}}, "vllm_xargs", "both give a canvas"),
        (
            {"pins": [{"at": 2, "text": "x"}], "vllm_xargs": {"diffusion_seed_canvas": WHOLE,
             "diffusion_pinned": [2]}}, "vllm_xargs", "which is pinned",
        ),
        ({"suffix": "s", "pins": [{"at": 0, "text": "a"}]}, "pins", "not supported with suffix"),
        ({"suffix": "s", "canvas": "a"}, "canvas", "not supported with suffix"),
        ({"suffix": "s", "vllm_xargs": {"a": 1}}, "vllm_xargs", "not supported with suffix"),
    ],
)  # fmt: skip
def test_what_cannot_be_given_is_refused_with_its_field(
    fields: dict[str, Any], param: str, message: str
) -> None:
    error = refusal(**fields)
    assert error["param"] == param
    assert message in error["message"]
