"""Decoding: one query or few, many keys, grouped heads, lse."""

from __future__ import annotations

import torch

from anyflex.testing.attention_case import LSE
from anyflex.testing.case_types import Group, row

__all__ = ["CASES"]

CASES = Group("decoding")
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16

SIZES: tuple[tuple[int, int, int, int, int, str | None, str | None], ...] = (
    (1, 4, 4, 1, 200, "alibi_abs", None),
    (1, 4, 4, 2, 333, None, "decode_position"),
    (1, 8, 2, 2, 200, None, "decode_position"),
    (1, 8, 2, 1, 300, "softcap", None),
    (1, 6, 1, 3, 77, None, None),
    (4, 8, 2, 2, 130, "alibi_learned", "causal_bottom_right"),
    (16, 4, 1, 1, 400, "alibi_abs", "window_both"),
    (64, 6, 2, 1, 345, "alibi_learned", "causal_bottom_right"),
)
CASES.compare(
    row(heads=(8, 2), aux=LSE),
    scale=row("one query row has its scale, with grouped heads", (1, 60), scale=0.7),
    scale_and_mod=row(
        "and so it has before a score mod", (1, 60), scale=0.7, score_mod="softcap", batch=2
    ),
)
CASES.compare(
    {"aux": LSE},
    **{
        f"{q_length}_{heads}_{kv_heads}_{kv_length}{suffix}": row(
            f"{q_length} queries of {heads} heads, {kv_length} keys of {kv_heads}"
            + (f", score mod {score_mod}" if score_mod else ""),
            (q_length, kv_length),
            heads=(heads, kv_heads),
            batch=batch,
            score_mod=score_mod,
            mask_mod=mask_mod,
            dtype=dtype,
            quick=dtype is torch.float32,
        )
        for q_length, heads, kv_heads, batch, kv_length, score_mod, mask_mod in SIZES
        for suffix, dtype in (("", torch.float32), ("_bfloat16", BFLOAT16), ("_float16", FLOAT16))
    },
)
