"""List the models on this machine: those of the package, and those of the hub cache that dgemma can read.

An interrupted download is listed as incomplete: `dgemma pull NAME` fetches the rest. `dgemma rm NAME`
deletes a model of the cache. Checkpoints in other directories are not looked for."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from dgemma.checkpoint.bundled import PREFIX, bundled_names, bundled_path
from dgemma.checkpoint.hub import EXAMPLE_NAME
from dgemma.checkpoint.hub_cache import CachedModel, cache_directory, cached_models
from dgemma.machine import size_text

EXAMPLES = "example:\n  dgemma list --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object for a program, with paths")


def run(args: argparse.Namespace) -> int:
    bundled = {f"{PREFIX}{name}": bundled_path(name) for name in bundled_names()}
    cached = cached_models()
    if args.json:
        print(json.dumps(_document(bundled, cached), indent=2))
        return 0
    rows = [("name", "size", "last used", "")]
    rows += [(name, size_text(_nbytes(path)), "-", "") for name, path in bundled.items()]
    rows += [(m.name, size_text(m.nbytes), _ago(time.time() - m.last_used), _note(m)) for m in cached]
    print(_aligned(rows))
    if not cached:
        print(
            f"no model in the hub cache {cache_directory()}; for example: dgemma pull {EXAMPLE_NAME}",
            file=sys.stderr,
        )
    return 0


def _document(bundled: dict[str, Path], cached: Sequence[CachedModel]) -> dict[str, object]:
    package = [
        {"name": name, "path": str(path), "bytes": _nbytes(path), "last_used": None, "complete": True,
         "revision": None}
        for name, path in bundled.items()
    ]  # fmt: skip
    hub = [
        {"name": model.name, "path": str(model.path), "bytes": model.nbytes,
         "last_used": datetime.fromtimestamp(model.last_used, UTC).isoformat(timespec="seconds"),
         "complete": not model.missing, "revision": model.revision}
        for model in cached
    ]  # fmt: skip
    return {"cache": str(cache_directory()), "models": [*package, *hub]}


def _nbytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def _note(model: CachedModel) -> str:
    if model.missing:
        return f"incomplete; dgemma pull {model.name} fetches the rest"
    return "" if model.revision == "main" else f"revision {model.revision}"


def _ago(seconds: float) -> str:
    """A file system may record an access once a day only: nothing finer than a day is told."""
    days = int(seconds // 86_400)
    for size, unit in ((365, "year"), (30, "month"), (1, "day")):
        if days >= size:
            count = days // size
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "today"


def _aligned(rows: Sequence[tuple[str, str, str, str]]) -> str:
    name, size, used = (max(len(row[column]) for row in rows) for column in range(3))
    return "\n".join(
        f"{row[0]:<{name}}   {row[1]:>{size}}   {row[2]:<{used}}   {row[3]}".rstrip() for row in rows
    )
