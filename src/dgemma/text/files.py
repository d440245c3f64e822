"""The small text files of a checkpoint, read with a size limit and typed errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dgemma.errors import CheckpointError


def read_text(file: Path, *, max_bytes: int) -> str:
    try:
        size = file.stat().st_size
        if size > max_bytes:
            raise CheckpointError(
                f"{file} has {size} bytes; at most {max_bytes} are read. It is not what its name says."
            )
        return file.read_bytes().decode("utf-8")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{file} is not UTF-8 text; it is truncated or corrupt.") from None


def read_object(file: Path, *, max_bytes: int) -> dict[str, Any]:
    try:
        value = json.loads(read_text(file, max_bytes=max_bytes))
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file} is not valid JSON; it is truncated or corrupt.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object; it is corrupt.")
    return value
