"""The kit's cases, a module a group; `every_case` lists them all."""

from __future__ import annotations

from anyflex.testing.case import Case
from anyflex.testing.cases import (
    compiled,
    declared,
    determinism,
    devices,
    masks,
    memory,
    mods,
    options,
    processes,
    refusals,
    run_time,
)

__all__ = ["every_case"]

_GROUPS = (
    mods,
    masks,
    refusals,
    declared,
    options,
    run_time,
    determinism,
    memory,
    devices,
    processes,
    compiled,
)


def every_case() -> dict[str, Case]:
    """Return all cases by name, group after group."""
    cases: dict[str, Case] = {}
    for group in _GROUPS:
        cases.update(group.CASES)
    return cases
