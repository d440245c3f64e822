"""The results of a batch: a file of JSON lines that only grows, and that a later run goes on with."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from dgemma.errors import InputError
from dgemma.server.api_error import shown, to_json

# Every line begins so. What does not is not ours, and is neither cut nor added to.
_BEGINNING = b'{"id": "batch_req_'
OK = 200


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """What became of one request."""

    custom_id: str
    request_id: str
    status: int
    body: bytes  # JSON: the answer, or the error, as over HTTP
    reason: str | None = None  # why it failed

    def to_line(self) -> bytes:
        head = to_json({"id": f"batch_req_{self.request_id}", "custom_id": self.custom_id})
        response = to_json({"status_code": self.status, "request_id": self.request_id})
        # The body is the very bytes that HTTP would have sent.
        return b"%b, \"response\": %b, \"body\": %b}, \"error\": null}\n" % (
            head[:-1], response[:-1], self.body,
        )  # fmt: skip


class BatchResults:
    """A file to write to, locked; what it already holds is in `held`."""

    def __init__(self, path: Path, ids: Container[str]) -> None:
        """`ids`: of the requests. A file with results of others, or with something else, is refused."""
        self.path = path
        self.held: set[str] = set()
        self.num_failed = 0  # of those held
        self._file = self._open()
        try:
            self._lock()
            self._file.truncate(self._read(ids))
            self._file.seek(0, os.SEEK_END)
        except BaseException:
            self._file.close()
            raise

    def add(self, result: BatchResult) -> None:
        """One whole line, handed to the system before this returns."""
        try:
            self._file.write(result.to_line())
            self._file.flush()
        except OSError as error:
            raise InputError(
                f"{self.path} cannot be written: {error.strerror}. Make room; the same command goes on."
            ) from None
        self._note(result.custom_id, result.status)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError):  # a full disk was told of already
            self._file.close()

    def _note(self, custom_id: str, status: int) -> None:
        self.held.add(custom_id)
        self.num_failed += status != OK

    def _open(self) -> IO[bytes]:
        try:
            if self.path.exists() and not self.path.is_file():
                raise InputError(f"{self.path} is not a file; results need one, so that a run can go on.")
            return self.path.open("a+b")
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {error.strerror}.") from None

    def _lock(self) -> None:
        """Keep a second process from answering the same requests into the same file."""
        try:
            import fcntl
        except ImportError:  # Windows
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{self.path} is being written by another run; wait for it, or choose another file."
            ) from None
        except OSError:  # a file system without locks
            return

    def _read(self, ids: Container[str]) -> int:
        """Notes what the file holds -> bytes up to the end of the last whole line."""
        size = 0
        for number, line in self._lines():
            if not line.endswith(b"\n"):
                break  # a process ended while it wrote: its request is answered again
            custom_id, status = self._held(number, line)
            if custom_id not in ids:
                raise InputError(
                    f"{self.path}, line {number} is the result of {shown(custom_id)}, which is not among the "
                    "requests; choose another file."
                )
            if custom_id in self.held:
                raise InputError(
                    f"{self.path}, line {number} is a second result of {shown(custom_id)}; remove one."
                )
            self._note(custom_id, status)
            size += len(line)
        return size

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        self._file.seek(0)
        number = 1
        # Looked at before a line is read, which in a file of another kind may be all of it.
        while beginning := self._file.read(len(_BEGINNING)):
            if not _BEGINNING.startswith(beginning):
                raise self._foreign(number)
            yield number, beginning + self._file.readline()
            number += 1

    def _held(self, number: int, line: bytes) -> tuple[str, int]:
        try:
            found: Any = json.loads(line)
            custom_id, status = found["custom_id"], found["response"]["status_code"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._foreign(number) from None
        if not isinstance(custom_id, str) or not isinstance(status, int):
            raise self._foreign(number)
        return custom_id, status

    def _foreign(self, number: int) -> InputError:
        return InputError(f"{self.path}, line {number} is not a result of run-batch; choose another file.")
