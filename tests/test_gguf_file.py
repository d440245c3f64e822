"""A GGUF header is read as the gguf package reads it; a broken or hostile one is refused by name, cheaply."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma import gguf_file
from dgemma.errors import CheckpointError
from dgemma.gguf_file import GGML_TYPES, LongArray, LongText, read_gguf
from gguf_files import data_of, metadata_of, tiny_config, type_by_part, write_gguf
from sizes import cases

U32, U64, F32, TEXT, LIST, BOOL = 4, 10, 6, 8, 9, 7


@dataclass
class Bytes:
    """A GGUF file by hand. fields: the place and width of every number that describes the file."""

    data: bytearray = field(default_factory=bytearray)
    fields: list[tuple[str, int, int]] = field(default_factory=list)

    def number(self, name: str, value: int, kind: str = "Q") -> Bytes:
        self.fields.append((name, len(self.data), struct.calcsize(kind)))
        self.data += struct.pack("<" + kind, value)
        return self

    def text(self, name: str, value: str | bytes) -> Bytes:
        raw = value if isinstance(value, bytes) else value.encode()
        self.number(f"{name} length", len(raw))
        self.data += raw
        return self

    def entry(self, key: str | bytes, kind: int, *values: object) -> Bytes:
        self.text("key", key).number("type", kind, "I")
        match kind:
            case 8:
                self.text("value", str(values[0]))
            case 9:
                self.number("item type", U32, "I").number("count", len(values))
                self.data += struct.pack(f"<{len(values)}I", *values)
            case _:
                self.data += struct.pack("<" + gguf_file.SCALARS[kind], values[0])
        return self

    def tensor(self, name: str, shape: tuple[int, ...], offset: int, kind: int = 0) -> Bytes:
        self.text("tensor name", name).number("dimensions", len(shape), "I")
        for length in reversed(shape):
            self.number("length", length)
        return self.number("tensor type", kind, "I").number("offset", offset)

    def padded(self, more: int) -> Bytes:
        self.data += bytes(-len(self.data) % 32 + more)
        return self


def start(num_tensors: int, num_entries: int, version: int = 3) -> Bytes:
    found = Bytes(bytearray(b"GGUF")).number("version", version, "I")
    return found.number("tensors", num_tensors).number("entries", num_entries)


def good() -> Bytes:
    found = start(3, 4).entry("general.architecture", TEXT, "toy").entry("general.alignment", U32, 32)
    found.entry("toy.yes", BOOL, 1).entry("toy.list", LIST, 1, 2, 3)
    found.tensor("a", (2, 4), 0).tensor("b", (3, 32), 32, 8).tensor("c", (5,), 160)
    return found.padded(160 + 20)


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes | bytearray], gguf_file.GgufFile]:
    numbers = iter(range(1 << 30))

    def read_bytes(data: bytes | bytearray) -> gguf_file.GgufFile:
        path = tmp_path / f"{next(numbers)}.gguf"
        path.write_bytes(data)
        return read_gguf(path)

    return read_bytes


Read = Callable[[bytes | bytearray], gguf_file.GgufFile]


def test_the_table_of_types_is_the_packages() -> None:
    known = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {n: (t.name, t.block_len, t.block_bytes) for n, t in GGML_TYPES.items()} == known


def test_metadata_and_tensors_are_those_the_package_reads(tmp_path: Path) -> None:
    config = tiny_config()
    data, _ = data_of(config, type_by_part("Q4_K"))
    path = write_gguf(tmp_path / "model.gguf", data, {**metadata_of(config), "a.text": "ü", "a.half": 0.5})
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    for name, known in theirs.fields.items():
        if not name.startswith("GGUF."):
            value = known.contents()
            assert ours.metadata[name] == (tuple(value) if isinstance(value, list) else value), name
    assert len(ours.metadata) == len(theirs.fields) - 3
    assert len(ours.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert (found.type.name, found.start, found.nbytes) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
        assert found.shape == tuple(reversed(tensor.shape.tolist()))


def test_a_vocabulary_is_skipped_and_a_long_text_is_left_in_the_file(tmp_path: Path) -> None:
    metadata = {"a.tokens": ["t"] * 5000, "a.scores": [0.5] * 5000, "a.long": "x" * 70_000 + "ü", "a.last": 7}
    found = read_gguf(write_gguf(tmp_path / "m.gguf", {}, metadata))
    assert found.metadata["a.tokens"] == found.metadata["a.scores"] == LongArray(5000)
    assert isinstance(found.metadata["a.long"], LongText)
    assert found.metadata["a.last"] == 7
    assert found.text("a.long", max_bytes=1 << 20) == "x" * 70_000 + "ü"
    assert found.text("general.architecture", max_bytes=1) == "diffusion-gemma"
    assert found.text("absent", max_bytes=1) is None
    with pytest.raises(CheckpointError, match=r"has 70002 bytes in 'a.long'; at most 100 are read"):
        found.text("a.long", max_bytes=100)
    with pytest.raises(CheckpointError, match=r"has 'a.last' as another type than a string"):
        found.text("a.last", max_bytes=100)


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"a": 1})
    assert read_gguf(path) is read_gguf(path)
    write_gguf(path, {}, {"a": 1, "b": 2})
    assert read_gguf(path).metadata["b"] == 2


def patched(found: Bytes, field_name: str, value: int, which: int = 0) -> bytearray:
    at, width = [(at, width) for name, at, width in found.fields if name == field_name][which]
    data = bytearray(found.data)
    data[at : at + width] = value.to_bytes(width, "little")
    return data


def after(found: Bytes, extra: bytes) -> bytearray:
    return found.data + extra


HOSTILE: dict[str, tuple[Callable[[], bytes | bytearray], str]] = {
    "empty": (lambda: b"", "ends inside its header"),
    "zip": (lambda: b"PK\x03\x04" * 9, "it is not a GGUF file"),
    "version 1": (lambda: patched(good(), "version", 1), "is of GGUF version 1; dgemma reads 2 and 3"),
    "big-endian": (lambda: patched(good(), "version", 3 << 24), "is big-endian"),
    "tensors": (lambda: patched(good(), "tensors", 1 << 63), "claims 9223372036854775808 tensors"),
    "entries": (lambda: patched(good(), "entries", 1 << 20), "1048576 metadata entries; at most"),
    "a long key": (lambda: patched(good(), "key length", 1 << 40), "a key of 1099511627776 bytes"),
    "a long value": (lambda: patched(good(), "value length", 1 << 60), "items or bytes in 'general.arch"),
    "a long list": (lambda: patched(good(), "count", 1 << 61), "items or bytes in 'toy.list'"),
    "an unknown type": (lambda: patched(good(), "type", 13), "of type 13, which GGUF does not have"),
    "an unknown item type": (lambda: patched(good(), "item type", 99), "of items of type 99"),
    "lists in a list": (lambda: patched(good(), "item type", LIST), "arrays within the array 'toy.list'"),
    "a doubtful boolean": (lambda: start(0, 1).entry("b", BOOL, 2).data, "has 2 for 'b', which is a boolean"),
    "a key twice": (lambda: start(0, 2).entry("b", BOOL, 1).entry("b", BOOL, 1).data, "key 'b' twice"),
    "a key in latin-1": (lambda: start(0, 1).entry(b"\xfc", BOOL, 1).data, "bytes that are not UTF-8"),
    "alignment 0": (lambda: start(0, 1).entry("general.alignment", U32, 0).data, "has 0 for general.al"),
    "alignment 24": (lambda: start(0, 1).entry("general.alignment", U32, 24).data, "a power of two"),
    "alignment 2^30": (lambda: start(0, 1).entry("general.alignment", U32, 1 << 30).data, "a power of two"),
    "alignment in text": (lambda: start(0, 1).entry("general.alignment", TEXT, "8").data, "power of two"),
    "a long name": (lambda: start(1, 0).tensor("n" * 65, (1,), 0).padded(4).data, "name of 65 bytes"),
    "no dimensions": (lambda: start(1, 0).tensor("t", (), 0).padded(4).data, "it has 0 dimensions"),
    "five dimensions": (lambda: start(1, 0).tensor("t", (1,) * 5, 0).padded(4).data, "5 dimensions"),
    "a length of 0": (lambda: start(1, 0).tensor("t", (0, 4), 0).padded(4).data, r"its shape is \[0, 4\]"),
    "a vast shape": (lambda: start(1, 0).tensor("t", (1 << 40, 1 << 40), 0).padded(4).data, "its shape is"),
    "type 77": (lambda: patched(good(), "tensor type", 77), "type 77 is not known"),
    "half a block": (lambda: start(1, 0).tensor("t", (31,), 0, 8).padded(34).data, "not whole blocks of 32"),
    "a name twice": (
        lambda: start(2, 0).tensor("t", (8,), 0).tensor("t", (8,), 32).padded(64).data,
        "names tensor 't' twice",
    ),
    "an overlap": (lambda: patched(good(), "offset", 0, 1), "a gap or an overlap at tensor 'b'"),
    "a gap": (lambda: patched(good(), "offset", 192, 2), "a gap or an overlap at tensor 'c'"),
    "a wild offset": (lambda: patched(good(), "offset", (1 << 64) - 32, 2), "a gap or an overlap"),
    "not aligned": (lambda: patched(good(), "offset", 33, 1), "a gap or an overlap"),
    "a byte short": (lambda: good().data[:-1], "is truncated: its tensors need"),
    "bytes behind": (lambda: after(good(), bytes(64)), "bytes after its last tensor"),
    "many strings": (
        lambda: start(0, 1).text("key", "k").number("t", LIST, "I").number("i", TEXT, "I").data
        + struct.pack("<Q", (1 << 22) + 1) + bytes(8 * ((1 << 22) + 1)),
        "has more than 4194304 strings up to 'k'",
    ),
    "a string past the end": (
        lambda: start(0, 1).text("key", "k").number("t", LIST, "I").number("i", TEXT, "I").data
        + struct.pack("<QQQ", 2, 0, 1 << 50) + bytes(8),
        "ends inside its header",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_by_name(name: str, read: Read) -> None:
    make, words = HOSTILE[name]
    with pytest.raises(CheckpointError, match=words):
        read(make())


def test_a_header_without_end_is_refused(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "_MAX_HEADER_BYTES", 28)
    with pytest.raises(CheckpointError, match="has a header of more than 0 MiB"):
        read(good().data)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist; give a GGUF file"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(CheckpointError, match="cannot be read: Not a directory"):
        read_gguf(write_gguf(tmp_path / "m.gguf", {}, {}) / "m.gguf")
    (tmp_path / "dir.gguf").mkdir()
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_gguf(tmp_path / "dir.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_gguf(tmp_path / "pipe.gguf")
    os.symlink(tmp_path / "loop.gguf", tmp_path / "loop.gguf")
    with pytest.raises(CheckpointError, match="cannot be read: Too many levels"):
        read_gguf(tmp_path / "loop.gguf")


def test_a_file_that_goes_away_between_two_looks_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"a.long": "x" * 70_000})
    found = read_gguf(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        found.text("a.long", max_bytes=1 << 20)


EXTREMES = (
    0,
    1,
    2,
    7,
    8,
    9,
    31,
    33,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 62,
    (1 << 64) - 1,
)


def broken_files() -> Iterator[bytes]:
    """The good file with each of its numbers at each extreme, and cut off at every length."""
    whole = good()
    for _, at, width in whole.fields:
        for value in EXTREMES:
            if value < 1 << 8 * width:
                data = bytearray(whole.data)
                data[at : at + width] = value.to_bytes(width, "little")
                if data != whole.data:
                    yield bytes(data)
    yield from (bytes(whole.data[:length]) for length in range(len(whole.data)))


def test_more_than_500_broken_files_are_refused_in_little_memory(read: Read) -> None:
    assert len(read(good().data).tensors) == 3
    refused = accepted = 0
    tracemalloc.start()
    try:
        for data in broken_files():
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                read(data)
                accepted += 1  # another geometry, say, which the file can hold
            except CheckpointError as error:
                refused += ".gguf " in str(error)
            assert tracemalloc.get_traced_memory()[1] - before < 1 << 20
    finally:
        tracemalloc.stop()
    assert refused >= 500
    assert accepted <= 40


@settings(max_examples=cases(2000, 200), deadline=None)
@given(places=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6))
def test_any_changed_bytes_are_read_or_refused(
    places: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = bytearray(good().data)
    for at, value in places:
        data[at % len(data)] = value
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    path.write_bytes(data)
    try:
        found = read_gguf(path)
    except CheckpointError:
        return
    for tensor in found.tensors.values():
        assert 0 < tensor.start <= tensor.start + tensor.nbytes <= len(data)
