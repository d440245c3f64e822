"""What of earlier prompts is still there: a chain of pages for full layers, tails for sliding ones.

A prefix of i pages can be used again if the full pool still has all i pages of it and the window pool still
has its *tail*: the pages that hold the last window before its end. Tails exist only where somebody asked for
one, at the ends of prompts and turns: the window of any other place was dropped when it slid on.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from dgemma.engine.pages import PagePool

Key = bytes
"""Names a page by all tokens up to its end: equal keys, equal contents."""


class KeyChain:
    """The keys of a growing sequence's whole pages."""

    def __init__(self, page_len: int, root: bytes = b"") -> None:
        """`root` names what else the contents depend on: the weights and their adapter."""
        self.keys: list[Key] = []
        self._page_len = page_len
        self._last = hashlib.blake2b(root, digest_size=16).digest()
        self._rest: list[int] = []

    def add(self, tokens: Sequence[int]) -> None:
        waiting = [*self._rest, *tokens]
        whole = len(waiting) // self._page_len * self._page_len
        for start in range(0, whole, self._page_len):
            page = array("q", waiting[start : start + self._page_len]).tobytes()
            self._last = hashlib.blake2b(self._last + page, digest_size=16).digest()
            self.keys.append(self._last)
        self._rest = waiting[whole:]


class PrefixIndex:
    """Which pages hold which prefix. The least recently used goes first, and a chain from its end."""

    def __init__(self, full: PagePool, window: PagePool) -> None:
        self._full_pool = full
        self._window_pool = window
        self._full: OrderedDict[Key, int] = OrderedDict()
        self._tails: OrderedDict[Key, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full)

    @property
    def num_tails(self) -> int:
        return len(self._tails)

    def longest(self, keys: Sequence[Key]) -> tuple[int, int]:
        """Of `keys`, the most pages that are there with a tail at their end; and the most without."""
        usable = known = 0
        for count, key in enumerate(keys, 1):
            if key not in self._full:
                break
            known = count
            if key in self._tails:
                usable = count
        return usable, known

    def pages(self, keys: Sequence[Key]) -> tuple[list[int], tuple[int, ...]]:
        """Full pages and tail of a prefix that is there."""
        return [self._full[key] for key in keys], self._tails[keys[-1]]

    def touch(self, keys: Sequence[Key]) -> None:
        """They were just used."""
        # From the end to the root: so of a chain the end goes first, and no root before what hangs on it.
        for key in reversed(keys):
            if key in self._full:
                self._full.move_to_end(key)
            if key in self._tails:
                self._tails.move_to_end(key)

    def add_page(self, key: Key, page: int) -> None:
        """A page that is written to its end. Contents that are there already stay as they are."""
        if key not in self._full:
            self._full[key] = page
            self._full_pool.keep(page)

    def add_tail(self, key: Key, pages: Sequence[int]) -> None:
        if key not in self._tails:
            self._tails[key] = tuple(pages)
            for page in pages:
                self._window_pool.keep(page)

    def free_full_page(self) -> None:
        """Let the least recently used page go that nobody uses."""
        while self._full_pool.in_use(self._full[key := next(iter(self._full))]):
            self._full.move_to_end(key)
        self._full_pool.forget(self._full.pop(key))
        if key in self._tails:  # without the page before its end it can never be used
            self._forget_tail(key)

    def free_window_page(self) -> None:
        """Let tails go, the least recently used first, until a page is free: part of a tail is of no use."""
        while not self._window_pool.num_free:
            while all(map(self._window_pool.in_use, self._tails[key := next(iter(self._tails))])):
                self._tails.move_to_end(key)
            self._forget_tail(key)

    def _forget_tail(self, key: Key) -> None:
        for page in self._tails.pop(key):
            self._window_pool.forget(page)
