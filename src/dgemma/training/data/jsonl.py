"""A JSON Lines file with random access: one object per line, blank lines ignored.

Opening reads the file once and stores 8 bytes per line. A line is parsed when it is read, so its errors are
raised then, with file and line.
"""

from __future__ import annotations

import json
import os
from array import array
from pathlib import Path
from typing import Any, NoReturn

from dgemma.errors import InputError
from dgemma.training.data.records import Progress

# A chat has at most 16 Mi characters; JSON may escape a character as six bytes, but most take one.
MAX_LINE_BYTES = 64 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PART_BYTES = 1 << 20
_LINES_PER_REPORT = 1 << 14


class JsonLines:
    """The objects of a file, by number."""

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self.path = path
        try:
            self._starts = self._index(progress)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}.") from None

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> dict[str, Any]:
        start = self._starts[number]
        try:
            with self.path.open("rb") as file:
                # If the file was modified since, the offsets are wrong.
                if file_state(file.fileno()) != self._state:
                    raise InputError(f"{self.path} changed while it was in use; start again.")
                file.seek(start)
                line = file.readline(MAX_LINE_BYTES + 1)
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}.") from None
        try:
            return _parsed(line)
        except InputError as error:
            raise InputError(f"{self.where(number)}: {error}", field=error.field) from None

    def where(self, number: int) -> str:
        """`file:line` of an object. Lines are counted from 1, including blank ones."""
        left = self._starts[number]
        line = 1
        with self.path.open("rb") as file:
            while left > 0 and (block := file.read(min(left, 1 << 20))):
                left -= len(block)
                line += block.count(b"\n")
        return f"{self.path}:{line}"

    def _index(self, progress: Progress | None) -> array[int]:
        starts = array("q")
        with self.path.open("rb") as file:
            self._state = file_state(file.fileno())
            start, is_line_start, number = 0, True, 0
            # In parts: a file that is not JSON Lines may be one line, larger than memory.
            while part := file.readline(_PART_BYTES):
                if is_line_start and (len(part) == _PART_BYTES or not part.isspace()):
                    starts.append(start)
                start += len(part)
                is_line_start = part.endswith(b"\n")
                number += 1
                if progress is not None and number % _LINES_PER_REPORT == 0:
                    progress(start, self._state[0])
        if progress is not None:
            progress(start, start)
        return starts


def file_state(file: int) -> tuple[int, int]:
    """(size, time of change) of an open file: another one means that it was modified."""
    stat = os.fstat(file)
    return stat.st_size, stat.st_mtime_ns


def _parsed(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise InputError(f"the line has more than {MAX_LINE_BYTES} bytes; a file has one record per line.")
    try:
        text = line.removeprefix(_BYTE_ORDER_MARK).rstrip().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"byte {error.start + 1} of the line is not UTF-8; store the file in that encoding."
        ) from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise InputError(f"the line is not JSON: {error.msg} at character {error.pos + 1}.") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"the line cannot be read as JSON: {error}.") from None
    if not isinstance(value, dict):
        raise InputError(f"the line is of type {type(value).__name__}; a record is an object: {{...}}.")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is not JSON")
