"""Selection of cases to run, and of cases that must be accepted."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Mapping

from anyflex.errors import ArgumentError
from anyflex.testing.case_types import Case

__all__ = ["REQUIREMENTS", "requirements", "select"]

REQUIREMENTS: Mapping[str, str] = {
    "forward": "causal, document, score mod, tails",
    "backward": "gradients of q, k, v, captured tensors and lse",
    "decode": "one query row, grouped queries, lse",
    "all": "every case",
}
"""Sets of cases that may be required, with descriptions."""


def select(
    cases: Mapping[str, Case],
    *,
    quick: bool = False,
    globs: Iterable[str] = (),
    unmatched: list[str] | None = None,
) -> list[Case]:
    """Return the cases that are asked for, in the kit's order.

    Args:
        quick: only those of the quick subset.
        globs: names, or patterns as the shell's, any of which must fit; none for all cases.
        unmatched: takes a sentence for each pattern that fits no case, which is an error without
            it.

    Raises:
        ArgumentError: a pattern fits no case, or all patterns together fit none.
    """
    patterns = list(globs)
    for pattern in patterns:
        if not fnmatch.filter(cases, pattern):
            near = difflib.get_close_matches(pattern, cases, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            missing = f"no case fits {pattern!r}{hint}"
            if unmatched is None:
                raise ArgumentError(missing)
            unmatched.append(missing)
    chosen = [
        case
        for name, case in cases.items()
        if not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if not chosen:
        raise ArgumentError("; ".join(unmatched or ()))
    if not quick:
        return chosen
    chosen = [case for case in chosen if case.quick]
    if not chosen:
        raise ArgumentError(f"no case of the quick subset fits {' '.join(patterns)}")
    return chosen


def requirements(names: Collection[str]) -> frozenset[str]:
    """Return the names of required sets.

    Raises:
        ArgumentError: there is no such set.
    """
    for name in names:
        if name not in REQUIREMENTS:
            raise ArgumentError(
                f"there is no set of cases {name!r} to require; there are: "
                f"{', '.join(REQUIREMENTS)}"
            )
    return frozenset(names)
