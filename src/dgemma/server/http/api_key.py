"""A client's API key as the server knows it: a name for logs and metrics, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class KeyLimits:
    """Limits of one key; None: no limit."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None  # of prompts and answers
    max_num_seqs: int | None = None  # answers written at once
    compile_seconds_per_minute: float | None = None  # of response formats


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """A known key: its name, the digest it is recognized by, and its limits."""

    name: str
    digest: bytes
    limits: KeyLimits = field(default_factory=KeyLimits)


ANONYMOUS = ApiKey(name="", digest=b"")
"""Every client of a server without keys."""
