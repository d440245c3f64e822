"""Pages of one pool: who uses which, and how many are spoken for. Numbers only; the tensors lie elsewhere."""

from __future__ import annotations


class PagePool:
    """Pages 0 to `size` - 1, each free or wanted by somebody.

    A sequence *owns* the pages it writes and *shares* those of a prefix it found. The prefix index *keeps*
    pages because their contents may be wanted again: they stay until room is needed.

    A sequence claims, once, the most pages it will ever own at a time; pages that are shared count once,
    whoever shares them. As long as claims and shared pages are no more than there are pages, a page that
    nobody uses can be found whenever a claim is drawn on: so whoever was let in always finishes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._claimed = 0
        self._free = list(range(size - 1, -1, -1))
        self._owned = [False] * size
        self._sharers = [0] * size
        self._keepers = [0] * size
        self._num_owned = 0
        self._num_shared = 0

    @property
    def room(self) -> int:
        """Pages that can still be claimed or shared."""
        return self.size - self._claimed - self._num_shared

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return sum(map(self.in_use, range(self.size)))

    def grow(self, size: int) -> None:
        """More pages, free ones."""
        more = size - self.size
        self._free[:0] = range(size - 1, self.size - 1, -1)
        self._owned += [False] * more
        self._sharers += [0] * more
        self._keepers += [0] * more
        self.size = size

    def in_use(self, page: int) -> bool:
        return self._owned[page] or self._sharers[page] > 0

    def is_shared(self, page: int) -> bool:
        return self._sharers[page] > 0

    def claim(self, count: int) -> None:
        assert 0 <= count <= self.room, "a claim that could not be met"
        self._claimed += count

    def unclaim(self, count: int) -> None:
        assert self._num_owned <= self._claimed - count, "pages that are still owned"
        self._claimed -= count

    def take(self) -> int:
        """A free page, to own. If there is none, the caller lets a kept one go first."""
        assert self._num_owned < self._claimed, "more than was claimed"
        page = self._free.pop()
        self._owned[page] = True
        self._num_owned += 1
        return page

    def drop(self, page: int) -> None:
        """Own it no longer."""
        assert self._owned[page]
        self._owned[page] = False
        self._num_owned -= 1
        self._free_if_unwanted(page)

    def share(self, page: int) -> None:
        """Use a page of somebody else's, or one that is kept."""
        assert self.in_use(page) or self._keepers[page], "a free page has nothing to read"
        if not self._sharers[page]:
            assert self.room, "no room for another shared page"
            self._num_shared += 1
        self._sharers[page] += 1

    def unshare(self, page: int) -> None:
        assert self._sharers[page]
        self._sharers[page] -= 1
        if not self._sharers[page]:
            self._num_shared -= 1
            self._free_if_unwanted(page)

    def keep(self, page: int) -> None:
        """One more entry of the index wants it. Only a page in use has contents to keep."""
        assert self.in_use(page)
        self._keepers[page] += 1

    def forget(self, page: int) -> None:
        assert self._keepers[page]
        self._keepers[page] -= 1
        self._free_if_unwanted(page)

    def _free_if_unwanted(self, page: int) -> None:
        if not self.in_use(page) and not self._keepers[page]:
            self._free.append(page)
