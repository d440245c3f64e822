"""Where records come from: files of JSON lines, text files, sequences and streams of Python's.

A `RecordSource` gives any record by its number. A `StreamSource` gives records one after another only.
"""

from __future__ import annotations

import glob
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from dgemma.errors import InputError, suggestion
from dgemma.training.data_progress import Progress
from dgemma.training.jsonl import JsonLines
from dgemma.training.records import Reading, RecordReader
from dgemma.training.text_windows import TextSource

TEXT_SUFFIXES = (".txt", ".md", ".py")
JSONL_SUFFIXES = (".jsonl",)


class RecordSource(Protocol):
    """Records by number. `epoch` and `seed` matter to texts only, whose windows move."""

    @property
    def num_records(self) -> int: ...

    def read(self, index: int, *, epoch: int, seed: int) -> Reading: ...


def open_source(
    data: str | Path | Iterable[Any], reader: RecordReader, *, progress: Progress | None = None
) -> RecordSource | StreamSource:
    """The source of `data`: a file, a directory, a pattern such as "notes/*.md", or records.

    progress: called while files are read, with bytes.
    """
    if isinstance(data, str | Path):
        return open_files([data], reader, progress=progress)
    if not isinstance(data, Mapping | bytes) and hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return _not_empty(SequenceSource(data, reader), "data")
    if not isinstance(data, Mapping | bytes) and isinstance(data, Iterable):
        return StreamSource(data, reader)
    raise InputError(f"data is of type {type(data).__name__}; give a path, or a list or stream of records.")


def open_files(
    paths: Sequence[str | Path], reader: RecordReader, *, progress: Progress | None = None
) -> RecordSource:
    """The records of all `paths`: files, directories or patterns, of any formats."""
    sources = [_not_empty(_open_files(str(path), reader, progress), str(path)) for path in paths]
    return sources[0] if len(sources) == 1 else JoinedSource(sources)


def _not_empty(source: RecordSource, name: str) -> RecordSource:
    if source.num_records < 1:
        raise InputError(f"{name} holds no records; there is nothing to learn from it.")
    return source


class SequenceSource:
    """Anything with a length and items."""

    def __init__(self, records: Any, reader: RecordReader) -> None:
        self._records = records
        self._reader = reader

    @property
    def num_records(self) -> int:
        return len(self._records)

    def read(self, index: int, *, epoch: int, seed: int) -> Reading:
        return _read(self._reader, self._records[index], index)


class JsonlSource:
    """A file of JSON lines."""

    def __init__(self, file: JsonLines, reader: RecordReader) -> None:
        self._file = file
        self._reader = reader

    @property
    def num_records(self) -> int:
        return len(self._file)

    def read(self, index: int, *, epoch: int, seed: int) -> Reading:
        record = self._file[index]
        try:
            return self._reader.read(record)
        except InputError as error:
            raise InputError(f"{self._file.where(index)}: {error}") from None


class JoinedSource:
    """Several sources, one after another; shuffling mixes them."""

    def __init__(self, sources: Sequence[RecordSource]) -> None:
        self._sources = sources
        self._ends = list(accumulate(source.num_records for source in sources))

    @property
    def num_records(self) -> int:
        return self._ends[-1]

    def read(self, index: int, *, epoch: int, seed: int) -> Reading:
        number = bisect_right(self._ends, index)
        source = self._sources[number]
        return source.read(index - self._ends[number] + source.num_records, epoch=epoch, seed=seed)


class StreamSource:
    """Records that come one after another. An iterator comes once, other iterables again and again."""

    def __init__(self, records: Iterable[Any], reader: RecordReader) -> None:
        self._records = records
        self._reader = reader
        self.is_repeatable = iter(records) is not records

    def readings(self) -> Iterator[Reading | InputError]:
        """Every record once. An error is given, not raised, so that the reading can go on behind it."""
        for number, record in enumerate(self._records):
            try:
                yield _read(self._reader, record, number)
            except InputError as error:
                yield error


def _read(reader: RecordReader, record: Any, number: int) -> Reading:
    try:
        return reader.read(record)
    except InputError as error:
        raise InputError(f"record {number}: {error}") from None


def _open_files(name: str, reader: RecordReader, progress: Progress | None) -> RecordSource:
    files = _found(name)
    is_jsonl = {file.suffix in JSONL_SUFFIXES for file in files}
    if len(is_jsonl) > 1:
        raise InputError(
            f"{name} holds both JSON lines and text files; give one as data.path, the other as data.also."
        )
    if is_jsonl == {True}:
        return JoinedSource([JsonlSource(JsonLines(file, progress), reader) for file in files])
    return TextSource(files, reader, progress)


def _found(name: str) -> list[Path]:
    """The files that a name means, in an order that does not depend on the file system."""
    known = (*JSONL_SUFFIXES, *TEXT_SUFFIXES)
    path = Path(name)
    if path.is_dir():
        inside = (file for file in path.rglob("*") if not _is_hidden(file.relative_to(path)))
        files = [file for file in inside if file.suffix in known and file.is_file()]
        if not files:
            raise InputError(f"{name} holds no file that ends in {', '.join(known)}.")
    elif path.exists():
        files = [path]
    else:
        # Not only where there is a wildcard: then nothing is found, which is the same error.
        files = [Path(found) for found in glob.glob(name, recursive=True) if Path(found).is_file()]
        if not files:
            raise InputError(f"{name} does not exist; give a file, a directory or a pattern.")
    for file in files:
        if file.suffix not in known:
            hint = suggestion(file.suffix, known)
            raise InputError(f"{file} ends in {file.suffix!r}; known are {', '.join(known)}{hint}")
    return sorted(files)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
