"""A Parquet file with random access: one record per row. No torch; pyarrow is imported when a file is opened.

Opening reads the footer only. A row group is read when one of its rows is needed; the last ones that were
read stay in memory, up to a limit that all files of a source share.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from dgemma.errors import InputError
from dgemma.training.data.jsonl import file_state
from dgemma.training.data.records import Progress

MAX_CACHED_BYTES = 256 << 20
MISSING_PYARROW = 'Parquet files need pyarrow; run: pip install "dgemma[parquet]"'


class RowGroupCache:
    """The row groups used last, as Arrow tables. The newest one is kept whatever its size."""

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._tables: OrderedDict[tuple[Path, int], Any] = OrderedDict()

    def get(self, file: Path, group: int) -> Any | None:
        if (file, group) in self._tables:
            self._tables.move_to_end((file, group))
        return self._tables.get((file, group))

    def put(self, file: Path, group: int, table: Any) -> None:
        self._tables[file, group] = table
        self._num_bytes += table.nbytes
        while self._num_bytes > self._max_bytes and len(self._tables) > 1:
            _, old = self._tables.popitem(last=False)
            self._num_bytes -= old.nbytes


class ParquetRows:
    """The rows of a file, by number."""

    _state: tuple[int, int] | None = None  # of the file, and its footer, once it was opened
    _metadata: Any = None

    def __init__(self, path: Path, groups: RowGroupCache, progress: Progress | None = None) -> None:
        self.path = path
        self._groups = groups
        with self._opened() as file:
            self._metadata = found = file.metadata
        self._ends = list(
            accumulate(found.row_group(number).num_rows for number in range(found.num_row_groups))
        )
        if progress is not None:
            num_bytes = path.stat().st_size
            progress(num_bytes, num_bytes)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> dict[str, Any]:
        group = bisect_right(self._ends, number)
        table = self._groups.get(self.path, group)
        if table is None:
            with self._opened(group) as file:
                # One thread: the processes of a run share the cores already.
                table = file.read_row_group(group, use_threads=False)
            self._groups.put(self.path, group, table)
        row = number - self._ends[group] + table.num_rows
        try:
            (record,) = table.slice(row, 1).to_pylist()
        except ValueError as error:  # not UTF-8, or a time that Python has no type for
            raise InputError(f"{self.where(number)}: the row cannot be read: {_first_line(error)}.") from None
        return dict(record)

    def where(self, number: int) -> str:
        """File and row, counted from 1."""
        return f"{self.path}, row {number + 1}"

    @contextmanager
    def _opened(self, group: int | None = None) -> Iterator[Any]:
        """pyarrow's file. Errors of the block name the file, and the rows of the group that is read."""
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise InputError(f"{self.path}: {MISSING_PYARROW}") from None
        what = "is not a Parquet file that can be read" if group is None else self._group_text(group)
        try:
            with self.path.open("rb") as raw:
                state = file_state(raw.fileno())
                if self._state not in (None, state):
                    raise InputError(f"{self.path} changed while it was in use; start again.")
                self._state = state
                # The footer of a file with many row groups is large: it is parsed once.
                with parquet.ParquetFile(raw, metadata=self._metadata, pre_buffer=False) as file:
                    yield file
        except (pyarrow.ArrowException, OSError) as error:
            # The system's errors have a number; pyarrow's, of the same type, have none.
            if isinstance(error, OSError) and error.errno is not None:
                raise InputError(f"{self.path} cannot be read: {error.strerror}.") from None
            raise InputError(f"{self.path} {what}: {_first_line(error)}") from None

    def _group_text(self, group: int) -> str:
        first = self._ends[group - 1] + 1 if group else 1
        return f"is damaged; rows {first} to {self._ends[group]} cannot be read"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
