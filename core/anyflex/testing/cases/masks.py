"""Block masks: every mask mod of the list, by its runs."""

from __future__ import annotations

import torch

from anyflex.testing.attention_case import ALL, QKV
from anyflex.testing.case_types import Group, Row, row
from anyflex.testing.mods import MASK_MODS

__all__ = ["CASES"]

CASES = Group("masks")
BFLOAT16, FLOAT16, FLOAT64 = torch.bfloat16, torch.float16, torch.float64


_VARIANTS: dict[str, Row] = {
    "": row(lengths=(70, 90), score_mod="alibi_learned", gradients=ALL),
    "/short": row(lengths=(40, 40), batch=3, dlse=True),
    "/bfloat16": row(
        lengths=(129, 257), dtype=BFLOAT16, block_size=(128, 128), score_mod="softcap"
    ),
    "/float16": row(
        lengths=(150, 77),
        dtype=FLOAT16,
        block_size=(32, 128),
        layout="heads_last",
        form="object",
    ),
    "/float64": row(
        lengths=(65, 65),
        head_dims=(16, 24),
        kv_batch=1,
        dtype=FLOAT64,
        block_size=(64, 64),
        form="partial",
        dlse=True,
    ),
    "/decode": row(lengths=(1, 200), heads=(4, 1), batch=3, gradients=frozenset()),
}
"""Calls with each mask: the end of the case's name -> what is special. The first is quick."""

CASES.compare(
    {"batch": 2, "heads": 4, "gradients": QKV},
    **{
        f"{mask.name}{ending}": row(
            f"mask mod {mask.number}, {mask.name}: the runs, and the function in PARTIAL ones",
            mask_mod=mask.name,
            quick=not ending,
        )
        | special
        for mask in MASK_MODS.values()
        for ending, special in _VARIANTS.items()
    },
)
