"""API keys: from the settings and from a file that is read again when it changes; compared in constant time.

A line of the file is a name, a key and, if wanted, limits of this key:

    alice sk-3f9... requests_per_minute=60 tokens_per_minute=20000
    bob   sk-a71...

The name is what logs and metrics show. Empty lines and lines that begin with # are skipped.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from starlette.types import Scope

from dgemma.errors import InputError, suggestion
from dgemma.server.http.api_key import ANONYMOUS, ApiKey, KeyLimits
from dgemma.server.http.errors import ApiError
from dgemma.server.http.log import LOGGER
from dgemma.server.http.web_files import web_files

OPEN_PATHS = ("/health", "/ready")
# Without a key it says no more than they do.
_ROOT = "/"
# At most so often the key file is looked at for changes.
_LOOK_EVERY_S = 1.0
_MAX_FILE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[\x21-\x7e]{1,512}")


class ApiKeyAuth:
    """Authentication with any of the configured keys, as Bearer or as x-api-key."""

    def __init__(
        self,
        keys: Iterable[str],
        file: Path | None = None,
        *,
        limits: KeyLimits = ANONYMOUS.limits,
        has_page: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """limits: of each key that the file gives none of its own. has_page: the files of the playground
        need no key: they are those of every server, and the page asks for the key."""
        self._fixed = [_named_by_digest(key, limits) for key in keys]
        self._file = file
        self._limits = limits
        self._open_paths = {*OPEN_PATHS, *(web_files() if has_page else ())} - {_ROOT}
        self._clock = clock
        self._looked = clock()
        self._signature = _signature(file)
        self._keys = self._fixed if file is None else [*self._fixed, *read_keys(file, limits)]

    @property
    def is_required(self) -> bool:
        return self._file is not None or bool(self._fixed)

    def check(self, scope: Scope) -> ApiKey:
        """The key of a request. One without a valid key is refused, if keys are configured."""
        self._read_again()
        if not self.is_required or scope["path"] in self._open_paths:
            return ANONYMOUS
        given = _given_keys(scope)
        if scope["path"] == _ROOT and not given:
            return ANONYMOUS
        # Digests have one length, so that the comparison does not reveal a key's length.
        digest = _digest(given[0] if len(set(given)) == 1 else b"")  # two that differ are none
        # All keys are compared, whichever matches.
        matches = [known for known in self._keys if hmac.compare_digest(digest, known.digest)]
        if not matches:
            what = "is not one of this server's" if given else "is missing"
            raise ApiError(
                f"the API key {what}; send it as 'Authorization: Bearer KEY', or as 'x-api-key: KEY'.",
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return matches[0]

    def _read_again(self) -> None:
        """Take a changed file. A broken one changes nothing: the keys of before stay."""
        if self._file is None or self._clock() - self._looked < _LOOK_EVERY_S:
            return
        self._looked = self._clock()
        signature = _signature(self._file)
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._keys = [*self._fixed, *read_keys(self._file, self._limits)]
        except InputError as error:
            LOGGER.error("the API key file is not usable; the keys of before stay: %s", error)
        else:
            LOGGER.info("the API key file was read again: %d keys", len(self._keys) - len(self._fixed))


def read_keys(file: Path, limits: KeyLimits = ANONYMOUS.limits) -> list[ApiKey]:
    """The keys of a file. Errors name the line, never the key."""
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise InputError(f"the API key file {file} has more than {_MAX_FILE_BYTES} bytes.")
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"the API key file {file} cannot be read: {reason}.") from None
    found: dict[str, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):
            continue
        where = f"line {number} of the API key file {file}"
        if len(parts) < 2 or not _NAME.fullmatch(parts[0]) or not _KEY.fullmatch(parts[1]):
            raise InputError(f"{where} is not 'NAME KEY [limit=value ...]', in letters, digits and ._-")
        if parts[0] in found:
            raise InputError(f"{where} has the name {parts[0]!r} again; names are different.")
        own = replace(limits, **dict(_limit(option, where) for option in parts[2:]))
        found[parts[0]] = ApiKey(name=parts[0], digest=_digest(parts[1].encode()), limits=own)
    digests = [key.digest for key in found.values()]
    if len({*digests}) != len(digests):
        raise InputError(f"the API key file {file} has one key under two names; give each its own.")
    if not found:
        raise InputError(f"the API key file {file} has no key; every client would be refused.")
    return list(found.values())


def _limit(option: str, where: str) -> tuple[str, Any]:
    name, _, value = option.partition("=")
    known = [field.name for field in fields(KeyLimits)]
    if name not in known:
        raise InputError(f"{where}: {name!r} is not a limit{suggestion(name, known)}")
    try:
        number = int(value) if name == "max_num_seqs" else float(value)
    except ValueError:
        number = 0
    if not 0 < number < 1e12:
        raise InputError(f"{where}: {name} is {value!r}; it must be a number above 0.")
    return name, number


def _given_keys(scope: Scope) -> list[bytes]:
    """The keys of a request; b"" stands for one of another scheme, or for a header that is given twice."""
    bearer = [value.partition(b" ") for name, value in scope["headers"] if name == b"authorization"]
    found = [key.strip() if scheme.lower() == b"bearer" else b"" for scheme, _, key in bearer]
    plain = [value.strip() for name, value in scope["headers"] if name == b"x-api-key"]
    return [b""] if len(found) > 1 or len(plain) > 1 else [*found, *plain]


def _signature(file: Path | None) -> tuple[int, ...] | None:
    """What changes when the file does; None where there is no file."""
    try:
        found = os.stat(file) if file is not None else None
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)


def _named_by_digest(key: str, limits: KeyLimits) -> ApiKey:
    digest = _digest(key.encode())
    return ApiKey(name=f"key-{digest.hex()[:8]}", digest=digest, limits=limits)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
