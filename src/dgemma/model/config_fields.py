"""Typed access to the JSON objects of a `config.json`. Imports no torch."""

from __future__ import annotations

from typing import Any

from dgemma.errors import ConfigError


class ConfigFields:
    """Typed access to a JSON object, with errors that name the field and the value."""

    def __init__(self, raw: object, where: str) -> None:
        if not isinstance(raw, dict):
            raise ConfigError(
                f"{where} is {shown_kind(raw)}; it must be a JSON object of a diffusion_gemma checkpoint."
            )
        self._raw: dict[str, Any] = raw
        self._where = where

    def get(self, name: str) -> Any:
        return self._raw.get(name)

    def expect(self, name: str, value: object, *, required: bool = False) -> None:
        found = self._raw.get(name, None if required else value)
        if found is None and not required:
            return
        if found != value or isinstance(found, bool) != isinstance(value, bool):
            raise ConfigError(f"{self._where}: {name} is {found!r}; dgemma supports only {value!r}.")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._raw.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self._where} lacks {name!r}; the checkpoint is incomplete.")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self._where}: {name} is {value!r}; it must be a whole number.")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self._where}: {name} is {value!r}; it must be a number.")
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{self._where}: {name} is too large for a number.") from None

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._raw.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(f"{self._where}: {name} is {value!r}; it must be true or false.")
        return value


def shown_kind(raw: object) -> str:
    return "missing" if raw is None else f"a {type(raw).__name__}"
