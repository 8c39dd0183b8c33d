"""Locks of process-wide state that a forked child finds free.

A thread that holds a lock while another one forks doesn't exist in the child, where the lock would
stay held for ever (https://docs.python.org/3/library/os.html#os.register_at_fork). The state
behind these locks is consistent between any two changes of it, so the child may go on with it.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

__all__ = ["free_in_child"]

_owners: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()
_REENTRANT = type(threading.RLock())
_LOCKS = (type(threading.Lock()), _REENTRANT)


def free_in_child(owner: Any, *names: str) -> None:
    """Give the owner, an object or a module, new locks in each process that is forked.

    The child of a fork while another thread holds a lock can go on; the guarded state is as that
    thread left it.

    Args:
        owner: hashed by its identity, and referred to weakly.
        names: of the attributes that are its locks, each a `threading.Lock` or `RLock`, and there
            already; of none, ``"_lock"``. What another call has named stays.

    Raises:
        AttributeError: the owner has no such attribute.
        TypeError: it isn't a lock.
    """
    names = names or ("_lock",)
    for name in names:
        found = getattr(owner, name)
        if not isinstance(found, _LOCKS):
            raise TypeError(f"{name!r} of {owner!r} must be a lock of threading's, got {found!r}")
    _owners[owner] = tuple(dict.fromkeys((*_owners.get(owner, ()), *names)))


def _after_fork() -> None:
    for owner, names in list(_owners.items()):
        for name in names:
            reentrant = isinstance(getattr(owner, name), _REENTRANT)
            setattr(owner, name, threading.RLock() if reentrant else threading.Lock())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
