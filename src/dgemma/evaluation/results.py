"""Results of examples, and their JSON Lines file: the settings first, then one line per example. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from dgemma.durable_files import LineFile, whole_lines
from dgemma.errors import InputError
from dgemma.events import Answer


@dataclass(frozen=True, kw_only=True)
class AnswerStats:
    """The text and the statistics of one answer."""

    text: str
    finish_reason: str
    decode: str
    tokens: int
    forwards: int
    steps: tuple[int, ...]  # denoise forwards per canvas
    prompt_tokens: int
    seconds: float  # of its batch, divided by the rows of the batch

    @classmethod
    def of(cls, answer: Answer, seconds: float) -> AnswerStats:
        return cls(
            text=answer.text,
            finish_reason=str(answer.finish_reason),
            decode=answer.decode,
            tokens=len(answer.tokens),
            forwards=answer.forwards,
            steps=answer.steps,
            prompt_tokens=answer.prompt_tokens,
            seconds=seconds,
        )


@dataclass(frozen=True, kw_only=True)
class ExampleResult:
    """The result of one example. A failed one has a reason and no scores; it may have an answer."""

    number: int  # of the example, from 0
    mark: str  # identifies the example, see `mark_of`
    seed: int
    groups: tuple[str, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    written: AnswerStats | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ExampleResult:
        """The inverse of `to_json`; raises KeyError, TypeError or ValueError for other input."""
        written = raw["written"]
        if written is not None:
            written = AnswerStats(**{**written, "steps": tuple(written["steps"])})
        return cls(
            number=int(raw["number"]),
            mark=str(raw["mark"]),
            seed=int(raw["seed"]),
            groups=tuple(raw["groups"]),
            scores={str(name): float(value) for name, value in dict(raw["scores"]).items()},
            failure=raw["failure"],
            written=written,
        )


def mark_of(example: Any, prompt: Any) -> str:
    """A digest of the prompt, and of the example if it is plain data, to identify an example."""
    text = [_as_json(example), _as_json(prompt)]
    return hashlib.sha256("\0".join(text).encode()).hexdigest()[:16]


def seed_of(seed: int, *what: object) -> int:
    """The seed of one example: a function of the run's seed and `what`. 32 bits, short enough to type."""
    text = "/".join(map(str, (seed, *what)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, default=_fields)
    except (TypeError, ValueError, RecursionError):
        return ""  # not plain data: its text may change from run to run


def _fields(value: Any) -> dict[str, Any]:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    raise TypeError(f"a {type(value).__name__} is not plain data")


_KIND = "dgemma-eval-1"
_BEGINNING = b'{"kind": "dgemma-eval-1"'


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """The content of a file of results."""

    model: str
    settings: Mapping[str, Any]
    results: Mapping[int, ExampleResult]  # by number; of two lines with the same number the later one
    size: int  # bytes up to the end of the last complete line


class ResultsFile:
    """A file of results, open for writing. `stored`: its earlier content."""

    def __init__(
        self, path: str | Path, stored: StoredRun | None, *, model: str, settings: Mapping[str, Any]
    ) -> None:
        """Open a new file, or continue one with the same settings. Other files are never overwritten."""
        self.path = Path(path)
        self.stored = stored
        differing = [] if stored is None else differences(stored.settings, settings)
        if differing:
            raise InputError(
                f"{self.path} holds results of other settings: {'; '.join(differing)}. Choose another file, "
                "or remove it.",
                field="out",
            )
        self._file = self._open()
        if stored is None:
            try:
                self._write({"kind": _KIND, "model": model, "settings": dict(settings)})
            except InputError:
                self.close()
                raise

    def add(self, result: ExampleResult) -> None:
        self._write(result.to_json())

    def close(self) -> None:
        with suppress(OSError):  # a full disk was reported already
            self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            self._file.append(json.dumps(line).encode() + b"\n")
        except OSError as error:
            raise InputError(
                f"{self.path} cannot be written: {error.strerror}. Free some space; the same run resumes.",
                field="out",
            ) from None

    def _open(self) -> LineFile:
        try:
            file = LineFile(self.path)
            try:
                before, now = (0 if run is None else run.size for run in (self.stored, stored_run(self.path)))
                if now != before:  # another process wrote after `stored` was read and before the lock
                    raise InputError(f"{self.path} was changed meanwhile; run it again.", field="out")
                if self.path.is_file():
                    file.truncate(now)  # remove a torn end
            except (OSError, InputError):
                file.close()
                raise
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {error.strerror}.", field="out") from None
        return file


def stored_run(path: str | Path) -> StoredRun | None:
    """The content of the file at `path`; None if it does not exist, is empty, or is a torn first line."""
    path = Path(path)
    try:
        if not path.exists() or not path.stat().st_size:
            return None
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None
    if content.startswith(_BEGINNING) and not whole_lines(content):
        return None
    return read_results(path)


def read_results(path: str | Path) -> StoredRun:
    """Read a file of results. An incomplete last line, left by a crash, is ignored."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None
    whole = whole_lines(data)
    header, *lines = whole.split(b"\n")[:-1] or [b""]
    try:
        first = json.loads(header)
        kind, model, settings = first["kind"], first["model"], first["settings"]
    except (ValueError, KeyError, TypeError):
        kind, model, settings = None, "", {}
    if kind != _KIND or not isinstance(settings, dict):
        raise InputError(
            f"{path} is not a file of results; `dgemma eval --out FILE` writes one. Choose another name.",
            field="path",
        )
    results: dict[int, ExampleResult] = {}
    for number, line in enumerate(lines, start=2):
        try:
            result = ExampleResult.from_json(json.loads(line))
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{path}, line {number} is not the result of an example; remove the line, or the file.",
                field="path",
            ) from None
        results[result.number] = result
    return StoredRun(model=str(model), settings=settings, results=results, size=len(whole))


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path} cannot be read: {error.strerror}.", field="path")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Settings that differ, as texts `NAME is OLD, not NEW`."""
    # Compared as JSON, where tuples are lists.
    old, new = (json.loads(json.dumps(dict(settings))) for settings in (old, new))
    found: list[str] = []
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{name}.")
        elif before != after:
            found.append(f"{prefix}{name} is {before!r:.60}, not {after!r:.60}")
    return found
