"""Rate limits of one API key: token buckets that refill continuously."""

from __future__ import annotations

import time
from collections.abc import Callable

from dgemma.server.http.api_key import ApiKey, KeyLimits
from dgemma.server.http.errors import too_many_requests

Clock = Callable[[], float]


class Bucket:
    """Holds what may be spent: a minute's worth at most, refilled continuously.

    What a request costs may be known only at its end, so the level may fall below zero; then nothing is
    admitted until it is refilled.
    """

    def __init__(self, per_minute: float, clock: Clock) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._capacity = max(1.0, per_minute)
        self._level = self._capacity
        self._at = clock()

    def spend(self, amount: float) -> None:
        self._refill()
        self._level -= amount

    def wait_s(self, amount: float = 0.0) -> float:
        """Seconds until `amount` may be spent; 0: now."""
        self._refill()
        return max(0.0, (amount - self._level) * 60 / self._per_minute)

    def _refill(self) -> None:
        now = self._clock()
        # A clock that jumps back refills nothing, and one that jumps forward a minute's worth at most.
        passed = max(0.0, now - self._at)
        self._level = min(self._capacity, self._level + passed * self._per_minute / 60)
        self._at = now


class KeyUsage:
    """What one key has used of its limits."""

    def __init__(self, limits: KeyLimits, clock: Clock) -> None:
        self.limits = limits

        def bucket(per_minute: float | None) -> Bucket | None:
            return None if per_minute is None else Bucket(per_minute, clock)

        self._requests = bucket(limits.requests_per_minute)
        self._tokens = bucket(limits.tokens_per_minute)
        self._compiling = bucket(limits.compile_seconds_per_minute)

    def admit(self) -> None:
        """Count a request, or raise 429."""
        for bucket, amount, what in (
            (self._requests, 1.0, "requests per minute"),
            (self._tokens, 0.0, "tokens per minute"),
        ):
            if bucket is not None and (wait_s := bucket.wait_s(amount)) > 0:
                raise too_many_requests(f"this API key has used its {what}; ask again later.", wait_s)
        if self._requests is not None:
            self._requests.spend(1.0)

    def check_compile(self) -> None:
        """Raise 429 if the key has used its time for compiling response formats."""
        if self._compiling is not None and (wait_s := self._compiling.wait_s()) > 0:
            raise too_many_requests(
                "this API key has used its time for compiling response formats; ask again later.", wait_s
            )

    def spend_tokens(self, count: int) -> None:
        if self._tokens is not None:
            self._tokens.spend(count)

    def spend_compile_s(self, seconds: float) -> None:
        if self._compiling is not None:
            self._compiling.spend(seconds)


class RateLimits:
    """The usage of every key, by its name. A key whose limits change begins anew."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[str, KeyUsage] = {}

    def of(self, key: ApiKey) -> KeyUsage:
        usage = self._usage.get(key.name)
        if usage is None or usage.limits != key.limits:
            usage = self._usage[key.name] = KeyUsage(key.limits, self._clock)
        return usage
