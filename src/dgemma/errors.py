"""The error tree. Every error a user can meet is a `DgemmaError` that names thing, value and remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self


class DgemmaError(Exception):
    """Base of all errors dgemma raises on purpose; the command line prints it without a traceback."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)  # also where __init__ takes keywords


def _restored(kind: type[DgemmaError], args: tuple[Any, ...], entries: dict[str, Any]) -> DgemmaError:
    """An error that came from another process."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(entries)
    return error


class ConfigError(DgemmaError, ValueError):
    """A model configuration that is malformed, contradictory or not supported."""


class CheckpointError(DgemmaError):
    """A checkpoint that cannot be read or written: missing, truncated, misshapen or hostile files."""


class InputError(DgemmaError, ValueError):
    """A call with arguments the model cannot take: wrong shape, out of range, wrong kind.

    field: the parameter that is wrong, as the caller spells it; None where no single one is.
    code: what is wrong with it, for programs: "invalid_value", "context_length_exceeded", ...
    """

    def __init__(self, message: str, *, field: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.field = field
        self.code = code
        self._rule: str | None = None  # the message without the field's name, where it begins with that

    @classmethod
    def about(cls, field: str, rule: str, *, code: str = "invalid_value") -> Self:
        """An error whose message is the field's name and `rule`; `with_field` can respell the name."""
        error = cls(f"{field} {rule}", field=field, code=code)
        error._rule = rule
        return error

    def with_field(self, field: str) -> InputError:
        """The same error under another spelling of the field, such as a client's."""
        if self._rule is not None:
            return InputError.about(field, self._rule, code=self.code)
        return InputError(str(self), field=field, code=self.code)


@contextmanager
def error_field(field: str) -> Iterator[None]:
    """Name `field` in each InputError of the block that names none."""
    try:
        yield
    except InputError as error:
        error.field = error.field or field
        raise


class DeviceError(DgemmaError):
    """A device or dtype that this machine does not have."""


class RankError(DgemmaError):
    """A process of a group that computes one model together is gone, late, or parted from the others.

    The group cannot go on: it ends with this error.
    """


class TrainingError(DgemmaError):
    """A training run that cannot go on."""


def suggestion(name: str, known: Iterable[str], *, otherwise: str = ".") -> str:
    """The end of a sentence about `name`: `; did you mean 'x'?` for a near miss, else a full stop."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else otherwise
