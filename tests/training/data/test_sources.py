"""Sources give every record by number, text windows every token; faults are told with file and line."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.errors import InputError
from dgemma.training.data import jsonl, text_windows
from dgemma.training.data.jsonl import JsonLines
from dgemma.training.data.records import RecordReader
from dgemma.training.data.sources import RecordSource, StreamSource, open_files, open_source
from dgemma.training.data.text_windows import TextSource, WindowLayout
from text.bundled import TOKENIZER, ids_of

READER = RecordReader(tokenizer=TOKENIZER, max_length=16)
BOS, EOS = ids_of("<bos><eos>")


def by_number(data: Any, reader: RecordReader = READER) -> RecordSource:
    source = open_source(data, reader)
    assert not isinstance(source, StreamSource)
    return source


def texts(source: RecordSource) -> list[str]:
    found = []
    for index in range(source.num_records):
        (example,) = source.read(index, epoch=0, seed=0).examples
        found.append(TOKENIZER.decode(example.tokens))
    return found


def write(path: Path, *lines: bytes | str) -> Path:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


# JSON lines


def test_json_lines_are_read_by_number(tmp_path: Path) -> None:
    file = write(
        tmp_path / "d.jsonl", '\ufeff{"text": "a"}', "", "  \t\r", '{"text": "b"}\r', '{"text": "ü"}', ""
    )
    source = by_number(file)
    assert texts(source) == ["a", "b", "ü"]
    assert texts(by_number(str(file))) == ["a", "b", "ü"]


def test_a_last_line_without_an_end_counts(tmp_path: Path) -> None:
    assert texts(by_number(write(tmp_path / "d.jsonl", '{"text": "a"}', '{"text": "b"}'))) == ["a", "b"]


def test_several_files_are_one_source_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / "b.jsonl", '{"text": "b1"}', '{"text": "b2"}')
    write(tmp_path / "a.jsonl", '{"text": "a"}')
    write(tmp_path / "empty.jsonl", "")
    write(tmp_path / "sub" / "c.jsonl", '{"text": "c"}')
    write(tmp_path / ".hidden" / "d.jsonl", '{"text": "d"}')
    write(tmp_path / "notes.log", "not data")
    assert texts(by_number(tmp_path)) == ["a", "b1", "b2", "c"]
    assert texts(by_number(f"{tmp_path}/*.jsonl")) == ["a", "b1", "b2"]
    assert texts(by_number(f"{tmp_path}/**/c.jsonl")) == ["c"]


def test_a_name_with_brackets_that_exists_is_no_pattern(tmp_path: Path) -> None:
    assert texts(by_number(write(tmp_path / "d[1].jsonl", '{"text": "a"}'))) == ["a"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "\xff"}', "byte 11 of the line is not UTF-8; store the file"),
        (b'{"text": "a"', "the line is not JSON: .* at character 13"),
        (b"[1, 2]", "the line is of type list; a record is an object"),
        (b"7", "the line is of type int"),
        (b'{"tokens": [NaN]}', "cannot be read as JSON: it holds NaN, which is not JSON"),
        (b'{"tokens": [-Infinity]}', "it holds -Infinity"),
        (b'{"a": ' + b"[" * 200_000, "cannot be read as JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "cannot be read as JSON"),
        (b'{"text": "a"} {"text": "b"}', "the line is not JSON: Extra data at character 15"),
        (b'{"text": "\\ud800"}', r"lone surrogate U\+D800"),
        (b'{"texts": "a"}', "given by one of the keys"),
        (b'{"text": "' + b"x" * 300_000 + b'"}', "the line has more than 262144 bytes; a file has one"),
    ],
    ids=range(12),
)  # fmt: skip
def test_a_broken_line_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, problem: str
) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1 << 18)
    file = write(tmp_path / "d.jsonl", '{"text": "a"}', "", line, '{"text": "b"}')
    source = by_number(file)
    assert source.num_records == 3
    for good in (0, 2):  # a fault elsewhere stops nobody
        source.read(good, epoch=0, seed=0)
    with pytest.raises(InputError, match=f"d.jsonl:3: .*{problem}") as caught:
        source.read(1, epoch=0, seed=0)
    assert str(caught.value).startswith(str(file))
    assert str(caught.value).count(str(file)) == 1


def test_a_line_that_begins_with_a_megabyte_of_blanks_is_not_lost(tmp_path: Path) -> None:
    file = write(tmp_path / "d.jsonl", b" " * (3 << 20) + b'{"text": "a"}', '{"text": "b"}')
    assert texts(by_number(file)) == ["a", "b"]


def test_the_index_of_a_large_file_is_small(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 100}).encode() + b"\n"
    (tmp_path / "d.jsonl").write_bytes(line * 100_000)
    tracemalloc.start()
    lines = JsonLines(tmp_path / "d.jsonl")
    size, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(lines) == 100_000
    assert size < 12 * 100_000
    assert peak < 30 * 100_000
    assert lines[99_999] == {"text": "x" * 100}
    assert lines.where(99_999).endswith("d.jsonl:100000")


def test_a_file_that_changes_while_in_use_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "d.jsonl", '{"text": "a"}')
    source = by_number(file)
    write(file, '{"text": "ab"}')
    with pytest.raises(InputError, match=r"d\.jsonl changed while it was in use; start again"):
        source.read(0, epoch=0, seed=0)
    file.unlink()
    with pytest.raises(InputError, match=r"d\.jsonl cannot be read: No such file"):
        source.read(0, epoch=0, seed=0)


def test_opening_tells_how_far_it_is(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "a"})] * 40_000
    file = write(tmp_path / "d.jsonl", *lines)
    seen: list[tuple[int, int | None]] = []
    open_source(file, READER, progress=lambda done, total: seen.append((done, total)))
    size = file.stat().st_size
    assert len(seen) == 3
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (size, size)


# Texts


@given(st.integers(1, 400), st.integers(1, 40), st.data())
def test_windows_hold_every_token_once_for_every_shift(length: int, size: int, data: st.DataObject) -> None:
    windows = WindowLayout(length=length, size=size)
    shift = data.draw(st.sampled_from(windows.shifts))
    borders = [windows.window(number, shift) for number in range(windows.count)]
    assert [place for start, stop in borders for place in range(start, stop)] == list(range(length))
    assert all(0 < stop - start <= size for start, stop in borders)
    assert windows.count - -(-length // size) in (0, 1)
    if length > size:
        assert len(windows.shifts) >= size // 2
    else:
        assert windows.count == 1


def text_of(source: RecordSource, indices: range, epoch: int, seed: int = 0) -> tuple[list[int], list[bool]]:
    """The windows' tokens joined, and which windows are clipped."""
    tokens: list[int] = []
    clipped = []
    for index in indices:
        (example,) = source.read(index, epoch=epoch, seed=seed).examples
        assert example.tokens[0] == BOS
        assert len(example.tokens) <= 16
        (span,) = example.responses
        assert (span.start, span.stop) == (1, len(example.tokens))
        tokens += example.tokens[1:]
        clipped.append(example.clipped)
    return tokens, clipped


def test_a_text_is_shown_whole_in_every_epoch_with_other_borders(tmp_path: Path) -> None:
    words = " ".join(f"word{i}" for i in range(200))
    first, second = write(tmp_path / "a.txt", words), write(tmp_path / "b.md", "short")
    write(tmp_path / "__init__.py", "\n")  # blank: no document
    source = by_number(tmp_path)
    num_windows = by_number(first).num_records
    assert source.num_records == num_windows + 1
    starts = set()
    for epoch in range(8):
        tokens, clipped = text_of(source, range(num_windows), epoch)
        assert tokens == [*TOKENIZER.encode(words), EOS]
        # All but the last window: the text goes on.
        assert clipped == [True] * (num_windows - 1) + [False]
        (example,) = source.read(0, epoch=epoch, seed=0).examples
        starts.add(len(example.tokens))
        # Documents are not mixed in a window.
        assert text_of(source, range(num_windows, num_windows + 1), epoch)[0] == ids_of("short<eos>")
    assert len(starts) > 3
    assert text_of(source, range(num_windows), 0, seed=1)[0] == [*TOKENIZER.encode(words), EOS]
    assert [len(source.read(0, epoch=e, seed=0).examples[0].tokens) for e in range(8)] != [
        len(source.read(0, epoch=e, seed=1).examples[0].tokens) for e in range(8)
    ]
    assert second.read_text() == "short"


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "\n", "\n\n", " b", "ü", "the\n", "x" * 9, "\r\n"]), max_size=30))
def test_chunks_join_to_the_text_and_end_at_lines(tmp_path_factory: Any, parts: list[str]) -> None:
    text = "".join(parts)
    file = tmp_path_factory.mktemp("t") / "t.txt"
    file.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_windows, "_READ_BYTES", 7)
        patch.setattr(text_windows, "MAX_CHUNK_CHARS", 20)
        chunks = [chunk for chunk, _ in text_windows._chunks(file) if chunk]
    assert "".join(chunks) == text
    for chunk, after in pairwise(chunks):
        assert len(chunk) >= 20 or (chunk.endswith("\n") and not after[0].isspace())
    assert all(len(chunk) < 20 + 7 for chunk in chunks)


def test_a_long_text_is_encoded_as_its_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_windows, "_READ_BYTES", 64)
    text = "".join(f"Line {i}, and a bit more.\n" for i in range(50))
    source = by_number(write(tmp_path / "a.txt", text))
    tokens, _ = text_of(source, range(source.num_records), 0)
    assert TOKENIZER.decode(tokens) == text


def test_reading_texts_tells_how_far_it_is(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "a" * 10)
    write(tmp_path / "b.txt", "b" * 30)
    seen: list[tuple[int, int | None]] = []
    open_source(tmp_path, READER, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (40, 40)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert texts(by_number(write(tmp_path / "a.txt", "\ufeffa"))) == ["a"]


@pytest.mark.parametrize(("bad", "line"), [(b"a\nb\n\xff\n", 3), (b"a\nb\xc3", 2), (b"\xff", 1)])
def test_text_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path, bad: bytes, line: int) -> None:
    with pytest.raises(InputError, match=f"a.txt:{line}: the text is not UTF-8"):
        open_source(write(tmp_path / "a.txt", bad), READER)


# Python's


def test_sequences_are_read_by_number_and_streams_in_turn() -> None:
    records = [{"text": "a"}, {"text": "b"}]

    class Table:  # as data set libraries have them: a length and items, not always an iterator
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> dict[str, str]:
            return records[index]

    assert texts(by_number(records)) == texts(by_number(Table())) == ["a", "b"]
    stream = open_source(iter(records), READER)
    assert isinstance(stream, StreamSource)
    assert not stream.is_repeatable


def test_faults_in_records_are_told_with_their_number() -> None:
    with pytest.raises(InputError, match=r"^record 1: the record's format"):
        by_number([{"text": "a"}, {}]).read(1, epoch=0, seed=0)
    stream = open_source((record for record in [{"text": "a"}, {}, {"text": "b"}]), READER)
    assert isinstance(stream, StreamSource)
    good, bad, after = stream.readings()
    assert isinstance(bad, InputError)
    assert str(bad).startswith("record 1: ")
    assert not isinstance(good, InputError)
    assert not isinstance(after, InputError)


# Refused at opening


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("absent.jsonl", "absent.jsonl does not exist; give a file, a directory or a pattern"),
        ("*.none", "does not exist"),
        (
            "d.json",
            r"d.json ends in '.json'; known are .jsonl, .parquet, .txt, .md, .py; did you mean '.jsonl'",
        ),
        ("*.gz", r"ends in '.gz'; known are"),
        (
            "mixed",
            "mixed holds both JSON lines and text files; give one as data.path, the other as data.also",
        ),
        ("nothing", "nothing holds no file that ends in .jsonl, .parquet, .txt, .md, .py"),
        ("blank.jsonl", "blank.jsonl holds no records; there is nothing to learn"),
        ("blank.txt", "blank.txt holds no records"),
    ],
)
def test_data_that_cannot_be_opened_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    for directory in ("mixed", "nothing"):
        (tmp_path / directory).mkdir()
    for file in ("d.json", "d.jsonl.gz", "blank.jsonl", "blank.txt", "mixed/a.txt", "mixed/a.jsonl"):
        write(tmp_path / file, " \n")
    with pytest.raises(InputError, match=problem):
        open_source(f"{tmp_path}/{name}", READER)


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, suffix: str) -> None:
    absent = tmp_path / f"absent{suffix}"
    with pytest.raises(InputError, match=f"absent{suffix} cannot be read: No such file"):
        JsonLines(absent) if suffix == ".jsonl" else TextSource([absent], READER)


def test_a_text_that_vanishes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.txt cannot be read: No such file"):
        list(text_windows._chunks(tmp_path / "gone.txt"))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"text": "a"}, "data is of type dict; give a path, or a list or stream of records"),
        (b"a.jsonl", "data is of type bytes"),
        (7, "data is of type int"),
        ([], "data holds no records"),
    ],
)
def test_what_is_no_data_is_refused(data: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        open_source(data, READER)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tokenizer": TOKENIZER}, "windows of max_length tokens; give max_length"),
        ({"max_length": 9}, "there is no tokenizer"),
        ({"tokenizer": TOKENIZER, "max_length": 9, "vocab_size": 50}, "tokens are from 0 to 49"),
    ],
)
def test_texts_need_a_tokenizer_and_a_length(tmp_path: Path, options: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        open_source(write(tmp_path / "a.txt", "abc"), RecordReader(**options))


def test_texts_need_a_bos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordReader, "bos", lambda _: ())
    with pytest.raises(InputError, match="the tokenizer has no <bos> to put before a window"):
        open_source(write(tmp_path / "a.txt", "abc"), READER)


def test_the_data_side_needs_no_torch() -> None:
    code = "import dgemma.training.data.stream, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_several_paths_of_any_formats_are_one_source(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("One two three.")
    (tmp_path / "chats.jsonl").write_text('{"text": "Four."}\n{"text": "Five."}\n')
    paths = [tmp_path / "notes.txt", tmp_path / "chats.jsonl"]
    assert texts(open_files(paths, READER)) == ["One two three.", "Four.", "Five."]
    assert texts(open_files([*paths, paths[1]], READER))[3:] == ["Four.", "Five."]
    (tmp_path / "chats.jsonl").write_text('{"text": "Four."}\n{"text": 5}\n')
    with pytest.raises(InputError, match=r"chats.jsonl:2: text is"):
        open_files(paths, READER).read(2, epoch=0, seed=0)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InputError, match=r"empty.jsonl holds no records"):
        open_files([*paths, tmp_path / "empty.jsonl"], READER)
