"""Block masks: every mask mod of the list, by its runs."""

from __future__ import annotations

import dataclasses

import torch

from anyflex.testing.attention_case import ALL, QKV, AttentionCase
from anyflex.testing.case_types import Case, comparisons
from anyflex.testing.mods import MASK_MODS, Entry

__all__ = ["CASES"]

CASES: dict[str, Case] = {}
BFLOAT16, FLOAT16, FLOAT64 = torch.bfloat16, torch.float16, torch.float64


def _case(name: str, entry: Entry, **changes: object) -> AttentionCase:
    case = AttentionCase(
        name,
        f"mask mod {entry.number}, {entry.name}: the runs, and the function in PARTIAL ones",
        batch=2,
        heads=4,
        kv_heads=2,
        mask_mod=entry.name,
        gradients=QKV,
    )
    return dataclasses.replace(case, **changes)  # type: ignore[arg-type]


for _entry in MASK_MODS.values():
    _name = f"masks/{_entry.name}"
    comparisons(
        CASES,
        _case(
            _name,
            _entry,
            q_length=70,
            kv_length=90,
            score_mod="alibi_learned",
            gradients=ALL,
            quick=True,
        ),
        _case(f"{_name}/short", _entry, batch=3, q_length=40, kv_length=40, dlse=True),
        _case(
            f"{_name}/bfloat16",
            _entry,
            q_length=129,
            kv_length=257,
            dtype=BFLOAT16,
            block_size=(128, 128),
            score_mod="softcap",
        ),
        _case(
            f"{_name}/float16",
            _entry,
            q_length=150,
            kv_length=77,
            dtype=FLOAT16,
            block_size=(32, 128),
            layout="heads_last",
            form="object",
        ),
        _case(
            f"{_name}/float64",
            _entry,
            q_length=65,
            kv_length=65,
            kv_batch=1,
            value_head_dim=24,
            dtype=FLOAT64,
            block_size=(64, 64),
            form="partial",
            dlse=True,
        ),
        _case(
            f"{_name}/decode",
            _entry,
            batch=3,
            kv_heads=1,
            q_length=1,
            kv_length=200,
            gradients=frozenset(),
        ),
    )
