"""The error tree. Every error a user can meet is a `DgemmaError` that names thing, value and remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DgemmaError(Exception):
    """Base of all errors dgemma raises on purpose; the command line prints it without a traceback."""


class ConfigError(DgemmaError, ValueError):
    """A model configuration that is malformed, contradictory or not supported."""


class CheckpointError(DgemmaError):
    """A checkpoint that cannot be read or written: missing, truncated, misshapen or hostile files."""


class InputError(DgemmaError, ValueError):
    """A call with arguments the model cannot take: wrong shape, out of range, wrong kind."""


class DeviceError(DgemmaError):
    """A device or dtype that this machine does not have."""


class TrainingError(DgemmaError):
    """A training run that cannot go on."""


def suggestion(name: str, known: Iterable[str], *, otherwise: str = ".") -> str:
    """The end of a sentence about `name`: `; did you mean 'x'?` for a near miss, else a full stop."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else otherwise
