"""Conformance cases: comparisons, which are data, and behaviours, which are functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from anyflex.testing.attention_case import AttentionCase
from anyflex.testing.session import Session

__all__ = ["BehaviourCase", "Case", "Group", "row"]

Behaviour = Callable[[Session], None]
Row = Mapping[str, Any]
"""Arguments of an `AttentionCase`, by name."""


def row(
    shows: str,
    lengths: tuple[int, int] = (40, 40),
    *,
    heads: tuple[int, int] = (2, 2),
    head_dims: tuple[int, int] = (16, 16),
    **special: Any,
) -> Row:
    """Return a row of `Group.compare_rows`.

    Args:
        lengths: of query and key.
        heads: of query and key.
        head_dims: of query and value.
    """
    sizes = ("q_length", "kv_length", "heads", "kv_heads", "head_dim", "value_head_dim")
    return {
        "shows": shows,
        **dict(zip(sizes, (*lengths, *heads, *head_dims), strict=True)),
        **special,
    }


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
    """Cases of one group by name, in the order in which they are entered."""

    def compare(self, *cases: AttentionCase) -> None:
        """Enter comparisons."""
        for case in cases:
            self.enter(case)

    def compare_rows(self, group: str, common: Row, **rows: Row) -> None:
        """Enter a comparison for each row of a table, by the end of its name.

        Args:
            common: arguments of `AttentionCase` that rows have unless they say another thing.
        """
        for name, special in rows.items():
            self.enter(AttentionCase(f"{group}/{name}", **{**common, **special}))

    def behaviour(
        self, *, quick: bool = True, alone: bool = False
    ) -> Callable[[Behaviour], Behaviour]:
        """Enter the decorated function ``module.name`` as the case ``module/name``; its docstring
        is the property that it shows."""

        def enter(run: Behaviour) -> Behaviour:
            group = run.__module__.rpartition(".")[2]
            shows = " ".join((run.__doc__ or "").split()).removesuffix(".")
            shows = shows[:1].lower() + shows[1:]
            name = f"{group}/{run.__name__}"
            self.enter(BehaviourCase(name, shows, run, quick, alone=alone))
            return run

        return enter

    def enter(self, case: Case) -> None:
        """Enter a case."""
        if case.name in self:
            raise ValueError(f"two cases are named {case.name!r}")
        self[case.name] = case
