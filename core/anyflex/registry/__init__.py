"""Registry of backends: which can compute a call, and which does. See
`anyflex.registry.backend_table`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anyflex.registry.forced_backends import names_in_force
from anyflex.registry.use_backend import use_backend

if TYPE_CHECKING:
    from anyflex.registry.backend_table import isolated, register, register_hooks, reset

__all__ = [
    "isolated",
    "names_in_force",
    "register",
    "register_hooks",
    "reset",
    "use_backend",
]


def __getattr__(name: str) -> Any:
    # The table is loaded at its first use: `import anyflex` must stay cheap.
    if name in ("isolated", "register", "register_hooks", "reset"):
        from anyflex.registry import backend_table

        return getattr(backend_table, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
