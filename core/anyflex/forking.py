"""Locks of what lives as long as the process: a forked child finds them free.

A thread that holds a lock while another one forks doesn't exist in the child, where the lock would
stay held for ever (https://docs.python.org/3/library/os.html#os.register_at_fork). What the locks
guard here is a mapping that is whole between any two of its changes: the child may go on with it.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

__all__ = ["free_in_child"]

_owners: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_REENTRANT = type(threading.RLock())


def free_in_child(owner: Any, name: str = "_lock") -> None:
    """Give the owner, an object or a module, a new lock in each process that is forked.

    Args:
        owner: hashed by its identity, and referred to weakly.
        name: of the attribute that is its lock, a `threading.Lock` or `RLock`.
    """
    _owners[owner] = name


def _after_fork() -> None:
    for owner, name in list(_owners.items()):
        reentrant = isinstance(getattr(owner, name), _REENTRANT)
        setattr(owner, name, threading.RLock() if reentrant else threading.Lock())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
