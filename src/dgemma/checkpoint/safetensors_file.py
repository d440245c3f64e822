"""Reading and writing safetensors files, one tensor at a time. Imports no torch.

The format is eight bytes of header length, a JSON header, and the bytes of the tensors. dgemma does not use
the safetensors library for two reasons: this module reads bytes directly into the tensor (the library maps
the whole file, which counts as resident memory), and it refuses a hostile header before any allocation.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dgemma.durable_files import replacing
from dgemma.errors import CheckpointError

ITEM_BITS = {
    "F4": 4, "BOOL": 8, "U8": 8, "I8": 8,
    "F8_E4M3": 8, "F8_E4M3FNUZ": 8, "F8_E5M2": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
ITEM_BYTES = {name: bits // 8 for name, bits in ITEM_BITS.items() if bits >= 8}
CHUNK_BYTES = 16 << 20
# The format allows 100 MB, which Python would read for half a minute; 16 MB describe 100,000 tensors.
_MAX_HEADER_BYTES = 16 << 20
_MAX_DIMENSIONS = 16


@dataclass(frozen=True)
class TensorEntry:
    """The location of one tensor in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int  # from the beginning of the file
    nbytes: int


def read_entries(path: Path) -> list[TensorEntry]:
    """All tensors of a file, after checking every number in its header."""
    with _open_regular(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        if file_bytes < 8:
            raise _file_error(path, f"has only {file_bytes} bytes; it is truncated. Download it again.")
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > _MAX_HEADER_BYTES:
            raise _file_error(
                path,
                f"claims a header of {header_bytes} bytes, more than {_MAX_HEADER_BYTES}; it is not a "
                "safetensors file, or has too many tensors: divide it into shards.",
            )
        if 8 + header_bytes > file_bytes:
            raise _file_error(path, "ends inside its header; it is truncated. Download it again.")
        text = file.read(header_bytes)
    header = _parse_header(path, text)
    begin = 8 + header_bytes
    entries = [_entry(path, name, raw, begin) for name, raw in header.items()]
    _check_layout(path, entries, begin, file_bytes)
    return entries


def read_chunks(entry: TensorEntry, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytearray]:
    """The bytes of a tensor in chunks. All chunks share one buffer."""
    buffer = bytearray(min(chunk_bytes, entry.nbytes))
    done = 0
    while done < entry.nbytes:
        if entry.nbytes - done < len(buffer):
            buffer = bytearray(entry.nbytes - done)
        read_into(entry, buffer, done)
        yield buffer
        done += len(buffer)


def read_into(entry: TensorEntry, target: Any, offset: int = 0) -> None:
    """Fill the writable buffer `target` with the tensor's bytes from `offset` on."""
    view = memoryview(target).cast("B")
    with _open_regular(entry.file) as file:
        file.seek(entry.start + offset)
        filled = 0
        while filled < len(view):
            # The operating system limits one read to 2 GiB; a short read is an error only if it is empty.
            got = file.readinto(view[filled : filled + (1 << 30)])
            if not got:
                raise _file_error(entry.file, f"ended inside tensor {entry.name!r}; it changed on disk.")
            filled += got


def same_content(first: TensorEntry, second: TensorEntry) -> bool:
    """Whether two tensors have the same type, size and bytes."""
    return (first.dtype, first.nbytes) == (second.dtype, second.nbytes) and all(
        a == b for a, b in zip(read_chunks(first), read_chunks(second), strict=True)
    )


def rows_of(entry: TensorEntry, rows: slice) -> TensorEntry:
    """Neighbouring rows of a tensor, as an entry of their own."""
    row_bytes = entry.nbytes // entry.shape[0]
    return replace(
        entry,
        shape=(rows.stop - rows.start, *entry.shape[1:]),
        start=entry.start + rows.start * row_bytes,
        nbytes=(rows.stop - rows.start) * row_bytes,
    )


def read_columns(entry: TensorEntry, columns: slice) -> Iterator[bytearray]:
    """Neighbouring columns of a matrix, row by row. All rows share one buffer."""
    num_rows, width = entry.shape
    item_bytes = ITEM_BYTES[entry.dtype]
    buffer = bytearray((columns.stop - columns.start) * item_bytes)
    with _open_regular(entry.file) as file:
        for row in range(num_rows):
            file.seek(entry.start + (row * width + columns.start) * item_bytes)
            if file.readinto(buffer) != len(buffer):
                raise _file_error(entry.file, f"ended inside tensor {entry.name!r}; it changed on disk.")
            yield buffer


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor to write to a file. `chunks` is called when its bytes are written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Any]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BITS[self.dtype] // 8


def write_file(
    path: Path, tensors: Iterable[TensorToWrite], on_bytes: Callable[[int], None] | None = None
) -> str:
    """Write one file -> its SHA-256. It gets its name only when it is complete and on disk."""
    ordered = _aligned(tensors)
    header = header_of(ordered)
    digest = hashlib.sha256(header)
    with replacing(path) as file:
        file.write(header)
        for tensor in ordered:
            written = 0
            for chunk in tensor.chunks():
                written += file.write(chunk)
                digest.update(chunk)
                if on_bytes is not None:
                    on_bytes(memoryview(chunk).nbytes)
            assert written == tensor.nbytes, (tensor.name, written, tensor.nbytes)
    return digest.hexdigest()


def header_of(tensors: Iterable[TensorToWrite]) -> bytes:
    """The first bytes of a file with these tensors, in the order `write_file` writes them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in _aligned(tensors):
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _aligned(tensors: Iterable[TensorToWrite]) -> list[TensorToWrite]:
    # Readers that map a file need every tensor aligned to its item size. Tensors of whole 8-byte words come
    # first, in their order; after them tensors of wider items first.
    return sorted(tensors, key=lambda t: 0 if t.nbytes % 8 == 0 else 9 - max(1, ITEM_BITS[t.dtype] // 8))


def _open_regular(path: Path) -> Any:
    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; the checkpoint is incomplete.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _file_error(path, "is not a regular file.")
    return os.fdopen(descriptor, "rb", buffering=0)


def _file_error(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path} {problem}")


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise _file_error(path, f"names {key!r} twice in its header; it is corrupt or hostile.")
            result[key] = value
        return result

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError):  # a number of more than 4,300 digits is a plain ValueError
        raise _file_error(
            path, "has no readable header; it is not a safetensors file or is corrupt."
        ) from None
    if not isinstance(header, dict):
        raise _file_error(path, "has a header that is not a JSON object; it is corrupt.")
    header.pop("__metadata__", None)
    return header


def _entry(path: Path, name: str, raw: Any, begin: int) -> TensorEntry:
    def refuse(problem: str) -> CheckpointError:
        return _file_error(path, f"describes tensor {name!r} wrongly: {problem}.")

    if not isinstance(raw, dict) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise refuse("it needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise refuse(f"dtype {dtype!r} is not known")
    if not _whole_numbers(shape) or len(shape) > _MAX_DIMENSIONS:
        raise refuse(f"shape {str(shape)[:80]} is not a list of sizes")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse(f"data_offsets {str(offsets)[:80]} are not two rising numbers")
    bits = math.prod(shape) * ITEM_BITS[dtype]
    if bits % 8:
        raise refuse(f"its {math.prod(shape)} numbers of {ITEM_BITS[dtype]} bits are not whole bytes")
    nbytes = bits // 8
    if offsets[1] - offsets[0] != nbytes:
        raise refuse(f"its shape needs {nbytes} bytes, its offsets span {offsets[1] - offsets[0]}")
    return TensorEntry(name, dtype, tuple(shape), path, begin + offsets[0], nbytes)


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 62 for item in value
    )


def _check_layout(path: Path, entries: list[TensorEntry], begin: int, file_bytes: int) -> None:
    """Refuse tensors that do not fill the file from the header to its end without gap or overlap."""
    position = begin
    for entry in sorted(entries, key=lambda e: (e.start, e.nbytes)):
        if entry.start != position:
            raise _file_error(path, f"has a gap or an overlap at tensor {entry.name!r}; it is corrupt.")
        position += entry.nbytes
    if position > file_bytes:
        raise _file_error(
            path,
            f"is truncated: its tensors need {position} bytes, it has {file_bytes}. Download it again.",
        )
    if position < file_bytes:
        raise _file_error(path, f"has {file_bytes - position} bytes after its last tensor; it is corrupt.")
