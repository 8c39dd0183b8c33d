"""LRU cache: a bounded mapping."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

from anyflex.process.fork_safe_locks import free_in_child

__all__ = ["Recent"]

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """A thread-safe mapping that evicts the least recently used item."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: OrderedDict[Key, Value] = OrderedDict()
        self._lock = threading.Lock()
        free_in_child(self)

    def get(self, key: Key) -> Value | None:
        """Return the value, or None."""
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
                return self._items[key]
            return None

    def put(self, key: Key, value: Value) -> None:
        """Store a value; evict the oldest if there are too many."""
        with self._lock:
            self._items[key] = value
            self._items.move_to_end(key)
            if len(self._items) > self._size:
                self._items.popitem(last=False)

    def __len__(self) -> int:
        return len(self._items)
