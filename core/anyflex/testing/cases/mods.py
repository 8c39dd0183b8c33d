"""Every score mod of the list, forward and backward."""

from __future__ import annotations

from anyflex.testing.attention_case import AttentionCase
from anyflex.testing.case import Case, comparisons
from anyflex.testing.mods import SCORE_MODS

__all__ = ["CASES"]

CASES: dict[str, Case] = {}
ALL = frozenset({"q", "k", "v", "captured"})
FORWARD, BACKWARD = frozenset({"forward"}), frozenset({"backward"})

for _entry in SCORE_MODS.values():
    comparisons(
        CASES,
        AttentionCase(
            f"mods/{_entry.name}",
            f"score mod {_entry.number}, {_entry.name}: values and every gradient",
            batch=2,
            heads=4,
            kv_heads=2,
            q_length=37,
            kv_length=50,
            score_mod=_entry.name,
            mask_mod="causal_bottom_right",
            gradients=ALL,
            dlse=True,
        ),
    )
