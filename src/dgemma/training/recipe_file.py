"""Recipes from files and from the command line: YAML or JSON by reading it, Python by running it.

Types are checked against the recipe's own annotations; an unknown name is refused with a guess.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import reprlib
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
        given = _from_python(file) if file.suffix == ".py" else _from_text(file)
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
        return {
            # However many records there are, and whatever they are made of, they are no part of the recipe.
            name: _kind_of(part) if name == "records" and part is not None else to_plain(part)
            for name, part in _fields_of(value).items()
        }
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return _kind_of(value)


def with_new_entries(plain: Mapping[str, Any], recipe: Any) -> dict[str, Any]:
    """`plain`, written by an earlier version, with the entries it could not know, at their defaults."""
    found = dict(plain)
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        held = found.get(field.name)
        if field.name in found:
            if dataclasses.is_dataclass(value) and isinstance(held, Mapping):
                found[field.name] = with_new_entries(held, value)
        elif field.default is not dataclasses.MISSING:
            found[field.name] = to_plain(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = to_plain(field.default_factory())
    return found


def _kind_of(value: Any) -> str:
    return f"<{type(value).__name__}>"


def _fields_of(value: Any) -> dict[str, Any]:
    """A section's entries; its own sections stay as they are."""
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


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


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise InputError("recipes in YAML need PyYAML; run: pip install 'dgemma[train]'") from None
    return yaml


def _from_text(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{file} is not UTF-8 text; it is no recipe.") from None
    # JSON is not quite a part of YAML: tabs, escaped pairs and control characters differ.
    kind, parse = ("JSON", json.loads) if file.suffix == ".json" else ("YAML", _yaml().safe_load)
    try:
        found = parse(text)
    except Exception as error:  # PyYAML lets ValueError, KeyError, AttributeError ... of bad scalars through
        raise InputError(f"{file} is not valid {kind}: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(found, dict):
        raise InputError(f"{file} holds no recipe; write lines such as `model: my-model`.")
    return found


def _set(given: dict[str, Any], change: str) -> None:
    name, equals, text = change.partition("=")
    if not equals or not name:
        raise InputError(f"{change!r} is no change of the recipe; write name=value, for example steps=100.")
    parse = _yaml().safe_load
    try:
        value = parse(text) if text else ""
    except Exception:  # whatever is no YAML is text, such as @home or 2024-13-45
        value = text
    place = given
    *parents, leaf = name.split(".")
    for parent in parents:
        inner = place.get(parent)
        if isinstance(inner, str):  # `data: chats.jsonl` for short
            inner = {"path": inner}
        if dataclasses.is_dataclass(inner):  # from a Python recipe
            inner = _fields_of(inner)
        place[parent] = inner = dict(inner) if isinstance(inner, Mapping) else {}
        place = inner
    place[leaf] = value


def _build(kind: type, given: Mapping[str, Any], where: str) -> Any:
    hints = get_type_hints(kind)
    known = [f.name for f in dataclasses.fields(kind)]
    values = {}
    for name, value in given.items():
        if name not in known:
            unknown = name if isinstance(name, str) else _shown(name)
            hint = suggestion(unknown, known)
            raise InputError(f"the recipe has no {where}{unknown}{hint} Known: {', '.join(known)}.")
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
        text, section = str(error), where[:-1]
        # The adapter's settings are also checked where no recipe is, and name no section.
        named = not where or text.startswith((where, f"{section} "))
        raise InputError(text if named else f"{section}: {text}") from None


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
            value = _fields_of(value)  # Python checks no types: read it as if it were written
        if isinstance(value, str) and "path" in hint.__annotations__:
            value = {"path": value}
        if not isinstance(value, Mapping):
            raise InputError(
                f"{name} is {_shown(value)}; it has parts, such as {name}.{dataclasses.fields(hint)[0].name}."
            )
        return _build(hint, value, f"{name}.")
    if origin is Literal:
        if value not in get_args(hint):
            choices = [str(choice) for choice in get_args(hint)]
            guess = suggestion(value, choices) if isinstance(value, str) else "."
            raise InputError(f"{name} is {_shown(value)}{guess} Choices: {', '.join(choices)}.")
        return value
    if origin is tuple:
        return _read_tuple(hint, value, name)
    if origin is not None and issubclass(origin, Iterable):  # records
        if isinstance(value, str | bytes | Mapping) or not _has_items(value):
            raise InputError(
                f"{name} is {_shown(value)}; records come from a Python recipe. In YAML give a path."
            )
        return value
    return _read_plain(hint, value, name)


def _has_items(value: Any) -> bool:
    return isinstance(value, Iterable) or hasattr(value, "__getitem__")


def _read_tuple(hint: Any, value: Any, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise InputError(f"{name} is {_shown(value)}; give a list, such as [{_EXAMPLES.get(name, 'a, b')}].")
    args = get_args(hint)
    inner = args[:1] * len(value) if args[-1] is Ellipsis else args
    if len(inner) != len(value):
        raise InputError(f"{name} has {len(value)} values; it takes {len(inner)}.")
    return tuple(_read(kind, item, name) for kind, item in zip(inner, value, strict=True))


_EXAMPLES = {"optimizer.betas": "0.95, 0.99", "lora.targets": "attention, experts", "freeze": "router"}
_MOST = (1 << 63) - 1
_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _read_plain(kind: Any, value: Any, name: str) -> Any:
    if kind is float and isinstance(value, str):
        # YAML reads 1e-4 as text, which nobody means.
        with contextlib.suppress(ValueError):
            value = float(value)
    if type(value) is int and not -_MOST <= value <= _MOST:
        raise InputError(f"{name} is a number of {value.bit_length()} bits; it must fit into 63.")
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise InputError(f"{name} is {_shown(value)}; it must be {_KINDS[kind]}.")
    return value


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 100, 100


def _shown(value: Any) -> str:
    """A value as a message has it. A few lines of YAML can make one of any size."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python refuses to write out a whole number of thousands of digits
        return _kind_of(value)
