"""The small models in the package: `bundled:forms`, `bundled:sudoku`, `bundled:text`. Imports no torch."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from dgemma.errors import CheckpointError, suggestion

PREFIX = "bundled:"
_ROOT = Path(str(resources.files("dgemma"))) / "data" / "models"


def bundled_names() -> list[str]:
    """The names of the bundled models, without the prefix."""
    return sorted(path.parent.name for path in _ROOT.glob("*/config.json"))


def bundled_path(name: str) -> Path:
    """The directory of the bundled model `name`, such as "sudoku"."""
    names = bundled_names()
    if name not in names:
        raise CheckpointError(
            f"no bundled model is called {name!r}{suggestion(name, names)} Bundled: {', '.join(names)}."
        )
    return _ROOT / name
