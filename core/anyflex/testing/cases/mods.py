"""Score mods: every one of the list, forward and backward."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from anyflex.testing.attention_case import ALL, AttentionCase
from anyflex.testing.case_types import Group, row
from anyflex.testing.mods import SCORE_MODS

__all__ = ["CASES"]

CASES = Group()
BFLOAT16, FLOAT16, FLOAT64 = torch.bfloat16, torch.float16, torch.float64

_JUMPS = frozenset({"rounded", "signed_root", "clamped", "safe_sqrt"})
"""Mods whose value or slope jumps at some scores."""
_GRID_SCALE = 0.2345


def on_a_grid(tensors: dict[str, Tensor]) -> None:
    """Make the products of query and key exact in every type, multiples of 1/16 plus 1/256.

    With the scale that goes with it no score comes near one at which a mod of the list jumps: on
    which side a kernel is would depend on its last digit.
    """
    for name in ("query", "key"):
        tensors[name].mul_(4).round_().clamp_(-8, 8).div_(4)
    tensors["query"][..., 0] = 0.25
    tensors["key"][..., 0] = 0.015625


_VARIANTS: dict[str, dict[str, Any]] = {
    "": {"q_length": 70, "kv_length": 50, "mask_mod": "window_both"},
    "/short": {"q_length": 20, "kv_length": 41, "mask_mod": "random_spans"},
    "/bfloat16": {
        "q_length": 77,
        "kv_length": 150,
        "dtype": BFLOAT16,
        "mask_mod": "doc_sorted",
        "form": "partial",
    },
    "/float16": {
        "q_length": 66,
        "kv_length": 66,
        "kv_heads": 4,
        "head_dim": 32,
        "dtype": FLOAT16,
        "layout": "heads_last",
        "form": "object",
    },
    "/float64": {
        "q_length": 65,
        "kv_length": 40,
        "dtype": FLOAT64,
        "mask_mod": "causal",
        "kv_batch": 1,
    },
    "/decode": {
        "batch": 3,
        "kv_heads": 1,
        "q_length": 1,
        "kv_length": 200,
        "gradients": frozenset(),
        "dlse": False,
    },
    "/long": {
        "batch": 1,
        "q_length": 129,
        "kv_length": 257,
        "value_head_dim": 24,
        "mask_mod": "causal",
        "block_size": (128, 128),
    },
}
"""Calls with each mod: the end of the case's name -> what is special. The first is quick."""

for _entry, (_ending, _changes) in itertools.product(SCORE_MODS.values(), _VARIANTS.items()):
    _given: dict[str, Any] = {"batch": 2, "heads": 4, "gradients": ALL, "dlse": True}
    if _entry.name in _JUMPS:
        _given |= {"values": on_a_grid, "scale": _GRID_SCALE}
    CASES.compare(
        AttentionCase(
            f"mods/{_entry.name}{_ending}",
            f"score mod {_entry.number}, {_entry.name}: values and every gradient",
            score_mod=_entry.name,
            quick=not _ending,
            **{**_given, **_changes},
        )
    )

CASES.compare_rows(
    "mods",
    {"gradients": ALL},
    scale=row(
        "scores are multiplied by the scale, once, before the score mod",
        (4, 4),
        head_dims=(8, 8),
        scale=0.5,
        score_mod="softcap",
    ),
    scale_alone=row("scores are multiplied by the scale, once", (4, 4), scale=0.5),
    negative_scale=row(
        "a scale may be negative", (70, 40), scale=-0.3, score_mod="softcap", mask_mod="causal"
    ),
    zero_scale=row(
        "a scale of 0 makes all scores equal, and no gradient of query or key",
        scale=0.0,
        dlse=True,
        quick=False,
    ),
    full_blocks=row(
        "the score mod applies in FULL blocks too",
        (128, 256),
        score_mod="alibi_abs",
        mask_mod="all_true",
        block_size=(128, 128),
    ),
    past_the_first_block=row(
        "the mod is told positions in the sequence, not in a block",
        (129, 130),
        score_mod="alibi_abs",
        gradients=frozenset(),
    ),
    query_heads=row(
        "the mod is told the query head, not the key head",
        heads=(4, 2),
        score_mod="alibi_abs",
        gradients=frozenset(),
    ),
    negative_index=row("an index of -1 is a table's last", (4, 4), score_mod="negative_wrap"),
    square_bias=row("a captured matrix is read row by column", (4, 4), score_mod="dense_bias"),
    squared_table=row(
        "gradients of the score and of a table that is read twice need each other's values",
        (33, 40),
        heads=(4, 2),
        score_mod="squared_table",
        mask_mod="window_left",
        dlse=True,
    ),
)
CASES.compare(
    *(
        AttentionCase(
            f"mods/{mod}_without_mask",
            f"score mod {mod} where there is no mask",
            batch=3,
            heads=4,
            kv_heads=2,
            q_length=70,
            score_mod=mod,
            gradients=ALL,
        )
        for mod in ("temperature_batch", "dense_bias")
    ),
    *(
        AttentionCase(
            f"mods/seven_tables{ending}",
            "a mod reads seven tensors of four types, and four of them learn",
            batch=2,
            heads=4,
            kv_heads=2,
            q_length=q_length,
            kv_length=kv_length,
            head_dim=64,
            value_head_dim=64,
            dtype=dtype,
            score_mod="seven_tables",
            mask_mod="causal",
            block_size=block_size,
            gradients=ALL,
            dlse=True,
            quick=quick,
        )
        for ending, q_length, kv_length, dtype, block_size, quick in (
            ("", 33, 70, torch.float32, (16, 16), True),
            ("_bfloat16", 140, 150, BFLOAT16, (128, 128), False),
        )
    ),
)
