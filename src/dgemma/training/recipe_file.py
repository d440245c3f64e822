"""Read recipes from files and the command line. YAML and JSON are parsed, a Python file is run.

pydantic checks types against the annotations of the recipe. An unknown name is refused with a suggestion.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import operator
import reprlib
import runpy
import types
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial, reduce
from pathlib import Path
from typing import (
    Annotated,
    Any,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from dgemma.errors import InputError, suggestion
from dgemma.training.recipe import Recipe


def read_recipe(path: str | Path | None, changes: Sequence[str] = ()) -> Recipe:
    """The recipe of a file, if any, with changes such as "optimizer.learning_rate=1e-4"."""
    entries: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        if not file.is_file():
            raise InputError(
                f"{file} is not a file; give a recipe in YAML or Python, or name=value.", field="path"
            )
        entries = _from_python(file) if file.suffix == ".py" else _from_text(file)
    for change in changes:
        _set(entries, change)
    missing = [name for name in ("model", "out", "data") if name not in entries]
    known = {field.name for field in dataclasses.fields(Recipe)}
    # An unknown name is reported first: often it is one of these, misspelt.
    if missing and entries.keys() <= known:
        raise InputError(
            f"the recipe lacks {' and '.join(missing)}; for example: "
            f"{missing[0]}={_EXAMPLE_VALUES[missing[0]]}"
        )
    return _build(entries)


_EXAMPLE_VALUES = {"model": "my-model", "out": "runs/first", "data": "chats.jsonl"}


def to_plain(value: Any) -> Any:
    """A recipe as plain data for JSON. Records from Python are replaced by the name of their type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            # Records can be of any number and type; they are not part of the recipe.
            name: _type_name(part) if name == "records" and part is not None else to_plain(part)
            for name, part in _fields_of(value).items()
        }
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: to_plain(part) for name, part in value.items()}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return _type_name(value)


def with_new_entries(plain: Mapping[str, Any], recipe: Any) -> dict[str, Any]:
    """`plain`, written by an earlier version, plus the entries it lacks, at their defaults."""
    found = dict(plain)
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        section = found.get(field.name)
        if field.name in found:
            if dataclasses.is_dataclass(value) and isinstance(section, Mapping):
                found[field.name] = with_new_entries(section, value)
        elif field.default is not dataclasses.MISSING:
            found[field.name] = to_plain(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = to_plain(field.default_factory())
    return found


def _type_name(value: Any) -> str:
    return f"<{type(value).__name__}>"


def _fields_of(value: Any) -> dict[str, Any]:
    """The entries of a section, by name. Sections inside it stay dataclasses."""
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
    raise InputError(
        f"{file} defines no `recipe`: a Recipe, a dictionary, or a function that returns one.", field="path"
    )


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
        raise InputError(f"{file} cannot be read: {error.strerror}.", field="path") from None
    except UnicodeDecodeError:
        raise InputError(f"{file} is not UTF-8 text; it is no recipe.", field="path") from None
    # JSON is not a subset of YAML: tabs, escaped surrogate pairs and control characters differ.
    kind, parse = ("JSON", json.loads) if file.suffix == ".json" else ("YAML", _yaml().safe_load)
    try:
        found = parse(text)
    except Exception as error:  # PyYAML raises ValueError, KeyError, AttributeError ... for bad scalars
        raise InputError(
            f"{file} is not valid {kind}: {' '.join(str(error).split())[:200]}", field="path"
        ) from None
    if not isinstance(found, dict):
        raise InputError(f"{file} holds no recipe; write lines such as `model: my-model`.", field="path")
    return found


def _set(entries: dict[str, Any], change: str) -> None:
    name, equals, text = change.partition("=")
    if not equals or not name:
        raise InputError(
            f"{change!r} is no change of the recipe; write name=value, for example steps=100.",
            field="changes",
        )
    parse = _yaml().safe_load
    try:
        value = parse(text) if text else ""
    except Exception:  # text that is not valid YAML is a string, such as @home or 2024-13-45
        value = text
    place = entries
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


# Validation: pydantic compares each entry with the annotation of its field.


@cache
def _adapter() -> Any:
    try:
        from pydantic import TypeAdapter
    except ImportError:
        raise InputError('recipes need pydantic; run: pip install "dgemma[train]"') from None
    return TypeAdapter(_checked(Recipe))


def _build(entries: Mapping[str, Any]) -> Recipe:
    adapter = _adapter()
    from pydantic import ValidationError

    try:
        recipe: Recipe = adapter.validate_python(entries)
    except ValidationError as error:
        # An unknown name first: a missing entry is often the same name, misspelled.
        found = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
        raise _recipe_error(found[0]) from None
    return recipe


def _checked(hint: Any) -> Any:
    """The annotation that pydantic checks a field by: strict, except for types that YAML lacks.

    A section is checked as a TypedDict and then built: in strict mode pydantic accepts no mapping for a
    dataclass.
    """
    from pydantic import AfterValidator, BeforeValidator, ConfigDict, PlainValidator
    from typing_extensions import TypedDict  # pydantic needs its own before Python 3.12

    origin, args = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        kind: Any = hint
        hints = get_type_hints(kind)
        entries = {
            f.name: (Required if _is_required(f) else NotRequired)[_checked(hints[f.name])]
            for f in dataclasses.fields(kind)
        }
        typed_dict: Any = TypedDict
        section = typed_dict(kind.__name__, entries)
        section.__pydantic_config__ = ConfigDict(strict=True, extra="forbid")
        build = AfterValidator(lambda values: kind(**values))
        return Annotated[section, BeforeValidator(partial(_mapping, kind)), build]
    if hint in (int, float):
        return Annotated[hint, BeforeValidator(partial(_number, hint))]
    if origin is tuple:
        items: Any = tuple(map(_checked, args))
        return Annotated[types.GenericAlias(tuple, items), BeforeValidator(partial(_listed, hint))]
    if origin is Iterable:
        return Annotated[Any, PlainValidator(_records)]
    if origin in (Union, types.UnionType):
        return reduce(operator.or_, map(_checked, args))
    return hint


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _mapping(section: type, value: Any) -> Any:
    if isinstance(value, section):
        value = _fields_of(value)  # Python does not check types: check it like one from a file
    if isinstance(value, str) and "path" in section.__annotations__:
        value = {"path": value}
    if not isinstance(value, Mapping):
        raise _entry_error("section", first=dataclasses.fields(section)[0].name)
    return {name if isinstance(name, str) else _shown(name): entry for name, entry in value.items()}


def _number(kind: type, value: Any) -> Any:
    if kind is float and isinstance(value, str):
        # YAML 1.1 reads 1e-4 as text.
        with contextlib.suppress(ValueError):
            value = float(value)
    if type(value) is int and not -_MAX_INTEGER <= value <= _MAX_INTEGER:
        raise _entry_error("bits", bits=value.bit_length())
    return value


def _listed(hint: Any, value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise _entry_error("list")
    num_values = len(get_args(hint))
    if get_args(hint)[-1] is not Ellipsis and len(value) != num_values:
        raise _entry_error("length", found=len(value), needed=num_values)
    return tuple(value)  # YAML and JSON have lists only


def _records(value: Any) -> Any:
    is_sequence = isinstance(value, Iterable) or hasattr(value, "__getitem__")
    if isinstance(value, str | bytes | Mapping) or not is_sequence:
        raise _entry_error("records")
    return value  # untouched: a stream must not be read here


def _entry_error(kind: str, **context: Any) -> Exception:
    from pydantic_core import PydanticCustomError

    return PydanticCustomError(kind, "the recipe's entry is wrong", context)


_MAX_INTEGER = (1 << 63) - 1
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "dict": "names with values, such as {t_max: 0.6}",  # rollout.sampling is the only one
}
_EXAMPLES = {
    "optimizer.betas": "0.95, 0.99",
    "lora.targets": "attention, experts",
    "freeze": "router",
    "callbacks": "tensorboard",
}


def _recipe_error(error: Any) -> InputError:
    """The InputError of a pydantic error: the name of the entry, its value, the rule, the remedy."""
    context, value = error.get("ctx", {}), error["input"]
    path = [part for part in error["loc"] if isinstance(part, str)]
    name = ".".join(path)
    match error["type"]:
        case "extra_forbidden":
            known = [f.name for f in dataclasses.fields(_hint_at(path[:-1]))]
            text = f"the recipe has no {name}{suggestion(path[-1], known)} Known: {', '.join(known)}."
        case "missing":
            text = f"the recipe lacks {name}."
        case "value_error":
            text = str(context["error"])
            # LoraSettings is also used without a recipe, so its errors do not name the section.
            if name and not text.startswith((f"{name}.", f"{name} ")):
                text = f"{name}: {text}"
            entry = getattr(context["error"], "field", None) or ""
            if path:
                entry = entry.removeprefix(path[-1]).removeprefix(".")
            name = ".".join(filter(None, (name, entry)))
        case "section":
            text = f"{name} is {_shown(value)}; it has parts, such as {name}.{context['first']}."
        case "bits":
            text = f"{name} is a number of {context['bits']} bits; it must fit into 63."
        case "list":
            example = _EXAMPLES.get(name, "a, b")
            text = f"{name} is {_shown(value)}; give a list, such as [{example}]."
        case "length":
            text = f"{name} has {context['found']} values; it takes {context['needed']}."
        case "records":
            text = f"{name} is {_shown(value)}; records come from a Python recipe. In YAML give a path."
        case "literal_error":
            choices = [str(choice) for choice in get_args(_hint_at(path))]
            guess = suggestion(value, choices) if isinstance(value, str) else "."
            text = f"{name} is {_shown(value)}{guess} Choices: {', '.join(choices)}."
        case kind:  # int_type, int_from_float, float_type, string_type, string_unicode, dict_type, ...
            text = f"{name} is {_shown(value)}; it must be {_KINDS[kind.partition('_')[0]]}."
    return InputError(text, field=name or None)


def _hint_at(path: Sequence[str]) -> Any:
    """The annotation of the entry at `path`, without a `| None`."""
    hint: Any = Recipe
    for name in path:
        hint = get_type_hints(hint)[name]
        if get_origin(hint) in (Union, types.UnionType):
            (hint,) = (arg for arg in get_args(hint) if arg is not type(None))
    return hint


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 100, 100


def _shown(value: Any) -> str:
    """A value, shortened for a message. A few lines of YAML can make a value of any size."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python refuses to print an integer of thousands of digits
        return _type_name(value)
