"""Forced backend names: ``backend=``, then `use_backend`, then ANYFLEX_BACKEND."""

from __future__ import annotations

from contextvars import ContextVar

from anyflex.errors import ArgumentTypeError
from anyflex.registry.cached_state import STATE, on_replaced

__all__ = ["FORCED", "forget_environment", "names_in_force", "source_of"]

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


on_replaced(forget_environment)
