"""The files of a batch in OpenAI's format: JSON lines of requests, and JSON lines of results.

The file of requests is validated as a whole before the first request is answered. The file of results is only
appended to, and a later run continues it.
"""

from __future__ import annotations

import itertools
import json
import stat
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dgemma.durable_files import LineFile, whole_lines
from dgemma.errors import InputError, suggestion
from dgemma.server.chat.router import CHAT_COMPLETIONS
from dgemma.server.completions.router import COMPLETIONS, FIM_COMPLETIONS
from dgemma.server.decisions.router import DECISIONS
from dgemma.server.edit.router import EDIT_COMPLETIONS
from dgemma.server.http.body import strict_object
from dgemma.server.http.errors import ApiError, shown, to_json
from dgemma.server.pipeline import Endpoint

ENDPOINTS: dict[str, Endpoint] = {
    endpoint.path: endpoint
    for endpoint in (CHAT_COMPLETIONS, COMPLETIONS, FIM_COMPLETIONS, EDIT_COMPLETIONS, DECISIONS)
}
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    custom_id: str
    url: str
    body: dict[str, Any]  # an error in it becomes its result, as over HTTP


class BatchRequests:
    """A file that may be larger than memory: of each request only its custom_id is kept."""

    def __init__(self, path: Path, *, max_line_bytes: int) -> None:
        """Validate all lines; the first invalid one refuses the file."""
        self.path = path
        self._max_line_bytes = max_line_bytes
        self.ids: set[str] = set()
        for number, request in self._read():
            if request.custom_id in self.ids:
                raise self._refused(
                    number, f"custom_id {shown(request.custom_id)} was given before; rename it."
                )
            self.ids.add(request.custom_id)
        if not self.ids:
            raise InputError(f"{path} holds no request; give one JSON object per line.")

    def without(self, held: Container[str]) -> Iterator[BatchRequest]:
        """The requests that have no result yet, read again."""
        missing = {custom_id for custom_id in self.ids if custom_id not in held}
        for _, request in self._read():
            if request.custom_id in missing:
                missing.remove(request.custom_id)
                yield request
            elif request.custom_id not in self.ids:
                raise self._changed()
        if missing:
            raise self._changed()

    def _read(self) -> Iterator[tuple[int, BatchRequest]]:
        for number, line in self._lines():
            try:
                found = strict_object(line, "the line")
            except ApiError as error:
                raise self._refused(number, str(error)) from None
            wrong = _fault(found)
            if wrong is not None:
                raise self._refused(number, wrong)
            yield number, BatchRequest(custom_id=found["custom_id"], url=found["url"], body=found["body"])

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise InputError(f"{self.path} is not a file; it is read twice, so a pipe will not do.")
            file = self.path.open("rb")
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}.") from None
        most = self._max_line_bytes
        with file:
            for number in itertools.count(1):
                line = file.readline(most + 1)
                if not line:
                    return
                if len(line) > most:
                    raise self._refused(
                        number, f"the line has more than {most} bytes; raise --max-body-bytes."
                    )
                if line.strip():
                    yield number, line

    def _refused(self, number: int, why: str) -> InputError:
        return InputError(f"{self.path}, line {number}: {why}")

    def _changed(self) -> InputError:
        return InputError(f"{self.path} was changed while it was read; leave it alone and start again.")


def _fault(line: dict[str, Any]) -> str | None:
    """What is wrong with a line; None: it is a request."""
    for name in line:
        if name not in _FIELDS:
            return f"unknown field {shown(name)}{suggestion(name[:60], _FIELDS)}"
    for name in _FIELDS:
        if name not in line:
            return f"{name} is missing; give it."
    custom_id, method, url, body = (line[name] for name in _FIELDS)
    if not isinstance(custom_id, str) or not custom_id:
        return f"custom_id is {shown(custom_id)}; it must be a text that is not empty."
    if method != "POST":
        return f"method is {shown(method)}; it must be 'POST'."
    if not isinstance(url, str) or url not in ENDPOINTS:
        return f"url is {shown(url)}; it must be {' or '.join(ENDPOINTS)}."
    if not isinstance(body, dict):
        return f"body is {shown(body)}; it must be an object, as it is sent to {url}."
    return None


# Results

# Every line begins so. A file whose lines do not is not ours, and is left unchanged.
_BEGINNING = b'{"id": "batch_req_'
OK = 200


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """The result of one request."""

    custom_id: str
    request_id: str
    status: int
    body: bytes  # JSON: the answer, or the error, as over HTTP
    reason: str | None = None  # of the failure

    def to_line(self) -> bytes:
        head = to_json({"id": f"batch_req_{self.request_id}", "custom_id": self.custom_id})
        response = to_json({"status_code": self.status, "request_id": self.request_id})
        # The body is the very bytes that HTTP would have sent.
        return b"%b, \"response\": %b, \"body\": %b}, \"error\": null}\n" % (
            head[:-1], response[:-1], self.body,
        )  # fmt: skip


class BatchResults:
    """A locked file to append to; `held` has the ids of the results it already holds."""

    def __init__(self, path: Path, ids: Container[str]) -> None:
        """`ids`: of the requests. A file with other content or other results is refused."""
        self.path = path
        self.held: set[str] = set()
        self.num_failed = 0  # of those held
        self._file = self._open()
        try:
            self._file.truncate(self._read(ids))
        except BaseException:
            self._file.close()
            raise

    def add(self, result: BatchResult) -> None:
        """Append one whole line."""
        try:
            self._file.append(result.to_line())
        except OSError as error:
            raise InputError(
                f"{self.path} cannot be written: {error.strerror}. Free some space; the same command resumes."
            ) from None
        self._note(result.custom_id, result.status)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError):  # a full disk was reported already
            self._file.close()

    def _note(self, custom_id: str, status: int) -> None:
        self.held.add(custom_id)
        self.num_failed += status != OK

    def _open(self) -> LineFile:
        try:
            if self.path.exists() and not self.path.is_file():
                raise InputError(f"{self.path} is not a file; results need one, so that a run can go on.")
            return LineFile(self.path)
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {error.strerror}.") from None

    def _read(self, ids: Container[str]) -> int:
        """Note the results of the file -> bytes up to the end of the last whole line."""
        size = 0
        for number, line in self._lines():
            if whole_lines(line) != line:
                break  # a process ended while writing: the request is answered again
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
        with self.path.open("rb") as file:
            number = 1
            # Checked before the line is read, which in another kind of file may be all of it.
            while beginning := file.read(len(_BEGINNING)):
                # Zeros are blocks that a power cut lost, but only after a line of ours.
                begun = beginning if number == 1 else beginning.partition(b"\0")[0]
                if not _BEGINNING.startswith(begun):
                    raise self._foreign(number)
                yield number, beginning + file.readline()
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
