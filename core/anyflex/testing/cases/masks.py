"""Block masks: every mask mod of the list, by its runs."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from anyflex.testing.attention_case import ALL, QKV, AttentionCase
from anyflex.testing.case_types import Group
from anyflex.testing.mods import MASK_MODS

__all__ = ["CASES"]

CASES = Group()
BFLOAT16, FLOAT16, FLOAT64 = torch.bfloat16, torch.float16, torch.float64


_VARIANTS: dict[str, dict[str, Any]] = {
    "": {"q_length": 70, "kv_length": 90, "score_mod": "alibi_learned", "gradients": ALL},
    "/short": {"batch": 3, "q_length": 40, "kv_length": 40, "dlse": True},
    "/bfloat16": {
        "q_length": 129,
        "kv_length": 257,
        "dtype": BFLOAT16,
        "block_size": (128, 128),
        "score_mod": "softcap",
    },
    "/float16": {
        "q_length": 150,
        "kv_length": 77,
        "dtype": FLOAT16,
        "block_size": (32, 128),
        "layout": "heads_last",
        "form": "object",
    },
    "/float64": {
        "q_length": 65,
        "kv_length": 65,
        "kv_batch": 1,
        "value_head_dim": 24,
        "dtype": FLOAT64,
        "block_size": (64, 64),
        "form": "partial",
        "dlse": True,
    },
    "/decode": {
        "batch": 3,
        "kv_heads": 1,
        "q_length": 1,
        "kv_length": 200,
        "gradients": frozenset(),
    },
}
"""Calls with each mask: the end of the case's name -> what is special. The first is quick."""

for _entry, (_ending, _changes) in itertools.product(MASK_MODS.values(), _VARIANTS.items()):
    _given: dict[str, Any] = {"batch": 2, "heads": 4, "gradients": QKV, **_changes}
    CASES.compare(
        AttentionCase(
            f"masks/{_entry.name}{_ending}",
            f"mask mod {_entry.number}, {_entry.name}: the runs, and the function in PARTIAL ones",
            mask_mod=_entry.name,
            quick=not _ending,
            **_given,
        )
    )
