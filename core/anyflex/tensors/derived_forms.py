"""DerivedForms: what is derived of a frozen object, made once and kept with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

__all__ = ["DerivedForms"]

Form = TypeVar("Form")


@dataclass(frozen=True, eq=False)
class DerivedForms:
    """Base of a dataclass whose instances keep forms of themselves. Thread-safe."""

    _derived: dict[object, object] = field(default_factory=dict, init=False, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False, repr=False)

    def once(self, name: object, kind: type[Form], make: Callable[[], Form]) -> Form:
        """Return the form that `make` derives of this object, made once and kept with it.

        Args:
            name: tells forms apart. A backend's own begins with its package's name.
            kind: what `make` returns.
        """
        found = self._derived.get(name)
        if found is None:
            with self._lock:
                found = self._derived.get(name)
                if found is None:
                    found = self._derived[name] = make()
        assert isinstance(found, kind)
        return found
