"""`--image` of the commands that generate, and `/image` of a conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import dgemma
from cli.test_generate_chat import Asked, run
from dgemma.cli.chat import Conversation
from dgemma.images.decode import decode_image
from terminal import ScriptedModel


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    stand_in = Asked(lambda messages, options: seen.append((messages, options)) or ("", "yes"))
    seen: list[Any] = []
    stand_in.seen = seen  # type: ignore[attr-defined]
    monkeypatch.setattr(dgemma, "load", stand_in)
    monkeypatch.setattr("dgemma.cli.options.check_checkpoint", lambda model: None)
    return stand_in


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    Image.new("RGB", (5, 4), "red").save(path)
    return path


def test_images_come_before_the_prompt(asked: Any, photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--image", str(photo), "--image", str(photo), "--max-image-tokens", "70")
    assert run(capsys, "generate", "m", "What is it?", *options) == (0, "yes\n", "")
    ((messages, given),) = asked.seen
    image = {"type": "image", "image": decode_image(photo)}
    content = [image, image, {"type": "text", "text": "What is it?"}]
    assert messages == [{"role": "user", "content": content}]
    assert given["max_image_tokens"] == 70


def test_a_raw_prompt_has_images_too(asked: Any, photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "generate", "m", "It is", "--raw", "--image", str(photo))[0] == 0
    ((_, given),) = asked.seen
    assert given["images"] == [decode_image(photo)]


@pytest.mark.parametrize("command", ["generate", "run", "chat"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "cannot be read: No such file or directory."),
        (lambda path: path.mkdir(), "is not a file; give the path of an image file."),
        (lambda path: path.write_bytes(b""), "is empty; give the bytes of an image file."),
        (lambda path: path.write_bytes(b"%PDF-1.7"), "is a PDF, which is not read; give PNG, JPEG, WEBP"),
        (lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n"), "cannot be decoded as PNG"),
    ],
)
def test_a_wrong_image_is_refused_before_a_model_is_loaded(
    command: str, make: Any, message: str, asked: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "it.png"
    make(path)
    prompt = () if command == "chat" else ("What is it?",)
    status, out, err = run(capsys, command, "org/model", *prompt, "--image", str(path))
    assert (status, out) == (2, "")
    assert err.startswith(f"dgemma {command}: --image {path} {message}")
    assert asked.load == {}


def test_an_address_is_not_fetched(asked: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "generate", "m", "What?", "--image", "https://a.example/b.png")
    assert status == 2
    assert "--image https://a.example/b.png is an address; download it and give the path" in err


def test_a_budget_needs_an_image(asked: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "generate", "m", "What?", "--max-image-tokens", "140")
    assert (status, err) == (
        2,
        "dgemma generate: --max-image-tokens is 140, but there is no --image. Drop it.\n",
    )


def conversation(tmp_path: Path, **options: Any) -> tuple[Conversation, list[Any]]:
    seen: list[Any] = []
    model = ScriptedModel(lambda messages, _: seen.append(messages) or ("", "yes"))
    return Conversation(model, {}, None, **options), seen  # type: ignore[arg-type]


def test_an_image_is_part_of_the_next_question_and_of_that_alone(photo: Path, tmp_path: Path) -> None:
    talk, seen = conversation(tmp_path, images=[str(photo)])
    for line in ("What is it?", "And now?", f"/image {photo}", "/new", "Third?", f"/image {photo}", "Last?"):
        assert talk.take(line)
    part = {"type": "image", "image": str(photo)}
    asked = [[message["content"] for message in messages if message["role"] == "user"] for messages in seen]
    first = [part, {"type": "text", "text": "What is it?"}]
    assert asked == [
        [first],
        [first, "And now?"],
        ["Third?"],
        ["Third?", [part, {"type": "text", "text": "Last?"}]],
    ]


def test_a_question_with_an_image_is_answered_again_saved_and_loaded(photo: Path, tmp_path: Path) -> None:
    talk, seen = conversation(tmp_path)
    file = tmp_path / "talk.json"
    for line in (f"/image {photo}", "What is it?", "/regenerate", f"/save {file}"):
        assert talk.take(line)
    assert seen[0] == seen[1]
    other, seen = conversation(tmp_path)
    assert other.take(f"/load {file}")
    assert other.turns == talk.turns
    other.take("And now?")
    assert seen[0][0]["content"][0] == {"type": "image", "image": str(photo)}


@pytest.mark.parametrize(
    "content",
    [
        [],
        [3],
        [{"type": "image", "image": 3}],
        [{"type": "image", "image": "x", "more": 1}],
        [{"type": "audio"}],
    ],
)
def test_a_file_with_other_parts_is_no_conversation(content: Any, tmp_path: Path) -> None:
    talk, _ = conversation(tmp_path)
    file = tmp_path / "talk.json"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": content}]}))
    with pytest.raises(dgemma.InputError, match="holds no conversation"):
        talk.take(f"/load {file}")


def test_a_wrong_image_of_a_conversation_is_refused_at_once(tmp_path: Path) -> None:
    talk, _ = conversation(tmp_path)
    with pytest.raises(dgemma.InputError, match=r"^/image nowhere\.png cannot be read: No such file"):
        talk.take("/image nowhere.png")
    with pytest.raises(dgemma.InputError, match="/image needs the path of a file"):
        talk.take("/image")
