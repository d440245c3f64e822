"""`lm.chat` and `lm.generate` with images: paths, bytes, images of Pillow."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

import dgemma
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.errors import ConfigError, InputError
from image_checkpoint import write_image_checkpoint
from random_image import random_image

OPTIONS = {"max_tokens": 32, "max_denoising_steps": 2, "seed": 1, "max_image_tokens": 70}


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> dgemma.LanguageModel:
    return dgemma.load(write_image_checkpoint(tmp_path_factory.mktemp("images")), dtype="float32")


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    image = random_image(1, 90, 60)
    return Image.frombytes("RGB", (90, 60), image.pixels)


def png(picture: Image.Image) -> bytes:
    file = BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def test_a_picture_is_the_same_in_every_form(
    lm: dgemma.LanguageModel, picture: Image.Image, tmp_path: Path
) -> None:
    file = tmp_path / "photo.png"
    file.write_bytes(png(picture))

    def answer(image: object) -> dgemma.Answer:
        parts = [{"type": "image", "image": image}, {"type": "text", "text": "What is this? " * 8}]
        return lm.chat([{"role": "user", "content": parts}], **OPTIONS)

    first = answer(picture)
    for form in (file, str(file), png(picture)):
        again = answer(form)
        assert again.tokens == first.tokens
        assert again.cached_tokens > 0
    assert first.prompt_tokens > 60
    assert answer(picture.rotate(180)).cached_tokens < again.cached_tokens


def test_images_of_a_plain_prompt_come_first_or_where_the_ids_say(
    lm: dgemma.LanguageModel, picture: Image.Image
) -> None:
    by_text = lm.generate("is", images=[picture], **OPTIONS)
    words = lm.tokenizer.encode("is")
    by_ids = lm.generate([2, 60, *words], images=[picture], **OPTIONS)
    assert by_text.tokens == by_ids.tokens
    assert by_text.prompt_tokens == by_ids.prompt_tokens
    behind = lm.generate([2, *words, 60], images=[picture], **OPTIONS)
    assert behind.prompt_tokens == by_ids.prompt_tokens
    larger = lm.generate("is", images=[picture], **{**OPTIONS, "max_image_tokens": 140})
    assert larger.prompt_tokens > by_text.prompt_tokens
    assert lm.images is not None
    assert lm.images.settings.max_tokens == 280


def test_wrong_images_are_refused_by_name(
    lm: dgemma.LanguageModel, picture: Image.Image, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="images are given with 2 prompts"):
        lm.generate(["a", "b"], images=[picture])
    with pytest.raises(InputError, match="images are 2, but the prompt has places for 1"):
        lm.generate([2, 60, 100], images=[picture, picture])
    with pytest.raises(InputError, match="max_image_tokens is 71; it must be one of 70"):
        lm.generate("a", images=[picture], max_image_tokens=71)
    for address in ("https://example.com/a.png", "data:image/png;base64,AAAA"):
        with pytest.raises(InputError, match="addresses are not fetched"):
            lm.generate("a", images=[address])
    with pytest.raises(InputError, match="cannot be read"):
        lm.generate("a", images=[str(tmp_path / "missing.png")])
    with pytest.raises(InputError, match="image is of type int"):
        lm.generate("a", images=[3])  # type: ignore[list-item]
    with lm.record(), pytest.raises(InputError, match="a trace cannot hold them"):
        lm.generate("a", images=[picture], **OPTIONS)


def test_a_model_of_text_refuses_images_by_name(picture: Image.Image, tmp_path: Path) -> None:
    write_random(tmp_path / "text", PRESETS["tiny"].config)
    lm = dgemma.load(tmp_path / "text")
    assert lm.images is None
    with pytest.raises(InputError, match="images are given, but this model reads text only"):
        lm.generate("a", images=[picture])
    with pytest.raises(InputError, match="messages hold an image, but this model reads text only"):
        lm.chat([{"role": "user", "content": [{"type": "image", "image": picture}]}])


def test_an_adapter_leaves_the_tower_as_it_is(lm: dgemma.LanguageModel, picture: Image.Image) -> None:
    adapted = lm.with_adapter(dgemma.LoraSettings(rank=2, expert_rank=0, targets=("attention",)))
    plain = lm.generate("is", images=[picture], **OPTIONS)
    assert adapted.generate("is", images=[picture], **OPTIONS).tokens == plain.tokens
    tower = adapted.transformer.vision
    assert tower is not None
    assert not any("lora" in name or "down.down" in name for name, _ in tower.named_parameters())
    assert lm.transformer.vision is not None
    same = zip(tower.parameters(), lm.transformer.vision.parameters(), strict=True)
    assert all(own.data_ptr() == other.data_ptr() for own, other in same)


def test_a_processor_file_that_is_not_supported_is_refused_when_an_image_comes(
    picture: Image.Image, tmp_path: Path
) -> None:
    path = write_image_checkpoint(tmp_path)
    (path / "processor_config.json").write_text('{"image_processor": {"do_normalize": true}}')
    lm = dgemma.load(path)
    lm.generate("a", max_tokens=32, max_denoising_steps=1)
    with pytest.raises(ConfigError, match=r"processor_config.json: image processor: do_normalize is True"):
        lm.generate("a", images=[picture])
