"""Sinks: one more score a head in each row's softmax, without a value, forward and backward.

Backends that don't have them are tried too: core applies sinks to what these give.
"""

from __future__ import annotations

import math

import torch

from anyflex.testing.attention_case import ALL, LSE, MAXIMA, QKV
from anyflex.testing.case_types import Group, Row, row
from anyflex.testing.cases.inputs import infinity_in_a_value

__all__ = ["CASES"]

CASES = Group("sinks")
_NONE = -math.inf
_FOUR = (0.3, _NONE, 2.0, -1.0)

CASES.compare(
    {"sinks": (0.5, -1.0), "aux": LSE | MAXIMA},
    forward=row("out has the sinks; lse and max_scores leave them out", (70, 90), batch=2),
    no_aux=row("the same where nothing but out is asked for", (70, 90), aux=frozenset()),
    none=row("a sink of -inf is none", (40, 50), sinks=(_NONE, 0.0)),
    infinite=row("a sink of inf takes all of a row", (40, 50), sinks=(math.inf, 0.0)),
    large=row("a sink far above each score leaves 0", (40, 50), sinks=(200.0, 1e30)),
    small=row("a sink far below each score changes nothing", (40, 50), sinks=(-200.0, -1e30)),
    dead_rows=row(
        "a row without a live key is 0, whatever the sink",
        (80, 60),
        heads=(4, 2),
        sinks=(0.5, _NONE, 100.0, math.inf),
        mask_mod="first_block_dead",
    ),
    no_keys=row("without keys out is 0", (40, 0)),
    one_row=row("one query row of many keys", (1, 700), heads=(8, 2), sinks=(*_FOUR, *_FOUR)),
    one_row_masked=row(
        "one query row under a mask",
        (1, 333),
        heads=(4, 2),
        sinks=_FOUR,
        mask_mod="decode_position",
    ),
    few_rows=row(
        "a few query rows, with dead ones",
        (5, 600),
        heads=(8, 1),
        sinks=(*_FOUR, *_FOUR),
        mask_mod="decode_position",
    ),
    half=row("bfloat16", (129, 257), dtype=torch.bfloat16, head_dims=(64, 64)),
    half_row=row(
        "one query row in float16", (1, 400), heads=(4, 1), sinks=_FOUR, dtype=torch.float16
    ),
    wide=row("float64", (40, 41), dtype=torch.float64),
    kv_broadcast=row("batch entries that share keys", (70, 66), batch=3, kv_batch=1),
    large_scores=row(
        "scores in the hundreds", (70, 90), heads=(4, 2), sinks=_FOUR, score_mod="big_scores"
    ),
    infinite_value=row("an infinite value stays infinite", (40, 40), values=infinity_in_a_value),
)
_LEARNING: dict[str, Row] = {
    "": row("gradients of query, key, value and sinks", (70, 90), batch=2),
    "_none": row("a sink of -inf learns nothing", (40, 50), sinks=(_NONE, 0.0)),
    "_large": row("a sink far above each score leaves gradients 0", (40, 50), sinks=(200.0, 9.0)),
    "_dead_rows": row(
        "gradients of a row without a live key are 0",
        (80, 60),
        heads=(4, 2),
        sinks=_FOUR,
        mask_mod="first_block_dead",
    ),
    "_grouped": row(
        "query heads of one KV head have sinks of their own",
        (127, 129),
        heads=(4, 1),
        sinks=_FOUR,
        mask_mod="causal_bottom_right",
    ),
    "_mods": row(
        "captured tensors learn beside sinks",
        (150, 150),
        heads=(4, 2),
        sinks=_FOUR,
        score_mod="alibi_learned",
        mask_mod="doc_sorted",
        gradients=ALL,
    ),
    "_softcap": row(
        "a score mod of no captured tensor", (60, 70), score_mod="softcap", mask_mod="causal"
    ),
    "_low_scores": row(
        "scores far from 0, and sinks beside them",
        (40, 150),
        score_mod="very_low",
        sinks=(-3.0e4, -2.9997e4),
    ),
    "_near_scores": row(
        "scores of up to 80, and sinks beside them", (60, 150), scale=6.0, sinks=(60.0, 75.0)
    ),
    "_half": row("bfloat16", (129, 257), dtype=torch.bfloat16, head_dims=(64, 64)),
    "_wide": row("float64", (40, 41), dtype=torch.float64),
    "_one_row": row("one query row", (1, 300), heads=(4, 2), sinks=_FOUR),
    "_strided": row("strided tensors and gradients", (60, 70), layout="mixed"),
    "_lse": row("a gradient arrives at lse too", (70, 90), aux=LSE | MAXIMA, dlse=True),
}
CASES.compare(
    {"sinks": (0.5, -1.0), "aux": MAXIMA, "gradients": QKV},
    **{f"learned{name}": special for name, special in _LEARNING.items()},
)
CASES.compare(
    {"sinks": (0.5, -1.0), "aux": MAXIMA, "gradients": QKV, "dropout_p": 0.3},
    dropout=row("weights are dropped after a softmax with sinks", (70, 90)),
)
