"""The requests of a batch: a file of JSON lines, looked through as a whole before one of them is answered."""

from __future__ import annotations

import itertools
import stat
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgemma.errors import InputError, suggestion
from dgemma.server import chat, completions, decisions, edit, fim
from dgemma.server.api_error import ApiError, shown
from dgemma.server.asked import Form
from dgemma.server.body import strict_object

FORMS: dict[str, Form] = {
    chat.PATH: chat.CHAT,
    completions.PATH: completions.COMPLETIONS,
    fim.PATH: fim.FIM,
    edit.PATH: edit.EDIT,
    decisions.PATH: decisions.DECISIONS,
}
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    custom_id: str
    url: str
    body: dict[str, Any]  # what is wrong in it is told in its result, as over HTTP


class BatchRequests:
    """A file that may be larger than memory: of each request only its custom_id is kept."""

    def __init__(self, path: Path, *, max_line_bytes: int) -> None:
        """Read all of it; the first line that is no request of its own refuses the file."""
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
        """Those that have no result yet, read anew."""
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
    """What keeps a line from being a request, if anything does."""
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
    if not isinstance(url, str) or url not in FORMS:
        return f"url is {shown(url)}; it must be {' or '.join(FORMS)}."
    if not isinstance(body, dict):
        return f"body is {shown(body)}; it must be an object, as it is sent to {url}."
    return None
