"""Images from a client to the vision tower: a real server with a random model, and OpenAI's own client."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from openai import OpenAI
from PIL import Image

import dgemma
from image_checkpoint import write_image_checkpoint
from images.hostile import encoded, hostile_files, picture
from server.real_server import RealServer, serving
from sizes import cases

PICTURES = [encoded(picture(random.Random(seed)), kind) for seed, kind in enumerate(("PNG", "JPEG"))]
OPTIONS: dict[str, Any] = {"seed": 5, "max_tokens": 32}
STEPS = {"max_denoising_steps": 3}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_checkpoint(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[RealServer]:
    with serving(str(checkpoint), "--served-model-name", "dgemma", "--exact") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.address}/v1", api_key="any", max_retries=0) as client:
        yield client


def messages(*contents: bytes, detail: str = "auto", after: str = "") -> Any:
    parts: list[Any] = [{"type": "text", "text": "What is it?"}]
    for content in contents:
        url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url, "detail": detail}})
    return [{"role": "user", "content": [*parts, *([{"type": "text", "text": after}] if after else [])]}]


def test_the_answer_is_that_of_the_model_in_this_process(client: OpenAI, checkpoint: Path) -> None:
    lm = dgemma.load(checkpoint, exact=True)
    parts: list[Any] = [{"type": "text", "text": "What is it?"}]
    parts += [{"type": "image", "image": Image.open(BytesIO(content))} for content in PICTURES]
    expected = lm.chat([{"role": "user", "content": parts}], **OPTIONS, **STEPS)  # type: ignore[arg-type]
    found = client.chat.completions.create(
        model="dgemma", messages=messages(*PICTURES), extra_body=STEPS, **OPTIONS
    )
    assert found.choices[0].message.content == expected.text
    assert found.usage is not None
    assert found.usage.prompt_tokens == expected.prompt_tokens
    swapped = client.chat.completions.create(
        model="dgemma", messages=messages(*PICTURES[::-1]), extra_body=STEPS, **OPTIONS
    )
    assert swapped.choices[0].message.content != expected.text


def test_the_same_image_is_found_in_the_prefix_cache_and_another_is_not(client: OpenAI) -> None:
    def cached(content: bytes) -> int:
        asked = messages(content, after="Say it in words. " * 8)  # an image is reused whole, in whole blocks
        found = client.chat.completions.create(model="dgemma", messages=asked, extra_body=STEPS, **OPTIONS)
        assert found.usage is not None
        assert found.usage.prompt_tokens_details is not None
        return found.usage.prompt_tokens_details.cached_tokens or 0

    first, other = (encoded(picture(random.Random(seed)).resize((64, 64)), "PNG") for seed in (7, 8))
    assert cached(first) == 0
    assert cached(first) > 200
    assert cached(other) < 32


def test_streams_and_responses_take_images(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        model="dgemma", messages=messages(PICTURES[0], detail="low"), extra_body=STEPS, **OPTIONS
    )
    chunks = client.chat.completions.create(
        model="dgemma", messages=messages(PICTURES[0], detail="low"), extra_body=STEPS, stream=True, **OPTIONS
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content
    url = f"data:image/png;base64,{base64.b64encode(PICTURES[0]).decode()}"
    content: Any = [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_image", "image_url": url, "detail": "low"},
    ]
    reply = client.responses.create(
        model="dgemma",
        input=[{"role": "user", "content": content}],
        max_output_tokens=32,
        extra_body={"seed": 5, **STEPS},
    )
    assert reply.output_text == whole.choices[0].message.content


def test_hostile_images_in_a_row_leave_the_server_as_it_was(client: OpenAI, server: RealServer) -> None:
    """Each is a 400 that names its part; memory of the server and of its worker stays bounded."""

    def resident(process: psutil.Process) -> int:
        return int(process.memory_info().rss)

    def ask(content: bytes) -> str:
        found = client.chat.completions.create(
            model="dgemma", messages=messages(content), extra_body=STEPS, **OPTIONS
        )
        return str(found.choices[0].message.content)

    before_text = ask(PICTURES[0])
    process = psutil.Process(server.process.pid)
    before = resident(process)
    largest_worker = 0
    for name, content in hostile_files(cases(200, 50), seed=3):
        with pytest.raises(openai.BadRequestError) as raised:
            ask(content)
        assert raised.value.param == "messages.0.content.1", name
        largest_worker = max([largest_worker, *map(resident, process.children())])
    assert ask(PICTURES[0]) == before_text
    assert resident(process) - before < 64 << 20
    assert 0 < largest_worker < 160 << 20
