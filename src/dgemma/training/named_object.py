"""Objects that a recipe names: callbacks and rewards of the user."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dgemma.errors import InputError


def load_named(name: str, *, field: str) -> Any:
    """The object that `module:name` or `file.py:name` names. Runs the code of that module or file."""
    place, _, attribute = name.rpartition(":")
    is_file = place.endswith(".py")
    # A name with a dot before it is relative to a package, and a recipe is in none.
    if not place or not attribute or (place.startswith(".") and not is_file):
        raise InputError.about(field, f"has {name!r}; write module:name or file.py:name.")
    if is_file and not Path(place).is_file():
        raise InputError.about(field, f"has {name!r}, and {place} is not a file.")
    try:
        found: Any = SimpleNamespace(**runpy.run_path(place)) if is_file else importlib.import_module(place)
    except ImportError as error:
        raise InputError.about(field, f"has {name!r}, which cannot be imported: {error}.") from error
    if not hasattr(found, attribute):
        raise InputError.about(field, f"has {name!r}, and {place} has no {attribute!r}.")
    return getattr(found, attribute)
