"""Forced backend names: ``backend=``, then `use_backend`, then ANYFLEX_BACKEND."""

from __future__ import annotations

from contextlib import ContextDecorator
from contextvars import ContextVar, Token

from anyflex.errors import ArgumentError, ArgumentTypeError
from anyflex.registry.cached_state import STATE, on_replaced

__all__ = [
    "FORCED",
    "check_names",
    "forget_environment",
    "names_in_force",
    "source_of",
    "use_backend",
]

FORCED: ContextVar[tuple[str, ...]] = ContextVar("anyflex_backend")
"""Names of the innermost `use_backend`; without a value outside of one."""


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
    names = FORCED.get(STATE.environment_names)
    return _from_environment() if names is None else names


def _from_environment() -> tuple[str, ...]:
    """Read ANYFLEX_BACKEND, at the first call."""
    from anyflex.registry import environment

    names = STATE.environment_names = environment.backend_names()
    return names


def forget_environment() -> None:
    """Read ANYFLEX_BACKEND again at the next call: for tests."""
    STATE.environment_names = None


def source_of(names: tuple[str, ...], explicit: str | None) -> str:
    """Return the source that forces `names`, for messages: ``"backend='cuda'"``."""
    if explicit is not None:
        return f"backend={explicit!r}"
    if FORCED.get(None) is not None:
        return f"use_backend({', '.join(map(repr, names))})"
    return f"ANYFLEX_BACKEND={','.join(names)}"


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
        self._entered: list[Token[tuple[str, ...]]] = []

    def __enter__(self) -> use_backend:
        check_names(self.names, f"use_backend{self.names!r}")
        self._entered.append(FORCED.set(self.names))
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            FORCED.reset(self._entered[-1])
        except IndexError:
            raise ArgumentError("use_backend: left without having been entered") from None
        except ValueError as error:
            raise ArgumentError(
                "use_backend: left in another thread or context (an asyncio task, or a generator "
                "that was resumed elsewhere) than it was entered in; enter and leave it in the "
                "same"
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


on_replaced(forget_environment)
