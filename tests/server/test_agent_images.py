"""Images of responses and messages: in what the user says and what tools return; refused by their place."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from server.served import app_of, error_of, post
from server.test_images import PATCHES, PICTURE, data_url, seeing
from server.test_messages import HI as MESSAGE
from server.test_messages import MESSAGES, USE, USER
from server.test_responses import CALL, RESPONSES
from server.test_responses import HI as RESPONSE

ITEM = {"type": "input_image", "image_url": data_url(PICTURE)}
BLOCK = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PICTURE).decode()},
}
ASKED = {"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, ITEM]}
SEEN = {"type": "function_call_output", "call_id": "c1", "output": [ITEM]}
RETURNED = {"type": "tool_result", "tool_use_id": "t1", "content": [BLOCK]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {**RESPONSE, "instructions": "Be short.", "input": [ASKED]}),
        (RESPONSES, {**RESPONSE, "input": [{"role": "user", "content": "Look."}, CALL, SEEN]}),
        (MESSAGES, {**MESSAGE, "messages": [{"role": "user", "content": [BLOCK]}], "system": "Be short."}),
        (MESSAGES, {**MESSAGE, "messages": [
            USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RETURNED]},
        ]}),
    ],
)  # fmt: skip
def test_an_image_comes_to_the_template(path: str, body: dict[str, Any]) -> None:
    app, text = seeing()
    response = post(app, path, body)
    assert response.status_code == 200, response.text
    assert [image.digest for image in text.images] == [PATCHES.digest]


def test_a_wrong_image_is_named_by_its_place_in_the_request() -> None:
    app, _ = seeing()
    wrong = {**ITEM, "image_url": "data:image/png;base64,AAAA"}
    items = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": [wrong]}]
    assert error_of(post(app, RESPONSES, {**RESPONSE, "input": items}))["param"] == "input.1.content.0"
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    body = {**MESSAGE, "system": "Be short.", "messages": [{"role": "user", "content": [block]}]}
    details = post(app, MESSAGES, body).json()["error"]["details"]
    assert details["param"] == "messages.0.content.0"


def test_without_a_tower_an_image_is_refused_by_its_place() -> None:
    body = {**RESPONSE, "input": [ASKED]}
    assert error_of(post(app_of(), RESPONSES, body))["param"] == "input.0.content.1"


def test_the_images_of_a_kept_response_are_those_of_what_continues_it() -> None:
    app, text = seeing()
    first = post(app, RESPONSES, {**RESPONSE, "input": [ASKED]}).json()
    second = {**RESPONSE, "input": "And now?", "previous_response_id": first["id"]}
    third = {**RESPONSE, "input": [ASKED], "previous_response_id": post(app, RESPONSES, second).json()["id"]}
    text.images.clear()
    assert post(app, RESPONSES, third).status_code == 200
    assert [image.digest for image in text.images] == [PATCHES.digest, PATCHES.digest]
    counted = {name: third[name] for name in ("model", "input", "previous_response_id")}
    text.images.clear()
    assert post(app, f"{RESPONSES}/input_tokens", counted).status_code == 200
    assert len(text.images) == 2


def test_the_images_of_a_kept_response_count_against_the_limit() -> None:
    app, _ = seeing(max_images=2)
    first = post(app, RESPONSES, {**RESPONSE, "input": [ASKED]}).json()
    two = {"role": "user", "content": [ITEM, ITEM]}
    body = {**RESPONSE, "input": [two], "previous_response_id": first["id"]}
    assert error_of(post(app, RESPONSES, body))["code"] == "too_many_images"
