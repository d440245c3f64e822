"""API keys, compared so that the time taken tells nothing of them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import Scope

from dgemma.server.api_error import ApiError

OPEN_PATHS = ("/health", "/ready")


class ApiKeys:
    def __init__(self, keys: Iterable[str]) -> None:
        # Digests have one length: comparing them does not tell a key's.
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, scope: Scope) -> None:
        """Refuse a request without one of our keys, if we have any; health checks need none."""
        if not self._digests or scope["path"] in OPEN_PATHS:
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
        digest = _digest(key.strip())
        # All are compared, whichever fits.
        fits = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(fits):
            what = "is not one of this server's" if given else "is missing"
            raise ApiError(
                f"the API key {what}; send it as 'Authorization: Bearer KEY'.",
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
