"""The header of a GGUF file: metadata and the table of tensors. Imports no torch, and reads no weights.

A file is untrusted: every length, count, type and offset is checked before anything of that size is read.
Arrays of strings and long arrays (vocabularies) are skipped; long strings stay in the file until `text` reads
them.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from dgemma.errors import CheckpointError

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32  # of tensors, where the file sets no other
SUFFIX = ".gguf"

_MAX_HEADER_BYTES = 128 << 20  # 262,144 tokens, their merges and a whole tokenizer.json take 55 MB
_MAX_ENTRIES = 1 << 12
_MAX_STRINGS = 1 << 22  # in arrays
_MAX_TENSORS = 100_000
_MAX_KEY_BYTES = 1 << 16
_MAX_NAME_BYTES = 64
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_MAX_KEPT_ITEMS = 1024  # of an array; one number per layer at most is needed
_MAX_KEPT_BYTES = 64 << 10  # of a string

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclass(frozen=True)
class GgmlType:
    """How numbers are stored: so many of them in a block of so many bytes."""

    name: str
    block_len: int
    block_bytes: int


GGML_TYPES = {
    number: GgmlType(*fields)
    for number, fields in {
        0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
        15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
        28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
        41: ("Q1_0", 128, 18),
    }.items()
}  # fmt: skip
TYPE_NUMBERS = {kind.name: number for number, kind in GGML_TYPES.items()}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor. shape: outermost dimension first, as everywhere here; the file has it the other way."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    start: int  # from the beginning of the file
    nbytes: int


@dataclass(frozen=True)
class LongText:
    """A string that was left in the file."""

    start: int
    nbytes: int


@dataclass(frozen=True)
class LongArray:
    """An array of strings, or of many numbers, that was skipped."""

    count: int


Value = int | float | bool | str | tuple[Any, ...] | LongText | LongArray


@dataclass(frozen=True)
class GgufFile:
    """Metadata and tensors of one file."""

    path: Path
    metadata: dict[str, Value] = field(repr=False)
    tensors: dict[str, GgufTensor] = field(repr=False)

    def refuse(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {problem}")

    def text(self, key: str, *, max_bytes: int) -> str | None:
        """A string of the metadata, however long; None if the file has none of this name."""
        value = self.metadata.get(key)
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, LongText):
            raise self.refuse(f"has {key!r} as another type than a string; it is corrupt.")
        if value.nbytes > max_bytes:
            raise self.refuse(f"has {value.nbytes} bytes in {key!r}; at most {max_bytes} are read.")
        with _open(self.path) as file:
            file.seek(value.start)
            return _decode(self.path, file.read(value.nbytes), key)


def is_gguf(path: str | Path) -> bool:
    """Whether `path` names a GGUF file, by its suffix."""
    return Path(path).suffix.lower() == SUFFIX


def read_gguf(path: str | Path) -> GgufFile:
    """The header of a file, after checking every number in it. Once, while the file stays as it is."""
    file = Path(path)
    try:
        status = file.stat()
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist; give a GGUF file.") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
    return _read(file, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4)
def _read(path: Path, changed: int, size: int) -> GgufFile:
    with _open(path) as file:
        return _Header(path, file, os.fstat(file.fileno()).st_size).read()


def _open(path: Path) -> IO[bytes]:
    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file.")
    return os.fdopen(descriptor, "rb")


def _decode(path: Path, text: bytes, where: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} has {where!r} in bytes that are not UTF-8; it is corrupt.") from None


class _Header:
    """Reads the header from front to back."""

    def __init__(self, path: Path, file: IO[bytes], size: int) -> None:
        self._path, self._file, self._size = path, file, size
        self._limit = min(size, _MAX_HEADER_BYTES)
        self._at = 0
        self._num_strings = 0

    def read(self) -> GgufFile:
        magic = self._bytes(4)
        if magic != MAGIC:
            raise self._refuse(f"begins with {magic!r}, not with {MAGIC!r}; it is not a GGUF file.")
        version = self._number("I")
        if version not in (2, VERSION):
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
            if swapped in (1, 2, VERSION):
                raise self._refuse("is big-endian; dgemma reads little-endian GGUF files.")
            raise self._refuse(f"is of GGUF version {version}; dgemma reads 2 and 3.")
        num_tensors, num_entries = self._number("Q"), self._number("Q")
        if num_tensors > _MAX_TENSORS or num_entries > _MAX_ENTRIES:
            raise self._refuse(
                f"claims {num_tensors} tensors and {num_entries} metadata entries; at most {_MAX_TENSORS} "
                f"and {_MAX_ENTRIES} are read. It is corrupt."
            )
        metadata = self._metadata(num_entries)
        found = [self._tensor() for _ in range(num_tensors)]
        return GgufFile(self._path, metadata, self._placed(found, self._alignment(metadata)))

    def _metadata(self, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for _ in range(count):
            key = self._string("a key", _MAX_KEY_BYTES)
            if key in metadata:
                raise self._refuse(f"has the key {key!r} twice; it is corrupt or hostile.")
            metadata[key] = self._value(key, self._number("I"))
        return metadata

    def _value(self, key: str, kind: int) -> Value:
        if kind == STRING:
            return self._text(key)
        if kind == ARRAY:
            return self._array(key)
        if kind not in SCALARS:
            raise self._refuse(f"has {key!r} of type {kind}, which GGUF does not have; it is corrupt.")
        return self._scalar(key, kind)

    def _scalar(self, key: str, kind: int) -> int | float | bool:
        value: int | float = self._number(SCALARS[kind])
        if kind != BOOL:
            return value
        if value not in (0, 1):
            raise self._refuse(f"has {value} for {key!r}, which is a boolean; it is corrupt.")
        return bool(value)

    def _text(self, key: str) -> str | LongText:
        length = self._length(1, key)
        if length > _MAX_KEPT_BYTES:
            found = LongText(self._at, length)
            self._skip(length)
            return found
        return _decode(self._path, self._bytes(length), key)

    def _array(self, key: str) -> Value:
        kind = self._number("I")
        if kind == ARRAY:
            raise self._refuse(f"has arrays within the array {key!r}; dgemma reads none of these.")
        if kind != STRING and kind not in SCALARS:
            raise self._refuse(f"has {key!r} of items of type {kind}, which GGUF does not have.")
        if kind == STRING:
            count = self._length(8, key)
            self._skip_strings(key, count)
            return LongArray(count)
        item_bytes = struct.calcsize(SCALARS[kind])
        count = self._length(item_bytes, key)
        if count > _MAX_KEPT_ITEMS:
            self._skip(count * item_bytes)
            return LongArray(count)
        return tuple(self._scalar(key, kind) for _ in range(count))

    def _skip_strings(self, key: str, count: int) -> None:
        self._num_strings += count
        if self._num_strings > _MAX_STRINGS:
            raise self._refuse(f"has more than {_MAX_STRINGS} strings up to {key!r}; it is corrupt.")
        read, at, limit = self._file.read, self._at, self._limit
        for _ in range(count):
            length = int.from_bytes(read(8), "little")
            at += 8 + length
            if at > limit:
                self._at = limit
                self._move(1)  # refuses
            read(length)
        self._at = at

    def _tensor(self) -> GgufTensor:
        name = self._string("a tensor's name", _MAX_NAME_BYTES)

        def refuse(problem: str) -> CheckpointError:
            return self._refuse(f"describes tensor {name!r} wrongly: {problem}.")

        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise refuse(f"it has {num_dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are possible")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        if 0 in shape or math.prod(shape) >= 1 << 62:
            raise refuse(f"its shape is {list(shape)}")
        number, offset = self._number("I"), self._number("Q")
        if number not in GGML_TYPES:
            raise refuse(f"type {number} is not known")
        kind = GGML_TYPES[number]
        if shape[-1] % kind.block_len:
            raise refuse(f"rows of {shape[-1]} are not whole blocks of {kind.block_len} ({kind.name})")
        return GgufTensor(name, kind, shape, offset, math.prod(shape) // kind.block_len * kind.block_bytes)

    def _alignment(self, metadata: dict[str, Value]) -> int:
        alignment = metadata.get("general.alignment", ALIGNMENT)
        is_power = (
            type(alignment) is int and 0 < alignment <= _MAX_ALIGNMENT and not alignment & alignment - 1
        )
        if not is_power or not isinstance(alignment, int):
            raise self._refuse(f"has {alignment!r} for general.alignment; it must be a power of two.")
        return alignment

    def _placed(self, found: list[GgufTensor], alignment: int) -> dict[str, GgufTensor]:
        """The tensors with their places in the file, which they fill without gap or overlap."""
        begin = self._at + -self._at % alignment
        tensors: dict[str, GgufTensor] = {}
        end = begin
        for tensor in sorted(found, key=lambda t: t.start):
            if tensor.name in tensors:
                raise self._refuse(f"names tensor {tensor.name!r} twice; it is corrupt or hostile.")
            if begin + tensor.start != end + -end % alignment:
                raise self._refuse(f"has a gap or an overlap at tensor {tensor.name!r}; it is corrupt.")
            start = begin + tensor.start
            end = start + tensor.nbytes
            tensors[tensor.name] = GgufTensor(tensor.name, tensor.type, tensor.shape, start, tensor.nbytes)
        if tensors and end > self._size:
            raise self._refuse(
                f"is truncated: its tensors need {end} bytes, it has {self._size}. Download it again."
            )
        if self._size - end >= alignment:
            raise self._refuse(f"has {self._size - end} bytes after its last tensor; it is corrupt.")
        return tensors

    def _string(self, what: str, most: int) -> str:
        length = self._number("Q")
        if length > most:
            raise self._refuse(f"has {what} of {length} bytes; at most {most} are possible. It is corrupt.")
        return _decode(self._path, self._bytes(length), what)

    def _length(self, item_bytes: int, key: str) -> int:
        """A count of items, which the rest of the header has room for."""
        count: int = self._number("Q")
        if count * item_bytes > self._limit - self._at:
            raise self._refuse(
                f"claims {count} items or bytes in {key!r}, more than its header can hold; it is truncated "
                "or corrupt. Download it again."
            )
        return count

    def _number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self._bytes(struct.calcsize(kind)))[0]

    def _bytes(self, count: int) -> bytes:
        self._move(count)
        found = self._file.read(count)
        if len(found) != count:
            raise self._refuse("ended inside its header; it changed on disk.")
        return found

    def _skip(self, count: int) -> None:
        self._move(count)
        self._file.seek(count, os.SEEK_CUR)

    def _move(self, count: int) -> None:
        if self._at + count > self._limit:
            which = "ends inside its header; it is truncated. Download it again."
            if self._size > _MAX_HEADER_BYTES:
                which = f"has a header of more than {_MAX_HEADER_BYTES >> 20} MiB; it is corrupt."
            raise self._refuse(which)
        self._at += count

    def _refuse(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path} {problem}")
