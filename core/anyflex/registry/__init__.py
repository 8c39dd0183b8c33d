"""The registry: who can compute a call, and who does. See `anyflex.registry.table`."""

from __future__ import annotations

from anyflex.registry.selection import names_in_force, use_backend
from anyflex.registry.table import generation, isolated, register, register_hooks, reset

__all__ = [
    "generation",
    "isolated",
    "names_in_force",
    "register",
    "register_hooks",
    "reset",
    "use_backend",
]
