"""The public JSON-Schema-Test-Suite, draft 2020-12, out of the source archive of `jsonschema`.

It is large and not ours, so it is not in the repository: `DGEMMA_JSON_SCHEMA_SUITE` names a directory that
has it (`tests/draft2020-12` of the suite), otherwise pip brings the archive into `build/` once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

_BUILD = Path(__file__).parent.parent / "build" / "json-schema-suite"
_INSIDE = "json/tests/draft2020-12/"


@dataclass(frozen=True)
class Group:
    """One schema of the suite, with instances that are valid or not."""

    name: str
    schema: Any
    tests: list[dict[str, Any]]


def groups() -> Iterator[Group]:
    files = sorted(_directory().glob("*.json"))
    assert len(files) > 40, "the suite is not whole"
    for file in files:
        for group in json.loads(file.read_text(encoding="utf-8")):
            yield Group(f"{file.stem}: {group['description']}", group["schema"], group["tests"])


def _directory() -> Path:
    if given := os.environ.get("DGEMMA_JSON_SCHEMA_SUITE"):
        return Path(given)
    if not (_BUILD / "whole").exists():
        _unpack(_downloaded())
    return _BUILD


def _downloaded() -> Path:
    """The archive of the version that is installed."""
    requirement = f"jsonschema=={version('jsonschema')}"
    options = ["--quiet", "--no-deps", "--no-binary", "jsonschema", "--dest", str(_BUILD)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
    return next(_BUILD.glob("jsonschema-*.tar.gz"))


def _unpack(archive: Path) -> None:
    with tarfile.open(archive) as packed:
        for entry in packed:
            _, _, name = entry.name.partition(_INSIDE)
            if name and "/" not in name and (file := packed.extractfile(entry)) is not None:
                (_BUILD / name).write_bytes(file.read())
    (_BUILD / "whole").touch()
