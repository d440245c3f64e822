"""Images of requests come to the chat template as patches, or are refused under the name of their part."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import threading
import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.errors import InputError
from dgemma.images.decode import ImageLimits, decode_image
from dgemma.images.preprocess import ImagePatches, ImageSettings, cut_patches
from dgemma.images.process import ImageProcess
from dgemma.images.prompt import ImagePrompt
from dgemma.server.app import create_app
from dgemma.server.http.errors import ApiError
from dgemma.server.http.middleware import RequestMiddleware
from dgemma.server.http.settings import Settings
from dgemma.server.images import ImageLoader, data_url_bytes, image_parts
from images.hostile import encoded, hostile_files, picture
from server.fake_engine import FakeEngine, FakeText, Script
from server.served import CHAT, HELLO, app_of, ask, client_of, error_of, post, run

JSON = {"content-type": "application/json"}
GEOMETRY = ImageSettings(patch_size=2, pooling=1)
TOKENIZE = "/tokenize"


class ImageText(FakeText):
    """Keeps the images that come to the template, and writes their digests into the prompt."""

    def __init__(self) -> None:
        self.images: list[ImagePatches] = []

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
    ) -> ImagePrompt:
        plain = [{**message, "content": self._plain(message.get("content"))} for message in messages]
        return super().render_chat(plain, tools=tools, thinking=thinking)

    def _plain(self, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        parts = []
        for part in content:
            if isinstance(part, dict) and part.get("type") == "image":
                assert part.keys() == {"type", "image"}
                self.images.append(part["image"])
                part = {"type": "text", "text": part["image"].digest.hex()}
            parts.append(part)
        return parts


class CountingProcess(ImageProcess):
    """Decodes here, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.may_go = threading.Event()
        self.may_go.set()

    def patches(
        self, content: bytes, settings: ImageSettings, limits: ImageLimits | None = None
    ) -> ImagePatches:
        self.count += 1
        self.may_go.wait()
        return cut_patches(decode_image(content, limits=limits), settings)


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def chat_part(url: str, **detail: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **detail}}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "What is it?"}, *parts]
    return {**HELLO, "messages": [{"role": "user", "content": content}], **fields}


def seeing(
    engine: FakeEngine | None = None, *, process: ImageProcess | None = None, **options: Any
) -> tuple[RequestMiddleware, ImageText]:
    """A server whose model has a vision tower. process: in place of the one with limits."""
    text = ImageText()
    app = create_app(Settings(**options), engine or FakeEngine(image_settings=GEOMETRY), text)
    app.state.images = ImageLoader(Settings(**options), GEOMETRY, process=process or CountingProcess())
    return app, text


PICTURE = encoded(picture(random.Random(0)), "PNG")
PATCHES = cut_patches(decode_image(PICTURE), GEOMETRY)
PART = chat_part(data_url(PICTURE))


@pytest.mark.parametrize(
    "part",
    [
        PART,
        chat_part(data_url(PICTURE), detail="auto"),
        chat_part(data_url(PICTURE, "text/plain")),  # the type is the content's
        {"type": "image_url", "image_url": data_url(PICTURE)},
        {"type": "input_image", "image_url": data_url(PICTURE), "detail": "auto"},
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png",
                       "data": base64.b64encode(PICTURE).decode()},
        },
    ],
)  # fmt: skip
def test_an_image_comes_to_the_template_in_each_form_of_its_part(part: dict[str, Any]) -> None:
    app, text = seeing()
    assert post(app, CHAT, chat(part)).status_code == 200
    assert text.images == [PATCHES]


def test_the_process_with_limits_is_the_one_that_serves() -> None:
    text = ImageText()
    app = create_app(Settings(), FakeEngine(image_settings=GEOMETRY), text)
    assert post(app, CHAT, chat(PART)).status_code == 200
    assert text.images == [PATCHES]


def test_the_detail_is_the_budget_of_soft_tokens() -> None:
    app, text = seeing()
    url = data_url(PICTURE)
    parts = [chat_part(url, detail=detail) for detail in ("low", "auto", "high")]
    assert post(app, CHAT, chat(*parts)).status_code == 200
    low, auto, high = (image.num_tokens for image in text.images)
    assert low <= 70 < auto <= 280 < high <= 1120


def test_several_images_keep_their_places_and_one_that_stands_twice_is_read_once() -> None:
    other = encoded(picture(random.Random(1)), "JPEG")
    process = CountingProcess()
    app, text = seeing(process=process)
    body = chat(PART, chat_part(data_url(other)), PART)
    assert post(app, CHAT, body).status_code == 200
    assert text.images == [PATCHES, cut_patches(decode_image(other), GEOMETRY), PATCHES]
    assert process.count == 2


def test_tokenize_takes_images() -> None:
    app, text = seeing()
    body = {"messages": chat(PART)["messages"]}
    assert post(app, TOKENIZE, body).status_code == 200
    assert text.images == [PATCHES]


def test_images_among_the_fields_of_extra_body_are_read() -> None:
    app, text = seeing()
    body = chat(PART)
    body["extra_body"] = {"messages": body.pop("messages")}
    assert post(app, CHAT, body).status_code == 200
    assert text.images == [PATCHES]


def test_the_models_card_says_whether_images_are_taken() -> None:
    for app, kinds in ((seeing()[0], ["text", "image"]), (app_of(), ["text"])):
        (card,) = ask(app, "GET", "/v1/models").json()["data"]
        assert card["input_modalities"] == kinds


def test_a_model_without_a_tower_names_the_part() -> None:
    for path, body in ((CHAT, chat(PART)), (TOKENIZE, {"messages": chat(PART)["messages"]})):
        response = post(app_of(), path, body)
        assert response.status_code == 400
        error = error_of(response)
        assert error["param"] == "messages.0.content.1"
        assert error["code"] == "unsupported_value"
        assert "is an image, and this model reads text only" in error["message"]


@pytest.mark.parametrize(
    ("part", "param", "message"),
    [
        ({"type": "image_url"}, "", "is no image part; give it as"),
        ({"type": "image", "image": "x"}, ".image", "unknown field"),
        ({"type": "input_image", "file_id": "file-1"}, ".file_id", "unknown field"),
        (chat_part("data:,x", size=3), ".image_url.size", "unknown field"),
        (chat_part(data_url(PICTURE), detail="original"), "", "has the detail 'original'; give auto, low"),
        (chat_part(data_url(PICTURE), detail=["low"]), "", "has the detail a list"),
        (chat_part(""), "", "is '', which is no address"),
        (chat_part("file:///etc/passwd"), "", "is 'file:///etc/passwd', which is no address"),
        (chat_part("/etc/passwd"), "", "which is no address"),
        (chat_part("data:image/png,abc"), "", "is no data URL in base64"),
        (chat_part("data:image/png;base64"), "", "is no data URL in base64"),
        (chat_part("data:image/png;base64,%%%"), "", "is no valid base64"),
        (chat_part("data:image/png;base64,"), "", "is empty"),
        (chat_part(data_url(b"<html>")), "", "is an HTML page, which is not read"),
        (chat_part("https://127.0.0.1/x.png"), "", "this server fetches none; send the image itself"),
    ],
)
def test_a_wrong_part_is_refused_by_its_name(part: dict[str, Any], param: str, message: str) -> None:
    app, text = seeing()
    response = post(app, CHAT, chat(PART, part))
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "messages.0.content.2" + param
    assert message in error["message"]
    assert text.images == []


def test_what_comes_before_an_image_is_refused_first() -> None:
    app, _ = seeing()
    wrong = chat_part("data:,x")
    assert error_of(post(app, CHAT, chat(wrong, model="other")))["param"] == "model"
    assert error_of(post(app, CHAT, chat(wrong, temperatur=1)))["param"] == "temperatur"


def test_hostile_images_are_refused_and_honest_ones_answered() -> None:
    """In the process with limits."""
    process = ImageProcess(cpu_seconds=60)
    app, text = seeing(process=process)

    async def all_of() -> None:
        async with client_of(app) as client:
            for number, (name, content) in enumerate(hostile_files(40, seed=2)):
                answers = [client.post(CHAT, json=chat(chat_part(data_url(content))))]
                answers += [client.post(CHAT, json=chat(PART))] if number % 10 == 0 else []
                refused, *fine = await asyncio.gather(*answers)
                assert refused.status_code == 400, name
                assert error_of(refused)["param"] == "messages.0.content.1", name
                assert [response.status_code for response in fine] == [200] * len(fine)

    try:
        run(all_of())
    finally:
        process.end()
    assert text.images == [PATCHES] * 4


def test_images_are_counted() -> None:
    app, _ = seeing(max_images=2)
    assert post(app, CHAT, chat(PART, PART)).status_code == 200
    response = post(app, CHAT, chat(PART, PART, PART))
    assert (response.status_code, error_of(response)["code"]) == (400, "too_many_images")
    assert "has 3 images; this server takes at most 2" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_image_pixels": 15}, "pixels; at most 15 are taken"),
        ({"max_image_bytes": len(PICTURE) - 1}, f"has {len(PICTURE)} bytes; at most"),
    ],
)
def test_images_are_limited(option: dict[str, int], message: str) -> None:
    app, _ = seeing(**option)
    response = post(app, CHAT, chat(PART))
    assert (response.status_code, error_of(response)["code"]) == (400, "image_too_large")
    assert message.replace(str(len(PICTURE)), f"{len(PICTURE):,}") in error_of(response)["message"]


def test_a_body_may_be_larger_by_its_images_and_by_nothing_else() -> None:
    large = encoded(picture(random.Random(0)).resize((200, 200)), "BMP")
    limits = {"max_body_bytes": 2000, "max_image_bytes": 1 << 20}
    app, text = seeing(**limits)
    body = chat(chat_part(data_url(large)))
    assert post(app, CHAT, body).status_code == 200
    slashed = json.dumps(body).replace("/", "\\/").encode()  # as PHP writes JSON

    async def send() -> int:
        async with client_of(app) as client:
            return (await client.post(CHAT, content=slashed, headers=JSON)).status_code

    assert run(send()) == 200
    assert len(text.images) == 2
    for more in ({"stop": ["x " * 60_000]}, {"logit_bias": {str(key): 1 for key in range(10_000)}}):
        response = post(app, CHAT, {**body, **more})
        assert response.status_code == 413
        assert "more than 2000 bytes besides images" in error_of(response)["message"]
    response = post(app_of(**limits), CHAT, body)  # without a tower
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")


def test_images_in_memory_are_counted_until_the_answer_ends() -> None:
    """And the body is not kept: its images are several times as large."""
    rough = encoded(picture(random.Random(0)).resize((1200, 1200)), "BMP")
    engine = FakeEngine(Script(text="x", until=lambda: is_enough.is_set()), image_settings=GEOMETRY)
    app, text = seeing(engine, max_buffered_bytes=7 << 20)
    is_enough = threading.Event()
    body = json.dumps(chat(chat_part(data_url(rough)))).encode()
    assert len(body) > 1 << 20

    async def both() -> None:
        async with client_of(app) as client:
            tracemalloc.start()
            first = asyncio.create_task(client.post(CHAT, content=body, headers=JSON))
            while not engine.running:
                await asyncio.sleep(0.01)
            held = app.state.admission._num_buffered_bytes
            assert held == len(text.images[0].pixels)
            # A thread that has ended its work lets go of it when it runs next.
            while max(trace.size for trace in tracemalloc.take_snapshot().traces) > 1 << 20:
                await asyncio.sleep(0.01)
            tracemalloc.stop()
            is_enough.set()
            assert (await first).status_code == 200

    run(both())
    assert app.state.admission._num_buffered_bytes == 0


def test_more_images_than_the_server_keeps_are_too_many() -> None:
    app, _ = seeing(max_buffered_bytes=len(json.dumps(chat(PART))) + 100)
    response = post(app, CHAT, chat(PART))
    assert (response.status_code, error_of(response)["code"]) == (429, "rate_limit_exceeded")
    assert app.state.admission._num_buffered_bytes == 0


def test_images_that_take_too_long_end_the_request() -> None:
    process = CountingProcess()
    app, _ = seeing(process=process, image_timeout_s=0.05)
    process.may_go.clear()

    async def asked() -> int:
        async with client_of(app) as client:
            response = await client.post(CHAT, json=chat(PART))
            assert "the images were not read within 0.05 seconds" in error_of(response)["message"]
            process.may_go.set()
            return response.status_code

    assert run(asked()) == 504


def test_the_log_holds_no_image_even_with_texts(caplog: pytest.LogCaptureFixture) -> None:
    app, _ = seeing(log_text=True)
    with caplog.at_level("INFO", "dgemma.server"):
        assert post(app, CHAT, chat(PART)).status_code == 200
    logged = "".join(str(vars(record)) for record in caplog.records)
    assert "What is it?" in logged
    assert "data:image/png;base64,iVBOR" in logged
    assert data_url(PICTURE)[100:140] not in logged


def test_parts_are_found_in_messages_and_results_of_all_apis() -> None:
    source = {"type": "image", "source": {"type": "url", "url": "b"}}
    body = {
        "messages": [
            {"role": "user", "content": [chat_part("a"), "x", 3]},
            {"role": "user", "content": [{"type": "tool_result", "content": [source]}]},
        ],
        "input": [{"type": "function_call_output", "output": [{"type": "input_image", "image_url": "c"}]}],
        "tools": [{"type": "function", "parameters": {"content": [chat_part("no")]}}],
        "metadata": {"content": [chat_part("no")]},
    }
    found = image_parts(body)
    assert found == [chat_part("a"), source, {"type": "input_image", "image_url": "c"}]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=2000), st.sampled_from(["\n", " ", "\r\n\t"]), st.integers(0, 80), st.booleans())
def test_every_content_comes_through_a_data_url(content: bytes, space: str, at: int, padded: bool) -> None:
    data = base64.b64encode(content).decode()
    data = data if padded else data.rstrip("=")
    url = f"data:image/png;base64,{data[:at]}{space}{data[at:]}"
    assert data_url_bytes(url, 2000) == content


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200) | st.text(max_size=200).map("data:;base64,".__add__))
def test_any_text_is_bytes_or_an_error_of_the_image(text: str) -> None:
    try:
        assert len(data_url_bytes(text, 100)) <= 100
    except InputError as error:
        found = error
    else:
        return
    assert found.field == "image"
    assert len(str(found)) < 250


def test_long_data_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(InputError, match="has 75 bytes; at most 74 are taken"):
        data_url_bytes("data:;base64," + "A" * 100, 74)
    assert len(data_url_bytes("data:;base64," + "A" * 100, 75)) == 75


def test_an_image_of_an_earlier_request_is_taken_as_it_is_or_asked_for() -> None:
    async def loaded() -> Any:
        return await ImageLoader(Settings(), GEOMETRY).load({"messages": []})

    images = run(loaded())
    kept = [{"role": "user", "content": [{"type": "image", "image": PATCHES}]}]
    assert images.place(kept, "messages") == kept
    with pytest.raises(ApiError, match=r"input\.0\.content\.0 is an image of an earlier request; send it"):
        images.place([{"role": "user", "content": [PART]}], "input")
