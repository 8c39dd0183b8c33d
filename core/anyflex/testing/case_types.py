"""Conformance cases: comparisons, which are data, and behaviours, which are functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anyflex.testing.attention_case import AttentionCase
from anyflex.testing.session import Session

__all__ = ["BehaviourCase", "Case", "behaviour", "comparisons"]


@dataclass(frozen=True)
class BehaviourCase:
    """A behaviour: threads, processes, refusals, caches; more than one comparison.

    Args:
        name: ``"processes/fork"``: the group, then what is special.
        shows: the property that fails here, a sentence.
        run: raises `ConformanceFailure`; returns a reason where the case doesn't apply.
        quick: in the subset that CI runs.
        required: sets of `--require` that the case belongs to.
        alone: other load on the machine changes its result: no other case runs beside it.
    """

    name: str
    shows: str
    run: Callable[[Session], str | None]
    quick: bool = False
    required: frozenset[str] = frozenset()
    alone: bool = False


Case = AttentionCase | BehaviourCase


def comparisons(table: dict[str, Case], *cases: AttentionCase) -> None:
    """Enter comparisons into a group's table."""
    for case in cases:
        if case.name in table:
            raise ValueError(f"two cases are named {case.name!r}")
        table[case.name] = case


def behaviour(
    table: dict[str, Case],
    name: str,
    shows: str,
    *,
    quick: bool = False,
    required: frozenset[str] = frozenset(),
    alone: bool = False,
) -> Callable[[Callable[[Session], str | None]], Callable[[Session], str | None]]:
    """Enter the decorated function into a group's table."""

    def enter(run: Callable[[Session], str | None]) -> Callable[[Session], str | None]:
        if name in table:
            raise ValueError(f"two cases are named {name!r}")
        table[name] = BehaviourCase(name, shows, run, quick, required, alone)
        return run

    return enter
