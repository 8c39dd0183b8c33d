"""Every operation that a mod may hold: its values and its slope."""

from __future__ import annotations

from anyflex.testing.attention_case import AttentionCase
from anyflex.testing.case_types import Group
from anyflex.testing.mods.operation_mods import OPERATION_MODS

__all__ = ["CASES"]

CASES = Group()

CASES.compare(
    *(
        AttentionCase(
            f"operations/{name.removeprefix('operation_')}",
            f"values and slope of {name.removeprefix('operation_')} in a score mod",
            heads=1,
            kv_heads=1,
            q_length=13,
            kv_length=11,
            score_mod=name,
            gradients=frozenset({"q", "k", "v"}),
        )
        for name in OPERATION_MODS
    ),
)
