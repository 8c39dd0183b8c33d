"""Registry of backends: which can compute a call, and which does. See
`anyflex.registry.backend_table`."""

from __future__ import annotations

from anyflex.registry.backend_table import isolated, register, register_hooks, reset
from anyflex.registry.forced_backends import names_in_force, use_backend

__all__ = [
    "isolated",
    "names_in_force",
    "register",
    "register_hooks",
    "reset",
    "use_backend",
]
