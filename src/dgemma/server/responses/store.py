"""Responses that were kept, in memory: bounded in number and bytes, each for its API key alone."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from dgemma.server.http.api_key import ApiKey


@dataclass(frozen=True, kw_only=True)
class KeptResponse:
    response: bytes  # as it was sent
    inputs: bytes  # a JSON list: the items it answers, those of earlier responses first
    num_inherited: int  # of earlier responses

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.inputs)


class ResponseStore:
    """Keeps the newest responses of each key. Used from several threads.

    If there is no space, the key that holds the most loses its oldest, so that no key empties another's. A
    response counts with the whole conversation it answers: it can be continued when those before it are gone.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_count, self.max_bytes = max_count, max_bytes
        self._lock = threading.Lock()
        # By the digest of the key: a name may be given to another client later.
        self._kept: dict[bytes, OrderedDict[str, KeptResponse]] = {}
        self._num_bytes: dict[bytes, int] = {}

    def of(self, key: ApiKey) -> KeptResponses:
        return KeptResponses(self, key.digest)

    @property
    def count(self) -> int:
        return sum(map(len, self._kept.values()))

    @property
    def num_bytes(self) -> int:
        return sum(self._num_bytes.values())

    def put(self, owner: bytes, id_: str, kept: KeptResponse) -> None:
        """Keep a response, unless it alone is larger than the bound."""
        if kept.num_bytes > self.max_bytes or self.max_count == 0:
            return
        with self._lock:
            self._kept.setdefault(owner, OrderedDict())[id_] = kept
            self._num_bytes[owner] = self._num_bytes.get(owner, 0) + kept.num_bytes
            while self.count > self.max_count or self.num_bytes > self.max_bytes:
                # By bytes, then by number: one of them is what is short.
                largest = max(self._kept, key=lambda name: (self._num_bytes[name], len(self._kept[name])))
                self._drop(largest, next(iter(self._kept[largest])))

    def get(self, owner: bytes, id_: str) -> KeptResponse | None:
        with self._lock:
            return self._kept[owner].get(id_) if owner in self._kept else None

    def delete(self, owner: bytes, id_: str) -> bool:
        """Whether there was such a response."""
        with self._lock:
            if id_ not in self._kept.get(owner, {}):
                return False
            self._drop(owner, id_)
            return True

    def _drop(self, owner: bytes, id_: str) -> None:
        self._num_bytes[owner] -= self._kept[owner].pop(id_).num_bytes
        if not self._kept[owner]:
            del self._kept[owner], self._num_bytes[owner]


@dataclass(frozen=True)
class KeptResponses:
    """The responses of one key."""

    store: ResponseStore
    owner: bytes

    @property
    def keeps_any(self) -> bool:
        return self.store.max_count > 0

    def put(self, id_: str, kept: KeptResponse) -> None:
        self.store.put(self.owner, id_, kept)

    def get(self, id_: str) -> KeptResponse | None:
        return self.store.get(self.owner, id_)

    def delete(self, id_: str) -> bool:
        return self.store.delete(self.owner, id_)
