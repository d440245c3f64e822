"""Text becomes ids as in the reference, and never a control."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.errors import CheckpointError, InputError
from dgemma.text import tokenizer as tokenizer_module
from dgemma.text.tokenizer import Tokenizer, _is_bounded
from text.bundled import (
    DIRECTORY,
    TOKENIZER,
    added,
    bundled_added_tokens,
    edited_copy,
    honest_text,
    reference,
)

NAMES = sorted(TOKENIZER.controls)
# Text that comes near controls: names, their halves, bytes, spaces, anything else.
near_controls = st.lists(
    st.one_of(
        st.sampled_from(NAMES),
        st.sampled_from(NAMES).map(lambda name: name[: len(name) // 2]),
        st.sampled_from(["<", "|", ">", "<|", "|>", "<0x0A>", "\n\n", "   ", "▁", "\x00", "turn", '"']),
        st.text(max_size=8),
    ),
    max_size=12,
).map("".join)


@settings(deadline=None)
@given(honest_text)
def test_ordinary_text_is_encoded_as_in_the_reference(text: str) -> None:
    assert TOKENIZER.encode(text) == reference().encode(text, add_special_tokens=False)


@settings(deadline=None)
@given(near_controls)
def test_no_text_becomes_a_control_and_all_of_it_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert not set(ids) & set(TOKENIZER.controls.values())
    assert TOKENIZER.decode(ids) == text.replace("▁", " ")  # the vocabulary's own spelling of a space


def test_look_alikes_are_tokenized_like_any_text() -> None:
    assert [TOKENIZER.id_to_token(id_) for id_ in TOKENIZER.encode("a<|turn>")] == [
        "a",
        "<",
        "|",
        "turn",
        ">",
    ]


@settings(deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)))
def test_ids_are_decoded_as_in_the_reference(ids: list[int]) -> None:
    assert TOKENIZER.decode(ids) == reference().decode(ids, skip_special_tokens=True)
    assert TOKENIZER.decode(ids, controls=True) == reference().decode(ids)


def test_the_controls_of_gemma_have_their_ids() -> None:
    expected = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<mask>": 4, '<|"|>': 52, "<|think|>": 98, "<turn|>": 106}
    assert {name: TOKENIZER.id_of(name) for name in expected} == expected
    assert (TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.vocab_size) == (2, 1, 2048)
    assert TOKENIZER.id_of("<|nothing>") is None
    assert TOKENIZER.template_names.get("bos_token") in TOKENIZER.controls


def test_pieces_are_shown_as_the_vocabulary_spells_them() -> None:
    assert [TOKENIZER.id_to_token(id_) for id_ in (2, 107, 9999)] == ["<bos>", "<0x00>", None]


def test_ids_without_a_piece_say_nothing() -> None:
    a = TOKENIZER.encode("a")
    assert TOKENIZER.decode([*a, 9999, *a]) == "aa"


def test_controls_are_shown_by_name_on_request() -> None:
    ids = [2, *TOKENIZER.encode("hi"), 106]
    assert TOKENIZER.decode(ids) == "hi"
    assert TOKENIZER.decode(ids, controls=True) == "<bos>hi<turn|>"


def test_added_tokens_that_are_no_markers_stay_part_of_text(tmp_path: Path) -> None:
    tokens = [
        *bundled_added_tokens(),
        added("<table>", 2048),
        added("<|image|>", 2049),
        added("<caption>", 2050),
    ]
    directory = edited_copy(tmp_path, added_tokens=tokens)
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.encode("<table>") == [2048]
    # A control that the file does not call special; its neighbours keep their ids.
    assert tokenizer.id_of("<|image|>") == 2049
    assert 2049 not in tokenizer.encode("<|image|>")
    assert tokenizer.encode("a<caption>")[-1] == 2050
    assert tokenizer.vocab_size == 2051
    assert tokenizer.decode([2048, 2049]) == "<table>"


def test_tokens_that_the_configuration_names_are_controls(tmp_path: Path) -> None:
    directory = edited_copy(tmp_path, added_tokens=[*bundled_added_tokens(), added("<table>", 2048)])
    config = {
        "bos_token": {"content": "<eos>"},
        "pad_token": None,
        "unk_token": "absent",
        "mask_token": "\ud800",  # half a character
        "additional_special_tokens": ["the", "\udfff", 7],
        "extra_special_tokens": {"cell_token": "<table>"},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.bos_id == 1
    assert tokenizer.template_names == {"bos_token": "<eos>", "cell_token": "<table>"}
    assert 2048 not in tokenizer.encode("<table>")


def test_without_a_configuration_the_names_are_gemmas(tmp_path: Path) -> None:
    directory = edited_copy(tmp_path)
    (directory / "tokenizer_config.json").unlink()
    assert Tokenizer.from_directory(directory).bos_id == 2


def test_a_model_that_knows_controls_as_words_spells_them_instead(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(edited_copy(tmp_path, model={"ignore_merges": True}))
    for name, id_ in tokenizer.controls.items():
        assert tokenizer._engine.encode(name, add_special_tokens=False).ids == [id_]
        ids = tokenizer.encode(name)
        assert not set(ids) & set(tokenizer.controls.values())
        assert tokenizer.decode(ids) == name


def test_a_character_without_a_piece_is_named(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(edited_copy(tmp_path, model={"byte_fallback": False}))
    with pytest.raises(InputError, match="'€' at position 2 has no token"):
        tokenizer.encode("ab€")


def test_a_long_text_does_not_stop_other_threads() -> None:
    """A server renders and tokenizes in threads; the event loop must go on meanwhile."""
    text = "The garbage collector frees memory. " * 20_000

    def longest_pause() -> float:
        """Of another thread, as a share of the time that encoding takes."""
        pauses, is_over = [0.0], threading.Event()

        def tick() -> None:
            last = time.perf_counter()
            while not is_over.is_set():
                time.sleep(0.001)
                now = time.perf_counter()
                pauses.append(now - last)
                last = now

        ticking = threading.Thread(target=tick)
        ticking.start()
        began = time.perf_counter()
        TOKENIZER.encode(text)
        took = time.perf_counter() - began
        is_over.set()
        ticking.join()
        return max(pauses) / took

    # Another look if the machine made it wait: an encoder that does is seen in each of them.
    looks = [longest_pause()]
    while looks[-1] >= 0.5 and len(looks) < 20:
        looks.append(longest_pause())
    assert min(looks) < 0.5, looks


def test_lone_surrogates_are_refused_by_position() -> None:
    with pytest.raises(InputError, match=r"lone surrogate U\+D83D at position 3"):
        TOKENIZER.encode("abc\ud83d")


@pytest.mark.parametrize("text", ["a" * 17, "€" * 6])
def test_text_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_TEXT_BYTES", 16)
    with pytest.raises(InputError, match="shorten or split"):
        TOKENIZER.encode(text)


def test_what_is_not_text_is_refused() -> None:
    with pytest.raises(InputError, match="text is of type bytes"):
        TOKENIZER.encode(b"abc")  # type: ignore[arg-type]


@pytest.mark.parametrize("id_", [-1, 1 << 32, 10**5000, True, "a", 1.0], ids=range(6))
def test_what_is_no_id_is_refused(id_: int) -> None:
    with pytest.raises(InputError, match=r"a token id is .*; ids are integers"):
        TOKENIZER.decode([id_])


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer.json is missing; text in and out needs it"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "not UTF-8"),
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "decodes with None"),
        (b'{"decoder": {"type": "Fuse"}}', "not a usable tokenizer"),
        (b'{"decoder": {"type": "Fuse"}, "added_tokens": [1]}', "not a usable tokenizer"),
        (b'{"decoder": {"type": "Fuse"}, "added_tokens": 7}', "not a usable tokenizer"),
    ],
)
def test_a_broken_tokenizer_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.from_directory(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_without_its_unknown_token_is_refused(tmp_path: Path) -> None:
    directory = edited_copy(tmp_path, model={"byte_fallback": False, "unk_token": "<none>"})
    with pytest.raises(CheckpointError, match=r"is not a usable tokenizer: .*`<none>` not found"):
        Tokenizer.from_directory(directory)


def test_a_text_that_the_library_cannot_encode_is_refused() -> None:
    with mock.patch.object(TOKENIZER, "_engine") as engine:
        engine.encode_batch_fast.side_effect = Exception("it broke")
        with pytest.raises(InputError, match=r"cannot encode this text: .*it broke"):
            TOKENIZER.encode("a")


def test_an_empty_tokenizer_has_an_empty_vocabulary(tmp_path: Path) -> None:
    directory = edited_copy(tmp_path, added_tokens=[], model={"vocab": {}, "merges": [], "unk_token": None})
    assert Tokenizer.from_directory(directory).vocab_size == 0


def test_a_truncated_tokenizer_is_refused(tmp_path: Path) -> None:
    whole = (DIRECTORY / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        Tokenizer.from_directory(tmp_path)


def test_an_oversized_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate((256 << 20) + 1)
    with pytest.raises(CheckpointError, match="at most 268435456 are read"):
        Tokenizer.from_directory(tmp_path)


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    edited_copy(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        {"type": "Replace", "pattern": {"String": "ab"}, "content": "c"},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "c"},
    ],
    ids=["ByteLevel", "Strip", "Replace of two characters", "Replace by pattern"],
)  # fmt: skip
def test_decoders_that_cannot_be_read_piecewise_are_refused(
    tmp_path: Path, decoder: dict[str, object]
) -> None:
    with pytest.raises(CheckpointError, match="dgemma reads tokenizers of Gemma's kind"):
        Tokenizer.from_directory(edited_copy(tmp_path, decoder=decoder))


def test_a_text_that_cannot_fit_is_refused_without_being_encoded() -> None:
    tokenizer = TOKENIZER
    limited = tokenizer.limited(10)
    assert tokenizer._longest is not None
    longest = max((limited._engine.id_to_token(id_) or "" for id_ in range(limited.vocab_size)), key=len)
    assert len(longest) == tokenizer._longest
    most = 10 * len(longest)
    limited.encode("a" * most)  # which has more tokens, but could have ten
    with pytest.raises(InputError, match=r"so at least 10 tokens; at most 10 fit") as caught:
        limited.encode("a" * (most + 1))
    assert caught.value.code == "context_length_exceeded"
    tokenizer.encode("a" * (most + 1))  # the original has no limit
    engine = mock.Mock(wraps=limited._engine)
    with mock.patch.object(limited, "_engine", engine), pytest.raises(InputError):
        limited.encode("a" * (8 << 20))
    assert not engine.mock_calls


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "NFKC"}),
        ("normalizer", {"type": "Replace", "pattern": {"String": "aa"}, "content": "a"}),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "a"}),
        ("model", {"type": "Unigram"}),
        ("model", {"type": "BPE", "byte_fallback": False}),
    ],
)
def test_where_characters_may_be_dropped_nothing_is_refused_by_their_number(part: str, value: Any) -> None:
    good = {"normalizer": None, "model": {"type": "BPE", "byte_fallback": True}}
    assert _is_bounded(good)
    assert not _is_bounded({**good, part: value})


@given(st.text(max_size=200))
def test_no_text_has_fewer_tokens_than_the_bound_says(text: str) -> None:
    tokenizer = TOKENIZER
    assert tokenizer._longest is not None
    assert len(tokenizer.encode(text)) >= len(text) / tokenizer._longest
