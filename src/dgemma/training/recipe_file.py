"""Recipes from files and from the command line: YAML or JSON by name, Python by running it.

Types are checked against the recipe's own annotations; an unknown name is refused with a guess.
"""

from __future__ import annotations

import contextlib
import dataclasses
import runpy
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dgemma.errors import InputError, suggestion
from dgemma.training.recipe import Recipe


def read_recipe(path: str | Path | None, changes: Sequence[str] = ()) -> Recipe:
    """The recipe of a file, or of nothing, with changes such as "optimizer.learning_rate=1e-4"."""
    given: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        if not file.is_file():
            raise InputError(f"{file} is not a file; give a recipe in YAML or Python, or name=value.")
        given = _from_python(file) if file.suffix == ".py" else _from_yaml(file)
    for change in changes:
        _set(given, change)
    missing = [name for name in ("model", "out", "data") if name not in given]
    if missing:
        raise InputError(
            f"the recipe lacks {' and '.join(missing)}; for example: {missing[0]}={_LIKE[missing[0]]}"
        )
    recipe: Recipe = _build(Recipe, given, "")
    return recipe


_LIKE = {"model": "my-model", "out": "runs/first", "data": "chats.jsonl"}


def to_plain(value: Any) -> Any:
    """A recipe as plain data for JSON; records from Python are named by their type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return f"<{type(value).__name__}>"


def _from_python(file: Path) -> dict[str, Any]:
    """The file's `recipe`: a Recipe, a dictionary, or a function that returns one. Runs the file's code."""
    names = runpy.run_path(str(file))
    found = names.get("recipe")
    if callable(found):
        found = found()
    if isinstance(found, Recipe):
        return _fields_of(found)
    if isinstance(found, Mapping):
        return dict(found)
    raise InputError(f"{file} defines no `recipe`: a Recipe, a dictionary, or a function that returns one.")


def _fields_of(value: Any) -> dict[str, Any]:
    return {
        f.name: _fields_of(part) if dataclasses.is_dataclass(part := getattr(value, f.name)) else part
        for f in dataclasses.fields(value)
    }


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise InputError("recipes in YAML need PyYAML; run: pip install 'dgemma[train]'") from None
    return yaml


def _from_yaml(file: Path) -> dict[str, Any]:
    yaml = _yaml()
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise InputError(f"{file} is not UTF-8 text; it is no recipe.") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{file} is not valid YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(found, dict):
        raise InputError(f"{file} holds no recipe; write lines such as `model: my-model`.")
    return found


def _set(given: dict[str, Any], change: str) -> None:
    name, equals, text = change.partition("=")
    if not equals or not name:
        raise InputError(f"{change!r} is no change of the recipe; write name=value, for example steps=100.")
    yaml = _yaml()
    try:
        value = yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        value = text
    place = given
    *parents, leaf = name.split(".")
    for parent in parents:
        inner = place.get(parent)
        if isinstance(inner, str):  # `data: chats.jsonl` for short
            inner = {"path": inner}
        if not isinstance(inner, dict):
            inner = {}
        place[parent] = inner = dict(inner)
        place = inner
    place[leaf] = value


def _build(kind: type, given: Mapping[str, Any], where: str) -> Any:
    hints = get_type_hints(kind)
    known = [f.name for f in dataclasses.fields(kind)]
    values = {}
    for name, value in given.items():
        if name not in known:
            hint = suggestion(str(name), known)
            raise InputError(f"the recipe has no {where}{name}{hint} Known: {', '.join(known)}.")
        values[name] = _read(hints[name], value, f"{where}{name}")
    needed = [
        f.name
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
        and f.name not in values
    ]
    if needed:
        raise InputError(f"the recipe lacks {where}{needed[0]}.")
    try:
        return kind(**values)
    except InputError as error:
        text = str(error)
        # The adapter's settings are also checked where no recipe is, and name no section.
        raise InputError(text if text.startswith(where) or not where else f"{where[:-1]}: {text}") from None


def _read(hint: Any, value: Any, name: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        (inner,) = (arg for arg in get_args(hint) if arg is not type(None))
        return _read(inner, value, name)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        if isinstance(value, hint):
            return value
        if isinstance(value, str) and "path" in hint.__annotations__:
            value = {"path": value}
        if not isinstance(value, Mapping):
            raise InputError(
                f"{name} is {value!r}; it has parts, such as {name}.{dataclasses.fields(hint)[0].name}."
            )
        return _build(hint, value, f"{name}.")
    if origin is Literal:
        if value not in get_args(hint):
            choices = [str(choice) for choice in get_args(hint)]
            raise InputError(
                f"{name} is {value!r}{suggestion(str(value), choices)} Choices: {', '.join(choices)}."
            )
        return value
    if origin is tuple:
        return _read_tuple(hint, value, name)
    if origin is not None and issubclass(origin, Iterable):  # records
        if isinstance(value, str | Mapping):
            raise InputError(f"{name} is {value!r}; records come from a Python recipe. In YAML give a path.")
        return value
    return _read_plain(hint, value, name)


def _read_tuple(hint: Any, value: Any, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise InputError(f"{name} is {value!r}; give a list, such as [{_EXAMPLES.get(name, 'a, b')}].")
    args = get_args(hint)
    inner = args[:1] * len(value) if args[-1] is Ellipsis else args
    if len(inner) != len(value):
        raise InputError(f"{name} has {len(value)} values; it takes {len(inner)}.")
    return tuple(_read(kind, item, name) for kind, item in zip(inner, value, strict=True))


_EXAMPLES = {"optimizer.betas": "0.95, 0.99", "lora.targets": "attention, experts", "freeze": "router"}
_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _read_plain(kind: Any, value: Any, name: str) -> Any:
    if kind is float and isinstance(value, str):
        # YAML reads 1e-4 as text, which nobody means.
        with contextlib.suppress(ValueError):
            value = float(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise InputError(f"{name} is {value!r}; it must be {_KINDS[kind]}.")
    return value
