"""Every mask mod of the list, by its runs."""

from __future__ import annotations

from anyflex.testing.attention_case import AttentionCase
from anyflex.testing.case import Case, comparisons
from anyflex.testing.mods import MASK_MODS

__all__ = ["CASES"]

CASES: dict[str, Case] = {}
ALL = frozenset({"q", "k", "v", "captured"})

for _entry in MASK_MODS.values():
    comparisons(
        CASES,
        AttentionCase(
            f"masks/{_entry.name}",
            f"mask mod {_entry.number}, {_entry.name}: the runs, and the function in PARTIAL ones",
            batch=2,
            heads=4,
            kv_heads=2,
            q_length=70,
            kv_length=90,
            mask_mod=_entry.name,
            score_mod="alibi_learned",
            gradients=ALL,
        ),
    )
