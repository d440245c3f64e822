"""Room on disk, asked for before long work begins."""

from __future__ import annotations

import shutil
from pathlib import Path

from dgemma.errors import InputError


def check_disk(out: Path, needed: int, remedy: str = "Choose a smaller preset, or --config-only.") -> None:
    place = out.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise InputError(
            f"the checkpoint needs {needed / 1e9:.1f} GB, {place} has {free / 1e9:.1f} GB free. {remedy}"
        )
