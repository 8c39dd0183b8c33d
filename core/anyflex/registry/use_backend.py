"""use_backend: forces backends for the calls of a block."""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from contextvars import Token

from anyflex.errors import ArgumentError, ArgumentTypeError
from anyflex.registry.forced_backends import FORCED

__all__ = ["check_names", "use_backend"]


class use_backend(ContextDecorator):
    """Force backends for the calls in a ``with`` block, or in a decorated function.

    A name binds the calls whose tensors are on its own device type; ``"reference"`` binds all. Of
    several names for one device type the first that takes the call computes it; if none does, the
    call raises `BackendRefused`. Without names, the registry chooses freely inside of the block,
    whatever is forced outside. Weaker than ``backend=``.

    Examples:
        >>> with use_backend("reference"):
        ...     pass

    Raises:
        ArgumentTypeError: a name is not a str.
        ArgumentError: on entry, for an unknown name; on exit, in another thread or context than
            the one that entered.
    """

    def __init__(self, *names: str) -> None:
        for name in names:
            if not isinstance(name, str):
                raise ArgumentTypeError(
                    f"use_backend(*names): each name must be a str, got {name!r} "
                    f"({type(name).__name__})"
                )
        self.names = names
        self._entered: list[tuple[int, Token[tuple[str, ...]]]] = []

    def __enter__(self) -> use_backend:
        check_names(self.names, f"use_backend{self.names!r}")
        self._entered.append((threading.get_ident(), FORCED.set(self.names)))
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._entered:
            raise ArgumentError("use_backend: left without having been entered")
        thread, token = self._entered[-1]
        if thread != threading.get_ident():
            raise ArgumentError(
                "use_backend: entered in one thread and left in another; a forced backend belongs "
                "to the thread that enters the block, so enter and leave it there"
            )
        try:
            FORCED.reset(token)
        except ValueError as error:
            raise ArgumentError(
                "use_backend: left in another context (an asyncio task, or a generator that was "
                "resumed elsewhere) than it was entered in; enter and leave it in the same"
            ) from error
        self._entered.pop()

    def _recreate_cm(self) -> use_backend:
        # A decorated function may run in many threads at once: each call has its own block.
        return use_backend(*self.names)

    def __repr__(self) -> str:
        return f"use_backend({', '.join(map(repr, self.names))})"


def check_names(names: tuple[str, ...], source: str) -> None:
    """Raise ArgumentError for a name that neither is registered nor belongs to the project."""
    if not names:
        return
    from anyflex.registry import backend_table, install_hints

    registered = backend_table.current().names()
    for name in names:
        if name in registered or name in install_hints.known_names():
            continue
        import difflib

        known = [*registered, *sorted(install_hints.known_names() - set(registered))]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        missing = sorted(install_hints.known_names() - set(registered))
        raise ArgumentError(
            f"{source}: there is no backend {name!r}; {hint}registered: "
            f"{', '.join(registered)}"
            + (f"; not installed: {', '.join(missing)}" if missing else "")
        )
