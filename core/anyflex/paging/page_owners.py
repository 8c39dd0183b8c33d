"""Pages of a cache: how many sequences own each, which are free, which a prefix can find again."""

from __future__ import annotations

__all__ = ["PageOwners"]


class PageOwners:
    """Counts the owners of each page.

    A page without owners is free, or it is kept: its content is known under a key, and stays
    findable until the page is taken again. Free pages are taken first, then kept ones, least
    recently used first.
    """

    def __init__(self, pages: int) -> None:
        self.owners = [0] * pages
        self._free = list(range(pages - 1, -1, -1))
        # Dictionaries keep their order: the first is the least recently used.
        self._kept: dict[int, None] = {}
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Number of pages that can be taken."""
        return len(self._free) + len(self._kept)

    def take(self) -> int:
        """Return a page with one owner; `available` must be positive."""
        if self._free:
            page = self._free.pop()
        else:
            page = next(iter(self._kept))
            del self._kept[page]
            self.forget(page)
        self.owners[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add an owner to a page that is owned or kept."""
        self.owners[page] += 1
        self._kept.pop(page, None)

    def drop(self, page: int) -> None:
        """Remove an owner."""
        self.owners[page] -= 1
        if self.owners[page] == 0:
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def register(self, page: int, key: bytes) -> None:
        """Make an owned page findable. If another page has the key, that one stays it."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def forget(self, page: int) -> None:
        """Make a page unfindable: it is about to hold something else."""
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]

    def find(self, key: bytes) -> int | None:
        """Return the page with this key, or None."""
        return self._page_of.get(key)
