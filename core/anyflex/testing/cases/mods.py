"""Score mods: every one of the list, forward and backward."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anyflex.testing.attention_case import ALL, AttentionCase
from anyflex.testing.case_types import Case, comparisons
from anyflex.testing.mods import SCORE_MODS, Entry

__all__ = ["CASES"]

CASES: dict[str, Case] = {}
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


def _case(name: str, entry: Entry, **changes: object) -> AttentionCase:
    case = AttentionCase(
        name,
        f"score mod {entry.number}, {entry.name}: values and every gradient",
        batch=2,
        heads=4,
        kv_heads=2,
        score_mod=entry.name,
        gradients=ALL,
        dlse=True,
    )
    if entry.name in _JUMPS:
        case = dataclasses.replace(case, values=on_a_grid, scale=_GRID_SCALE)
    return dataclasses.replace(case, **changes)  # type: ignore[arg-type]


for _entry in SCORE_MODS.values():
    _name = f"mods/{_entry.name}"
    comparisons(
        CASES,
        _case(
            _name,
            _entry,
            q_length=70,
            kv_length=50,
            mask_mod="window_both",
            quick=True,
        ),
        _case(f"{_name}/short", _entry, q_length=20, kv_length=41, mask_mod="random_spans"),
        _case(
            f"{_name}/bfloat16",
            _entry,
            q_length=77,
            kv_length=150,
            dtype=BFLOAT16,
            mask_mod="doc_sorted",
            form="partial",
        ),
        _case(
            f"{_name}/float16",
            _entry,
            q_length=66,
            kv_length=66,
            kv_heads=4,
            head_dim=32,
            dtype=FLOAT16,
            layout="heads_last",
            form="object",
        ),
        _case(
            f"{_name}/float64",
            _entry,
            q_length=65,
            kv_length=40,
            dtype=FLOAT64,
            mask_mod="causal",
            kv_batch=1,
        ),
        _case(
            f"{_name}/decode",
            _entry,
            batch=3,
            kv_heads=1,
            q_length=1,
            kv_length=200,
            gradients=frozenset(),
            dlse=False,
        ),
        _case(
            f"{_name}/long",
            _entry,
            batch=1,
            q_length=129,
            kv_length=257,
            value_head_dim=24,
            mask_mod="causal",
            block_size=(128, 128),
        ),
    )

comparisons(
    CASES,
    AttentionCase(
        "mods/scale",
        "scores are multiplied by the scale, once, before the score mod",
        q_length=4,
        kv_length=4,
        head_dim=8,
        value_head_dim=8,
        scale=0.5,
        score_mod="softcap",
        gradients=ALL,
        quick=True,
    ),
    AttentionCase(
        "mods/scale_alone",
        "scores are multiplied by the scale, once",
        q_length=4,
        kv_length=4,
        scale=0.5,
        gradients=ALL,
        quick=True,
    ),
    AttentionCase(
        "mods/negative_scale",
        "a scale may be negative",
        q_length=70,
        scale=-0.3,
        score_mod="softcap",
        mask_mod="causal",
        gradients=ALL,
        quick=True,
    ),
    AttentionCase(
        "mods/zero_scale",
        "a scale of 0 makes all scores equal, and no gradient of query or key",
        scale=0.0,
        gradients=ALL,
        dlse=True,
    ),
    AttentionCase(
        "mods/full_blocks",
        "the score mod applies in FULL blocks too",
        q_length=128,
        kv_length=256,
        score_mod="alibi_abs",
        mask_mod="all_true",
        block_size=(128, 128),
        gradients=ALL,
        quick=True,
    ),
    AttentionCase(
        "mods/past_the_first_block",
        "the mod is told positions in the sequence, not in a block",
        q_length=129,
        kv_length=130,
        score_mod="alibi_abs",
        quick=True,
    ),
    AttentionCase(
        "mods/query_heads",
        "the mod is told the query head, not the key head",
        heads=4,
        kv_heads=2,
        score_mod="alibi_abs",
        quick=True,
    ),
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
            quick=True,
        )
        for mod in ("temperature_batch", "dense_bias")
    ),
    AttentionCase(
        "mods/negative_index",
        "an index of -1 is a table's last",
        q_length=4,
        kv_length=4,
        score_mod="negative_wrap",
        gradients=ALL,
        quick=True,
    ),
    AttentionCase(
        "mods/square_bias",
        "a captured matrix is read row by column",
        q_length=4,
        kv_length=4,
        score_mod="dense_bias",
        gradients=ALL,
        quick=True,
    ),
    AttentionCase(
        "mods/squared_table",
        "gradients of the score and of a table that is read twice need each other's values",
        heads=4,
        kv_heads=2,
        q_length=33,
        score_mod="squared_table",
        mask_mod="window_left",
        gradients=ALL,
        dlse=True,
        quick=True,
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
