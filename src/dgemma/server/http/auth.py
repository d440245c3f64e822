"""API keys, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import Scope

from dgemma.server.http.errors import ApiError

OPEN_PATHS = ("/health", "/ready")


class ApiKeyAuth:
    """Bearer authentication with any of the configured keys."""

    def __init__(self, keys: Iterable[str]) -> None:
        # Digests have one length, so that the comparison does not reveal a key's length.
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, scope: Scope) -> None:
        """Refuse a request without a valid key, if keys are configured; health checks need none."""
        if not self._digests or scope["path"] in OPEN_PATHS:
            return
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = (headers[0] if len(headers) == 1 else b"").partition(b" ")
        digest = _digest(key.strip())
        # All keys are compared, whichever matches.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            what = "is not one of this server's" if headers else "is missing"
            raise ApiError(
                f"the API key {what}; send it as 'Authorization: Bearer KEY'.",
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
