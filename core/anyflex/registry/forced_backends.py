"""Which backend names are forced: ``backend=``, then `use_backend`, then ANYFLEX_BACKEND."""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from contextvars import ContextVar, Token

from anyflex.errors import ArgumentError, ArgumentTypeError

__all__ = ["check_names", "forget_environment", "names_in_force", "source_of", "use_backend"]

_context: ContextVar[tuple[str, ...] | None] = ContextVar("anyflex_backend", default=None)


class use_backend(ContextDecorator):
    """Force backends for the calls in a ``with`` block, or in a decorated function.

    A name binds the calls whose tensors are on its own device type; ``"reference"`` binds all.
    Of several names for one device type the first that takes the call computes it; if none does,
    the call raises `BackendRefused`. Without names, the registry chooses by itself inside of the
    block, whatever is forced outside. Weaker than ``backend=``.

    Example:
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
        self._entered: list[tuple[int, Token[tuple[str, ...] | None]]] = []

    def __enter__(self) -> use_backend:
        check_names(self.names, f"use_backend{self.names!r}")
        self._entered.append((threading.get_ident(), _context.set(self.names)))
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
            _context.reset(token)
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


def names_in_force(backend: str | None = None) -> tuple[str, ...]:
    """Return the forced names: of ``backend=``, else of `use_backend`, else of ANYFLEX_BACKEND,
    else (). On the hot path: it doesn't check that the names exist, `kernel_for` does.

    Raises:
        ArgumentTypeError: `backend` is neither a str nor None.
    """
    if backend is not None:
        if not isinstance(backend, str):
            raise ArgumentTypeError(
                "backend must be the name of a backend, a str such as 'reference', or None; got "
                f"{backend!r} ({type(backend).__name__})"
            )
        return (backend,)
    names = _context.get()
    if names is not None:
        return names
    return _from_environment() if _environment_names is None else _environment_names


_environment_names: tuple[str, ...] | None = None


def _from_environment() -> tuple[str, ...]:
    """Read ANYFLEX_BACKEND, at the first call."""
    global _environment_names
    from anyflex.registry import environment

    _environment_names = environment.backend_names()
    return _environment_names


def forget_environment() -> None:
    """Read ANYFLEX_BACKEND again at the next call: for tests."""
    global _environment_names
    _environment_names = None


def source_of(names: tuple[str, ...], explicit: str | None) -> str:
    """Return who forces `names`, for messages: ``"backend='cuda'"``."""
    if explicit is not None:
        return f"backend={explicit!r}"
    if _context.get() is not None:
        return f"use_backend({', '.join(map(repr, names))})"
    return f"ANYFLEX_BACKEND={','.join(names)}"


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
