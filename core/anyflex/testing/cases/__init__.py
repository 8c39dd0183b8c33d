"""The kit's cases, a module a group; `every_case` lists them all."""

from __future__ import annotations

from anyflex.testing.case_types import Case
from anyflex.testing.cases import (
    aux_outputs,
    compiled,
    declared,
    decoding,
    determinism,
    devices,
    dropout,
    gradients,
    inputs,
    large_scores,
    layouts,
    masks,
    memory,
    mods,
    operations,
    options,
    precision,
    processes,
    ragged,
    refusals,
    required,
    run_time,
    shapes,
    sinks,
    state,
    structure,
)

__all__ = ["every_case"]

_GROUPS = (
    required,
    mods,
    operations,
    masks,
    structure,
    shapes,
    layouts,
    decoding,
    aux_outputs,
    gradients,
    precision,
    inputs,
    large_scores,
    dropout,
    sinks,
    ragged,
    refusals,
    declared,
    options,
    run_time,
    state,
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
