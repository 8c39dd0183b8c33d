"""Score mods: every one of the list, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.testing.attention_case import ALL
from anyflex.testing.case_types import Group, Row, row
from anyflex.testing.mods import SCORE_MODS

__all__ = ["CASES"]

CASES = Group("mods")
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


_VARIANTS: dict[str, Row] = {
    "": row(lengths=(70, 50), mask_mod="window_both"),
    "/short": row(lengths=(20, 41), mask_mod="random_spans"),
    "/bfloat16": row(lengths=(77, 150), dtype=BFLOAT16, mask_mod="doc_sorted", form="partial"),
    "/float16": row(
        lengths=(66, 66),
        heads=(4, 4),
        head_dims=(32, 16),
        dtype=FLOAT16,
        layout="heads_last",
        form="object",
    ),
    "/float64": row(lengths=(65, 40), dtype=FLOAT64, mask_mod="causal", kv_batch=1),
    "/decode": row(lengths=(1, 200), heads=(4, 1), batch=3, gradients=frozenset(), dlse=False),
    "/long": row(
        lengths=(129, 257),
        head_dims=(16, 24),
        batch=1,
        mask_mod="causal",
        block_size=(128, 128),
    ),
}
"""Calls with each mod: the end of the case's name -> what is special. The first is quick."""

CASES.compare(
    {"batch": 2, "heads": 4, "gradients": ALL, "dlse": True},
    **{
        f"{mod.name}{ending}": row(
            f"score mod {mod.number}, {mod.name}: values and every gradient",
            score_mod=mod.name,
            values=on_a_grid if mod.name in _JUMPS else None,
            scale=_GRID_SCALE if mod.name in _JUMPS else None,
            quick=not ending,
        )
        | special
        for mod in SCORE_MODS.values()
        for ending, special in _VARIANTS.items()
    },
)

CASES.compare(
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
    row(lengths=(70, 40), heads=(4, 2), batch=3, gradients=ALL),
    **{
        f"{mod}_without_mask": row(f"score mod {mod} where there is no mask", score_mod=mod)
        for mod in ("temperature_batch", "dense_bias")
    },
)
CASES.compare(
    row(
        "a mod reads seven tensors of four types, and four of them learn",
        heads=(4, 2),
        head_dims=(64, 64),
        batch=2,
        score_mod="seven_tables",
        mask_mod="causal",
        gradients=ALL,
        dlse=True,
    ),
    seven_tables=row(lengths=(33, 70)),
    seven_tables_bfloat16=row(
        lengths=(140, 150), dtype=BFLOAT16, block_size=(128, 128), quick=False
    ),
)
