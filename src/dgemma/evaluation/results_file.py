"""Results as JSON lines: the settings first, then one line per example, written while the run goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dgemma.errors import InputError
from dgemma.evaluation.result import Result

_KIND = "dgemma-eval-1"


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """What a file of results holds."""

    model: str
    settings: Mapping[str, Any]
    results: Mapping[int, Result]  # by number; of two lines with one number the later counts
    size: int  # bytes up to the end of the last whole line


class ResultsFile:
    """A file to write to; what it already holds is in `stored`."""

    def __init__(
        self, path: str | Path, stored: StoredRun | None, *, model: str, settings: Mapping[str, Any]
    ) -> None:
        """A new file, or one of the same settings to go on with. Others are refused, never overwritten."""
        self.path = Path(path)
        self.stored = stored
        differing = [] if stored is None else differences(stored.settings, settings)
        if differing:
            raise InputError(
                f"{self.path} holds results of other settings: {'; '.join(differing)}. Choose another file, "
                "or remove it."
            )
        self._file = self._open()
        if stored is None:
            self._write({"kind": _KIND, "model": model, "settings": dict(settings)})

    def add(self, result: Result) -> None:
        self._write(result.to_json())

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def _open(self) -> IO[bytes]:
        try:
            file = self.path.open("ab")
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {error.strerror}.") from None
        if self.stored is not None:
            file.truncate(self.stored.size)  # a line that was cut off in the middle
        return file


def stored_run(path: str | Path) -> StoredRun | None:
    """What the file at `path` holds, if there is one that is not empty."""
    path = Path(path)
    return read_results(path) if path.exists() and path.stat().st_size else None


def read_results(path: str | Path) -> StoredRun:
    """Read a file of results; a last line without its end, cut off by a crash, is left out."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    whole = data[: data.rfind(b"\n") + 1]
    header, *lines = whole.split(b"\n")[:-1] or [b""]
    try:
        first = json.loads(header)
        kind, model, settings = first["kind"], first["model"], first["settings"]
    except (ValueError, KeyError, TypeError):
        kind, model, settings = None, "", {}
    if kind != _KIND or not isinstance(settings, dict):
        raise InputError(
            f"{path} is not a file of results; `dgemma eval --out FILE` writes one. Choose another name."
        )
    results: dict[int, Result] = {}
    for number, line in enumerate(lines, start=2):
        try:
            result = Result.from_json(json.loads(line))
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{path}, line {number} is not the result of an example; remove the line, or the file."
            ) from None
        results[result.number] = result
    return StoredRun(model=str(model), settings=settings, results=results, size=len(whole))


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Settings that differ: ["seed is 1, not 2", ...], from the old one's point of view."""
    # As JSON has them: tuples have become lists in a file.
    old, new = (json.loads(json.dumps(dict(settings))) for settings in (old, new))
    found: list[str] = []
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{name}.")
        elif before != after:
            found.append(f"{prefix}{name} is {before!r:.60}, not {after!r:.60}")
    return found
