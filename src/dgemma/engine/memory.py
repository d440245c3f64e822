"""The context memory of all sequences: two pools of pages, and what of earlier prompts is still in them.

Full layers need every token of a sequence, sliding layers the last window of it: hence two pools. Pages of a
sequence's context are only ever written by encoding; a page that is written to its end never changes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dgemma.engine.capacity import window_pages_of
from dgemma.engine.pages import PagePool
from dgemma.engine.prefix import KeyChain, PrefixIndex


@dataclass
class Holding:
    """The pages of one sequence. Page i of it has the positions from i * page_len on."""

    chain: KeyChain
    most_tokens: int  # that it may grow to
    length: int  # tokens encoded
    cached: int  # of these, found and not computed
    full: list[int]
    window: dict[int, int]  # by number, only those the next token may see
    full_claim: int
    window_claim: int
    shared_full: int  # the first so many full pages are somebody's
    branch: int  # up to here somebody else's text was the same: a third one may go on from there
    shared_window: set[int] = field(default_factory=set)
    remembered: int = 0  # whole pages that others were told of


class Memory:
    def __init__(
        self,
        *,
        page_len: int,
        window: int,
        full_pages: int = 0,
        window_pages: int = 0,
        most_gathered: int | None = None,
        reuse: bool = True,
    ) -> None:
        """window: positions a token of a sliding layer sees, itself included. reuse: remember prefixes.

        most_gathered: tokens of all sequences together, each counted for itself: a running canvas has a copy
        of its context, also of pages it shares.
        """
        self.page_len = page_len
        self.full = PagePool(full_pages)
        self.window = PagePool(window_pages)
        self.index = PrefixIndex(self.full, self.window)
        self._window = window
        self._most_gathered = most_gathered
        self._gathered = 0
        self._reuse = reuse

    @property
    def longest(self) -> int:
        """The most tokens a sequence may have."""
        tokens = self.full.size * self.page_len
        return tokens if self._most_gathered is None else min(tokens, self._most_gathered)

    def ensure(self, lengths: Sequence[int]) -> None:
        """Have pages for sequences of these lengths at once, and as many again for what is kept of others."""
        for pool, count in ((self.full, self._pages), (self.window, self._most)):
            pool.grow(max(pool.size, pool.size - pool.room + 2 * sum(map(count, lengths))))

    def fits(self, num_tokens: int) -> bool:
        """Could a sequence of `num_tokens` be opened if it were alone?"""
        return num_tokens <= self.longest and self._most(num_tokens) <= self.window.size

    def open(self, chain: KeyChain, num_tokens: int, reusable: int) -> Holding | None:
        """Room for a sequence that may grow to `num_tokens`; None if there is not enough now.

        Of its first `reusable` tokens, those that are there already are not to be computed again.
        """
        if self._most_gathered is not None and self._gathered + num_tokens > self._most_gathered:
            return None
        usable, known = self.index.longest(chain.keys[: reusable // self.page_len])
        keys = chain.keys[:usable]
        if keys and self._most(num_tokens) + self._tail_len(len(keys)) > self.window.size:
            keys = []  # a tail beside its own window would never fit
        full, tail = self.index.pages(keys) if keys else ([], ())
        full_claim, window_claim = self._pages(num_tokens) - len(full), self._most(num_tokens)
        wanted = (self.full, full_claim, full), (self.window, window_claim, tail)
        for pool, claim, shared in wanted:
            if claim + sum(not pool.is_shared(page) for page in shared) > pool.room:
                return None
        for pool, claim, shared in wanted:
            pool.claim(claim)
            for page in shared:
                pool.share(page)
        self._gathered += num_tokens
        self.index.touch(keys)
        numbers = range(len(full) - len(tail), len(full))
        return Holding(
            chain=chain,
            most_tokens=num_tokens,
            length=len(full) * self.page_len,
            cached=len(full) * self.page_len,
            full=full,
            window=dict(zip(numbers, tail, strict=True)),
            full_claim=full_claim,
            window_claim=window_claim,
            shared_full=len(full),
            branch=known * self.page_len,
            shared_window=set(numbers),
        )

    def grow(self, holding: Holding, length: int) -> None:
        """Give it pages for its tokens up to `length`. What slid out of every later window is given up."""
        first, end = self._first_seen(length), self._pages(length)
        for number in [n for n in holding.window if n < first]:
            self._drop_window(holding, number)
        for number in range(max(first, holding.length // self.page_len), end):
            if number not in holding.window:
                if not self.window.num_free:
                    self.index.free_window_page()
                holding.window[number] = self.window.take()
        while len(holding.full) < end:
            if not self.full.num_free:
                self.index.free_full_page()
            holding.full.append(self.full.take())
        holding.length = length

    def remember(self, holding: Holding, *, tail: bool) -> None:
        """Let others find its whole pages; with `tail`, also what they need to go on behind the last one."""
        if not self._reuse:
            return
        whole = min(holding.length // self.page_len, len(holding.chain.keys))
        # Where nobody goes on from here only what is new is said: a long context would be walked every step.
        for number in range(0 if tail else holding.remembered, whole):
            self.index.add_page(holding.chain.keys[number], holding.full[number])
        holding.remembered = whole
        if not tail:
            return
        numbers = range(max(0, self._first_seen(whole * self.page_len)), whole)
        if whole and all(number in holding.window for number in numbers):
            self.index.add_tail(holding.chain.keys[whole - 1], [holding.window[n] for n in numbers])
        self.index.touch(holding.chain.keys[:whole])

    def close(self, holding: Holding) -> None:
        for number in list(holding.window):
            self._drop_window(holding, number)
        for number, page in enumerate(holding.full):
            if number < holding.shared_full:
                self.full.unshare(page)
            else:
                self.full.drop(page)
        self.full.unclaim(holding.full_claim)
        self.window.unclaim(holding.window_claim)
        self._gathered -= holding.most_tokens
        holding.full = []

    def _drop_window(self, holding: Holding, number: int) -> None:
        page = holding.window.pop(number)
        if number in holding.shared_window:
            holding.shared_window.discard(number)
            self.window.unshare(page)
        else:
            self.window.drop(page)

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_len)

    def _first_seen(self, length: int) -> int:
        """The first page that a token behind `length`, or behind its last whole page, may see."""
        whole = length // self.page_len * self.page_len
        return max(0, whole - self._window + 1) // self.page_len

    def _tail_len(self, pages: int) -> int:
        return pages - self._first_seen(pages * self.page_len)

    def _most(self, num_tokens: int) -> int:
        """The most window pages that a sequence of so many tokens owns at a time."""
        return min(self._pages(num_tokens), window_pages_of(self._window, self.page_len))
