"""Sources of records: JSON Lines, Parquet and text files, Python sequences and iterables.

A `RecordSource` has random access by record number. A `StreamSource` is read in sequence only.
"""

from __future__ import annotations

import glob
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from dgemma.errors import InputError, suggestion
from dgemma.training.data.jsonl import JsonLines
from dgemma.training.data.parquet import ParquetRows, RowGroupCache
from dgemma.training.data.records import Progress, RecordReader, RecordReading
from dgemma.training.data.text_windows import TextSource

TEXT_SUFFIXES = (".txt", ".md", ".py")
JSONL_SUFFIXES = (".jsonl",)
PARQUET_SUFFIXES = (".parquet",)


class RecordSource(Protocol):
    """Records by number. Only text sources use `epoch` and `seed`: their window borders depend on them."""

    @property
    def num_records(self) -> int: ...

    def read(self, index: int, *, epoch: int, seed: int) -> RecordReading: ...


def open_source(
    data: str | Path | Iterable[Any], reader: RecordReader, *, progress: Progress | None = None
) -> RecordSource | StreamSource:
    """The source of `data`: a file, a directory, a pattern such as "notes/*.md", or records.

    progress: called with numbers of bytes while files are read.
    """
    if isinstance(data, str | Path):
        return open_files([data], reader, progress=progress)
    if not isinstance(data, Mapping | bytes) and hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return _not_empty(SequenceSource(data, reader), "data")
    if not isinstance(data, Mapping | bytes) and isinstance(data, Iterable):
        return StreamSource(data, reader)
    raise InputError.about(
        "data", f"is of type {type(data).__name__}; give a path, or a list or stream of records."
    )


def open_files(
    paths: Sequence[str | Path], reader: RecordReader, *, progress: Progress | None = None
) -> RecordSource:
    """The records of all `paths`: files, directories or patterns, of any formats."""
    sources = [_not_empty(_open_files(str(path), reader, progress), str(path)) for path in paths]
    return sources[0] if len(sources) == 1 else JoinedSource(sources)


def _not_empty(source: RecordSource, name: str) -> RecordSource:
    if source.num_records < 1:
        raise InputError(f"{name} holds no records; there is nothing to learn from it.", field="data")
    return source


class SequenceSource:
    """Records of an object with `__len__` and `__getitem__`."""

    def __init__(self, records: Any, reader: RecordReader) -> None:
        self._records = records
        self._reader = reader

    @property
    def num_records(self) -> int:
        return len(self._records)

    def read(self, index: int, *, epoch: int, seed: int) -> RecordReading:
        return _read(self._reader, self._records[index], index)


class RecordFile(Protocol):
    """Records of a file, by number, with their places for messages."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> dict[str, Any]: ...

    def where(self, number: int) -> str: ...


class FileSource:
    """Records of a JSON Lines or Parquet file."""

    def __init__(self, file: RecordFile, reader: RecordReader) -> None:
        self._file = file
        self._reader = reader

    @property
    def num_records(self) -> int:
        return len(self._file)

    def read(self, index: int, *, epoch: int, seed: int) -> RecordReading:
        record = self._file[index]
        try:
            return self._reader.read(record)
        except InputError as error:
            raise InputError(f"{self._file.where(index)}: {error}", field=error.field) from None


class JoinedSource:
    """The concatenation of several sources; shuffling mixes them."""

    def __init__(self, sources: Sequence[RecordSource]) -> None:
        self._sources = sources
        self._ends = list(accumulate(source.num_records for source in sources))

    @property
    def num_records(self) -> int:
        return self._ends[-1]

    def read(self, index: int, *, epoch: int, seed: int) -> RecordReading:
        number = bisect_right(self._ends, index)
        source = self._sources[number]
        return source.read(index - self._ends[number] + source.num_records, epoch=epoch, seed=seed)


class StreamSource:
    """Records of an iterable. An iterator can be read once, other iterables repeatedly."""

    def __init__(self, records: Iterable[Any], reader: RecordReader) -> None:
        self._records = records
        self._reader = reader
        self.is_repeatable = iter(records) is not records

    def readings(self) -> Iterator[RecordReading | InputError]:
        """Every record once. Errors are yielded, not raised, so that reading can continue after them."""
        for number, record in enumerate(self._records):
            try:
                yield _read(self._reader, record, number)
            except InputError as error:
                yield error


def _read(reader: RecordReader, record: Any, number: int) -> RecordReading:
    try:
        return reader.read(record)
    except InputError as error:
        raise InputError(f"record {number}: {error}", field=error.field) from None


def _open_files(name: str, reader: RecordReader, progress: Progress | None) -> RecordSource:
    files = _find_files(name)
    kinds = sorted({_kind(file) for file in files})
    if len(kinds) > 1:
        raise InputError(
            f"{name} holds both {' and '.join(kinds)} files; give one as data.path, the other as data.also.",
            field="data",
        )
    if kinds == [_TEXT]:
        return TextSource(files, reader, progress)
    groups = RowGroupCache()
    opened: list[RecordFile] = [
        ParquetRows(file, groups, progress) if kinds == [_PARQUET] else JsonLines(file, progress)
        for file in files
    ]
    return JoinedSource([FileSource(file, reader) for file in opened])


_JSONL, _PARQUET, _TEXT = "JSON lines", "Parquet", "text"


def _kind(file: Path) -> str:
    if file.suffix in JSONL_SUFFIXES:
        return _JSONL
    return _PARQUET if file.suffix in PARQUET_SUFFIXES else _TEXT


def _find_files(name: str) -> list[Path]:
    """The files that match `name`, in an order that does not depend on the file system."""
    known = (*JSONL_SUFFIXES, *PARQUET_SUFFIXES, *TEXT_SUFFIXES)
    path = Path(name)
    if path.is_dir():
        inside = (file for file in path.rglob("*") if not _is_hidden(file.relative_to(path)))
        files = [file for file in inside if file.suffix in known and file.is_file()]
        if not files:
            raise InputError(f"{name} holds no file that ends in {', '.join(known)}.", field="data")
    elif path.exists():
        files = [path]
    else:
        # A name without a wildcard matches nothing, which is the same error.
        files = [Path(found) for found in glob.glob(name, recursive=True) if Path(found).is_file()]
        if not files:
            raise InputError(f"{name} does not exist; give a file, a directory or a pattern.", field="data")
    for file in files:
        if file.suffix not in known:
            hint = suggestion(file.suffix, known)
            raise InputError(
                f"{file} ends in {file.suffix!r}; known are {', '.join(known)}{hint}", field="data"
            )
    return sorted(files)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
