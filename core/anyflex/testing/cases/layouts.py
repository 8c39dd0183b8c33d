"""How query, key and value lie in memory. The kit's other cases are mostly contiguous."""

from __future__ import annotations

import typing

import torch

from anyflex.testing.attention_case import QKV, AttentionCase, Layout
from anyflex.testing.case import Case, comparisons

__all__ = ["CASES"]

CASES: dict[str, Case] = {}

comparisons(
    CASES,
    *(
        AttentionCase(
            f"layouts/{layout}{suffix}",
            f"query, key and value that are {layout} in memory",
            batch=2,
            heads=2,
            q_length=q_length,
            kv_length=kv_length,
            value_head_dim=value_head_dim,
            mask_mod="causal",
            dtype=dtype,
            layout=layout,
            gradients=QKV,
            quick=dtype is torch.float32,
        )
        for layout in typing.get_args(Layout)
        for suffix, q_length, kv_length, value_head_dim, dtype in (
            ("", 4, 4, 16, torch.float32),
            ("_long", 70, 133, 16, torch.float32),
            ("_bfloat16", 70, 133, 24, torch.bfloat16),
            ("_float16", 1, 133, 16, torch.float16),
            ("_float64", 20, 33, 24, torch.float64),
        )
    ),
)
