"""Sinks: one more score a head in each row's softmax, without a value, forward and backward.

Backends that don't have them are tried too: core applies sinks to what these give.
"""

from __future__ import annotations

import math

import torch

from anyflex.testing.attention_case import ALL, LSE, MAXIMA, QKV
from anyflex.testing.case_types import Group, row
from anyflex.testing.cases.inputs import infinity_in_a_value

__all__ = ["CASES"]

CASES = Group("sinks")
_NONE = -math.inf
_FOUR = (0.3, _NONE, 2.0, -1.0)
_FORWARD = {"sinks": (0.5, -1.0), "aux": LSE | MAXIMA}

CASES.compare(
    _FORWARD,
    forward=row("out has the sinks; lse and max_scores leave them out", (70, 90), batch=2),
    large=row("a sink far above each score leaves 0", (40, 50), sinks=(200.0, math.inf)),
    dead_rows=row(
        "a row without a live key is 0, whatever the sink",
        (80, 60),
        heads=(4, 2),
        sinks=(0.5, _NONE, 100.0, math.inf),
        mask_mod="first_block_dead",
    ),
    one_row=row("one query row of many keys", (1, 700), heads=(8, 2), sinks=(*_FOUR, *_FOUR)),
    few_rows=row(
        "a few query rows, with dead ones",
        (5, 600),
        heads=(8, 1),
        sinks=(*_FOUR, *_FOUR),
        mask_mod="decode_position",
    ),
    half=row(
        "sinks beside scores of bfloat16", (129, 257), dtype=torch.bfloat16, head_dims=(64, 64)
    ),
    half_row=row(
        "one query row in float16", (1, 400), heads=(4, 1), sinks=_FOUR, dtype=torch.float16
    ),
)
CASES.compare(
    {**_FORWARD, "quick": False},
    no_aux=row("the same where nothing but out is asked for", (70, 90), aux=frozenset()),
    none=row("a sink of -inf is none", (40, 50), sinks=(_NONE, 0.0)),
    small=row("a sink far below each score changes nothing", (40, 50), sinks=(-200.0, -1e30)),
    no_keys=row("without keys out is 0", (40, 0)),
    one_row_masked=row(
        "one query row under a mask",
        (1, 333),
        heads=(4, 2),
        sinks=_FOUR,
        mask_mod="decode_position",
    ),
    wide=row("sinks of float64 calls", (40, 41), dtype=torch.float64),
    kv_broadcast=row("batch entries that share keys", (70, 66), batch=3, kv_batch=1),
    large_scores=row(
        "scores in the hundreds",
        (70, 90),
        heads=(4, 2),
        sinks=_FOUR,
        score_mod="big_scores",
        aux=MAXIMA,
    ),
    infinite_value=row("an infinite value stays infinite", (40, 40), values=infinity_in_a_value),
)
_LEARNED = {"sinks": (0.5, -1.0), "aux": MAXIMA, "gradients": QKV}
CASES.compare(
    _LEARNED,
    learned=row("gradients of query, key, value and sinks", (70, 90), batch=2),
    learned_dead_rows=row(
        "gradients of a row without a live key are 0",
        (80, 60),
        heads=(4, 2),
        sinks=_FOUR,
        mask_mod="first_block_dead",
    ),
    learned_grouped=row(
        "query heads of one KV head have sinks of their own",
        (127, 129),
        heads=(4, 1),
        sinks=_FOUR,
        mask_mod="causal_bottom_right",
    ),
    learned_mods=row(
        "captured tensors learn beside sinks",
        (150, 150),
        heads=(4, 2),
        sinks=_FOUR,
        score_mod="alibi_learned",
        mask_mod="doc_sorted",
        gradients=ALL,
    ),
    learned_near_scores=row(
        "scores of up to 80, and sinks beside them", (60, 150), scale=6.0, sinks=(60.0, 75.0)
    ),
    learned_half=row(
        "learned sinks in bfloat16", (129, 257), dtype=torch.bfloat16, head_dims=(64, 64)
    ),
    learned_lse=row("a gradient arrives at lse too", (70, 90), aux=LSE | MAXIMA, dlse=True),
)
CASES.compare(
    {**_LEARNED, "quick": False},
    learned_none=row("a sink of -inf learns nothing", (40, 50), sinks=(_NONE, 0.0)),
    learned_large=row(
        "a sink far above each score leaves gradients 0", (40, 50), sinks=(200.0, 9.0)
    ),
    learned_low_scores=row(
        "scores far from 0, and sinks beside them",
        (40, 150),
        score_mod="very_low",
        sinks=(-3.0e4, -2.9997e4),
    ),
    learned_softcap=row(
        "a score mod of no captured tensor", (60, 70), score_mod="softcap", mask_mod="causal"
    ),
    learned_wide=row("learned sinks of float64 calls", (40, 41), dtype=torch.float64),
    learned_one_row=row("one query row", (1, 300), heads=(4, 2), sinks=_FOUR),
    learned_strided=row("strided tensors and gradients", (60, 70), layout="mixed"),
    dropout=row("weights are dropped after a softmax with sinks", (70, 90), dropout_p=0.3),
)
