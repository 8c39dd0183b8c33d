"""A spec's mods as programs on tiles: compiled in the process where llvmlite is there, else
bytecode for the library's interpreter."""

from __future__ import annotations

import functools

from anyflex.plugin import Artifacts, Spec
from anyflex_cpu.library import Library

__all__ = ["Programs", "llvmlite_version"]


@functools.cache
def llvmlite_version() -> str | None:
    """Return the installed llvmlite's version without importing it, or None."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("llvmlite")
    except PackageNotFoundError:
        return None


class Programs:
    """The af_programs of one spec; they live as long as this object.

    Args:
        spec: its graphs.
        library: the loaded library.
        artifacts: where compiled code is kept between processes.
        mods: the option: ``"auto"``, ``"jit"`` or ``"interpreter"``.

    Attributes:
        addresses: of the af_programs of mask, score and score's derivative, 0 for none.
        how: ``"jit"`` or ``"interpreted"``, or "" where there are no mods.
    """

    def __init__(self, spec: Spec, library: Library, artifacts: Artifacts, mods: str) -> None:
        self.addresses = (0, 0, 0)
        self.how = ""
