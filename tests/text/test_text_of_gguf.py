"""A GGUF file's tokenizer and template: within it, beside it, or refused by name."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path

import pytest

from dgemma.errors import CheckpointError
from dgemma.text.chat_template import ChatTemplate
from dgemma.text.tokenizer import Tokenizer, has_tokenizer
from gguf_files import write_gguf

SMALL = Path(str(resources.files("dgemma"))) / "data" / "tokenizer"
IDS = {
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.padding_token_id": 0,
}
TEXT = "A quick\n\nbrown fox, <table> and <|turn> ünïcode   spaces"


def metadata(**more: str) -> dict[str, object]:
    tokenizer = (SMALL / "tokenizer.json").read_text()
    template = (SMALL / "chat_template.jinja").read_text()
    return {**IDS, "tokenizer.huggingface.json": tokenizer, "tokenizer.chat_template": template, **more}


def test_a_tokenizer_and_a_template_within_the_file_are_those_of_the_files(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, metadata())
    assert has_tokenizer(path)
    found, expected = Tokenizer.from_directory(path), Tokenizer.from_directory(SMALL)
    assert found.encode(TEXT) == expected.encode(TEXT)
    assert found.controls == expected.controls
    assert dict(found.template_names) == {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    messages = [{"role": "user", "content": TEXT}]
    assert ChatTemplate.from_directory(path, found).render(messages) == ChatTemplate.from_directory(
        SMALL, expected
    ).render(messages)


def test_files_beside_it_go_before_those_within(tmp_path: Path) -> None:
    broken = {"tokenizer.huggingface.json": "{}", "tokenizer.chat_template": "within"}
    path = write_gguf(tmp_path / "m.gguf", {}, metadata(**broken))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SMALL / name, tmp_path / name)
    found = Tokenizer.from_directory(path)
    assert found.encode(TEXT) == Tokenizer.from_directory(SMALL).encode(TEXT)
    assert "mask_token" in found.template_names  # which the metadata does not name
    (tmp_path / "chat_template.jinja").write_text("beside")
    assert (
        ChatTemplate.from_directory(path, found).render_marked([{"role": "user", "content": "x"}]) == "beside"
    )


def test_a_list_of_tokens_alone_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {**IDS, "tokenizer.ggml.tokens": ["a", "b"]})
    assert not has_tokenizer(path)
    with pytest.raises(CheckpointError, match=r"m.gguf holds no tokenizer.json .* Put tokenizer.json of the"):
        Tokenizer.from_directory(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "m.gguf: tokenizer.huggingface.json is not valid JSON"), ("[]", "is not a JSON object")],
)
def test_a_broken_tokenizer_within_is_refused_by_name(text: str, words: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"tokenizer.huggingface.json": text})
    with pytest.raises(CheckpointError, match=words):
        Tokenizer.from_directory(path)


def test_ids_of_no_added_token_name_nothing(tmp_path: Path) -> None:
    added = json.loads((SMALL / "tokenizer.json").read_text())
    path = write_gguf(tmp_path / "m.gguf", {}, {**metadata(), "tokenizer.ggml.mask_token_id": 1 << 30})
    assert "mask_token" not in Tokenizer.from_directory(path).template_names
    for broken in ("none", [{"id": [1], "content": "<eos>"}]):
        added["added_tokens"] = broken
        path = write_gguf(tmp_path / "n.gguf", {}, {**IDS, "tokenizer.huggingface.json": json.dumps(added)})
        with pytest.raises(CheckpointError, match="is not a usable tokenizer"):
            Tokenizer.from_directory(path)
