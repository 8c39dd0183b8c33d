"""The conformance kit: what proves a backend, any vendor's, against the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyflex.testing.conformance import Conformance
    from anyflex.testing.lowering_check import check_lowering
    from anyflex.testing.stand_in_device import posing

__all__ = ["Conformance", "check_lowering", "posing"]

_LATER = {
    "Conformance": "anyflex.testing.conformance",
    "check_lowering": "anyflex.testing.lowering_check",
    "posing": "anyflex.testing.stand_in_device",
}
"""Public names whose modules are imported at first use. No module has the name of an object that
it holds: importing it would replace the object."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        import importlib

        value = getattr(importlib.import_module(_LATER[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
