"""The conformance kit: what proves a backend, any vendor's, against the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyflex.testing.posing import posing

__all__ = ["posing"]

_LATER = {"posing": "anyflex.testing.posing"}
"""Public names whose modules are imported at first use."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        import importlib

        # Kept here: importing a module puts the module under its own name.
        value = getattr(importlib.import_module(_LATER[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
