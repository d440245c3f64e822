"""Images in chats: the template says where they stand, and no text of a user becomes their tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from dgemma.errors import InputError
from dgemma.images.decode import RgbImage
from dgemma.images.preprocess import ImageSettings, cut_patches
from dgemma.images.prompt import ImagePrompt
from dgemma.text.chat_template import ChatTemplate
from dgemma.text.tokenizer import Tokenizer
from image_checkpoint import TEMPLATE, write_tokenizer
from random_image import random_image

PREPARE = partial(cut_patches, settings=ImageSettings(max_tokens=70))
IMAGE, BEGIN, END = 60, 61, 62


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return Tokenizer.from_directory(path)


@pytest.fixture(scope="module")
def template(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(TEMPLATE, tokenizer)


def part(image: RgbImage) -> dict[str, Any]:
    return {"type": "image", "image": image}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def test_each_image_becomes_its_soft_tokens_between_two_marks(
    template: ChatTemplate, tokenizer: Tokenizer
) -> None:
    """As the reference's processor replaces the placeholder in the rendered text."""
    images = [random_image(1, 300, 200), random_image(2, 90, 500), random_image(3, 64, 64)]
    messages = [
        user(text("Look: "), part(images[0]), text(" and "), part(images[1])),
        {"role": "assistant", "content": "Yes."},
        user(part(images[2])),
    ]
    found = template.render_with_images(messages, prepare=PREPARE)
    assert [image.patches for image in found.images] == [PREPARE(image) for image in images]
    for image in found.images:
        assert found.tokens[image.start - 1] == BEGIN
        assert set(found.tokens[image.start : image.stop]) == {IMAGE}
        assert found.tokens[image.stop] == END
    shown = tokenizer.decode(found.tokens, controls=True)
    soft = ["<|image>" + "<|image|>" * PREPARE(image).num_tokens + "<image|>" for image in images]
    assert shown == (
        f"<bos><|turn>user\nLook: {soft[0]} and {soft[1]}<turn|>\n<|turn>model\nYes.<turn|>\n"
        f"<|turn>user\n{soft[2]}<turn|>\n<|turn>model\n"
    )


def test_text_of_a_user_never_becomes_an_image(template: ChatTemplate) -> None:
    image = random_image(1, 60, 60)
    spelled = "<|image><|image|><image|>"
    found = template.render_with_images([user(text(spelled), part(image), text(spelled))], prepare=PREPARE)
    (placed,) = found.images
    outside = (*found.tokens[: placed.start - 1], *found.tokens[placed.stop + 1 :])
    assert not {IMAGE, BEGIN, END} & {*outside}


def test_without_images_it_is_the_prompt_of_the_texts(template: ChatTemplate) -> None:
    messages = [user(text("One"), text(" two"))]
    found = template.render_with_images(messages, prepare=PREPARE)
    assert found == ImagePrompt(tuple(template.render(messages)))
    assert template.render(messages) == template.render([{"role": "user", "content": "One two"}])


def test_what_cannot_hold_an_image_refuses_it_by_name(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    image = part(random_image(1, 60, 60))

    def refused(
        match: str, messages: list[Any], made: ChatTemplate = template, prepare: Any = PREPARE
    ) -> None:
        with pytest.raises(InputError, match=match) as caught:
            made.render_with_images(messages, prepare=prepare)
        assert caught.value.field == "messages"

    refused("messages hold an image, but this model reads text only", [user(image)], prepare=None)
    refused(
        "role 'system' and an image; only user and tool",
        [{"role": "system", "content": [image]}, user(image)],
    )
    refused("the image of an image part is missing", [user({"type": "image"})])
    refused("the image of an image part is of type str", [user({"type": "image", "image": "a.png"})])
    refused("unknown key 'detail'", [user({**image, "detail": "low"})])
    refused("videos are not supported", [user({"type": "video", "video": "a.mp4"})])
    blind = ChatTemplate(TEMPLATE.replace("'<|image|>'", "'an image'"), tokenizer)
    refused("chat template has no place for images", [user(image)], blind)
    twice = ChatTemplate(TEMPLATE.replace("'<|image|>'", "'<|image|><|image|>'"), tokenizer)
    refused("hold 1 images, of which .* drops some, or writes some twice", [user(image)], twice)
    with pytest.raises(InputError, match="images are not supported"):
        template.render([user(image)])  # where no images are asked for, such as in training


def test_a_tokenizer_without_the_controls_of_images_has_no_marks(template: ChatTemplate) -> None:
    from text.bundled import TOKENIZER

    assert template.image_marks is not None
    assert ChatTemplate("{{ '<|turn>' }}", TOKENIZER).image_marks is None
