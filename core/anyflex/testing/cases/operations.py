"""Every operation that a mod may hold: its values and its slope."""

from __future__ import annotations

from anyflex.testing.attention_case import QKV
from anyflex.testing.case_types import Group, row
from anyflex.testing.mods.operation_mods import OPERATION_MODS

__all__ = ["CASES"]

CASES = Group("operations")

CASES.compare(
    row(lengths=(13, 11), heads=(1, 1), gradients=QKV),
    **{
        name.removeprefix("operation_"): row(
            f"values and slope of {name.removeprefix('operation_')} in a score mod",
            score_mod=name,
        )
        for name in OPERATION_MODS
    },
)
