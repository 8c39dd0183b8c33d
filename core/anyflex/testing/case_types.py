"""Conformance cases: comparisons, which are data, and behaviours, which are functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anyflex.testing.attention_case import AttentionCase
from anyflex.testing.session import Session

__all__ = ["BehaviourCase", "Case", "Group", "Row", "row"]

Behaviour = Callable[[Session], None]
Row = dict[str, Any]
"""Arguments of an `AttentionCase`, by name."""


def row(
    shows: str | None = None,
    lengths: tuple[int, int] | None = None,
    *,
    heads: tuple[int, int] | None = None,
    head_dims: tuple[int, int] | None = None,
    **special: Any,
) -> Row:
    """Return a row of `Group.compare`, or what its rows have in common.

    Args:
        lengths: of query and key.
        heads: of query and key.
        head_dims: of query and value.
    """
    given = special if shows is None else {"shows": shows, **special}
    for first, second, pair in (
        ("q_length", "kv_length", lengths),
        ("heads", "kv_heads", heads),
        ("head_dim", "value_head_dim", head_dims),
    ):
        if pair is not None:
            given[first], given[second] = pair
    return given


@dataclass(frozen=True)
class BehaviourCase:
    """A behaviour: threads, processes, refusals, caches; more than one comparison.

    Args:
        name: ``"processes/fork"``: the group, then what is special.
        shows: the property that fails here, a sentence.
        run: raises `ConformanceFailure`, or `NotApplicable` where the case doesn't apply.
        quick: in the subset that CI runs.
        required: sets of `--require` that the case belongs to.
        alone: other load on the machine changes its result: no other case runs beside it.
    """

    name: str
    shows: str
    run: Behaviour
    quick: bool = True
    required: frozenset[str] = frozenset()
    alone: bool = False


Case = AttentionCase | BehaviourCase


class Group(dict[str, Case]):
    """Cases of one group by name, in the order in which they are entered.

    Args:
        name: how the names of its cases begin.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def compare(self, common: Row, **rows: Row) -> None:
        """Enter a comparison for each row of a table, by the end of its name.

        Args:
            common: arguments of `AttentionCase` that rows have unless they say another thing.
        """
        for name, special in rows.items():
            self.enter(AttentionCase(f"{self._name}/{name}", **{**common, **special}))

    def behaviour(
        self, *, quick: bool = True, alone: bool = False
    ) -> Callable[[Behaviour], Behaviour]:
        """Enter the decorated function as a case of its name; its docstring is what it shows."""

        def enter(run: Behaviour) -> Behaviour:
            shows = " ".join((run.__doc__ or "").split()).removesuffix(".")
            shows = shows[:1].lower() + shows[1:]
            name = f"{self._name}/{run.__name__}"
            self.enter(BehaviourCase(name, shows, run, quick, alone=alone))
            return run

        return enter

    def enter(self, case: Case) -> None:
        """Enter a case."""
        if case.name in self:
            raise ValueError(f"two cases are named {case.name!r}")
        self[case.name] = case
