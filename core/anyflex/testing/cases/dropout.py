"""Dropout: exactly the pairs of its function are dropped, forward and backward."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

import anyflex
from anyflex.testing.attention_case import ALL, LSE, MAXIMA, QKV
from anyflex.testing.case_types import Group, Row, row
from anyflex.testing.cases.inputs import infinity_in_a_value, infinity_in_dead_keys
from anyflex.testing.checking import compare, plain
from anyflex.testing.comparison import by_backend
from anyflex.testing.guarded_tensors import same_bytes
from anyflex.testing.session import Session

__all__ = ["CASES"]

CASES = Group("dropout")
_P = 0.3


def equal_scores(tensors: dict[str, Tensor]) -> None:
    """All scores are 0 and all values 1: out counts the pairs that are kept."""
    tensors["query"].zero_()
    tensors["value"].fill_(1.0)


CASES.compare(
    {"dropout_p": _P, "gradients": QKV, "batch": 2},
    plain=row("dropped weights leave out and every gradient; the others are divided by 1 - p"),
    rate=row("a row keeps as many pairs as the function says", (70, 300), values=equal_scores),
    rare=row("a small probability drops few pairs", (70, 90), dropout_p=0.01),
    often=row("a probability near 1 keeps few pairs", (70, 90), dropout_p=0.95),
    ragged=row(
        "tiles that end inside of a block drop the same pairs",
        (127, 129),
        heads=(3, 3),
        mask_mod="causal_bottom_right",
    ),
    grouped=row(
        "query heads of one KV head drop pairs of their own", (70, 90), heads=(6, 2), dlse=True
    ),
    kv_broadcast=row(
        "batch entries that share keys drop pairs of their own", (70, 66), batch=3, kv_batch=1
    ),
    mods=row(
        "dropout follows score mod and mask; captured tensors learn through it",
        (150, 150),
        heads=(4, 2),
        score_mod="alibi_learned",
        mask_mod="doc_sorted",
        gradients=ALL,
        dlse=True,
    ),
    sparse=row(
        "blocks that aren't visited change nothing about the others' pairs",
        (64, 160),
        batch=1,
        runs=((1, 0, 0, 1, 0, 2, 0, 0, 0, 1),) * 4,
        mask_mod="hash_mask",
    ),
    half=row(
        "bfloat16 drops the same pairs", (129, 257), dtype=torch.bfloat16, head_dims=(64, 64)
    ),
    wide=row("float64 drops the same pairs", (40, 41), dtype=torch.float64),
    one_row=row("one query row", (1, 300), heads=(8, 2), aux=LSE | MAXIMA, gradients=frozenset()),
    few_rows=row("a few query rows", (5, 333), heads=(4, 2), mask_mod="decode_position"),
    infinity_dropped=row(
        "an infinite value that is dropped reaches no result; lse and max_scores are of all pairs",
        (130, 150),
        batch=1,
        values=infinity_in_a_value,
        gradients=frozenset(),
    ),
    infinity_dropped_in_one_row=row(
        "the same for one query row",
        (1, 40),
        heads=(8, 2),
        batch=1,
        values=infinity_in_a_value,
        gradients=frozenset(),
    ),
    infinity_in_dead_keys=row(
        "infinities in a dead key or value don't reach any result",
        (10, 14),
        mask_mod="causal",
        values=infinity_in_dead_keys,
    ),
)
_ENDINGS: dict[str, Row] = {
    "": row(lengths=(150, 150)),
    "_short": row(lengths=(3, 200)),
    "_bfloat16": row(lengths=(200, 333), dtype=torch.bfloat16, head_dims=(64, 64)),
    "_float16": row(lengths=(129, 100), dtype=torch.float16, layout="heads_last"),
}
CASES.compare(
    {"dropout_p": 0.1, "gradients": ALL, "batch": 2, "dlse": True, "quick": False},
    **{
        f"{score_mod}_and_{mask_mod}{ending}": row(
            f"score mod {score_mod} under mask {mask_mod}{ending}",
            heads=(4, 2),
            score_mod=score_mod,
            mask_mod=mask_mod,
        )
        | special
        for score_mod, mask_mod in (
            ("softcap", "causal"),
            ("dense_bias", "padding"),
            ("alibi_learned", "window_head"),
            ("big_scores", "first_block_dead"),
        )
        for ending, special in _ENDINGS.items()
    },
)


@CASES.behaviour()
def seeds(session: Session) -> None:
    """torch.manual_seed repeats the dropped pairs bit for bit, and a second call has others; both
    run one compiled kernel."""
    session.needs("dropout" in session.backend.capabilities.known_fields, "it isn't declared")
    case = plain(session, "seeds", dropout_p=_P)
    drawn = case.draw(session.device)
    first = by_backend(case, drawn, session.name, session.device)
    compiled = len(session.journal.compiled)
    for number, same in ((1, False), (0, True)):
        again = dataclasses.replace(case, seed=number)
        found = by_backend(again, drawn, session.name, session.device)
        session.require(
            same_bytes(found["out"], first["out"]) is same,
            f"manual_seed({number}) after manual_seed(0) drops "
            + ("other pairs" if same else "the same pairs"),
        )
    session.require(
        len(session.journal.compiled) == compiled, "another seed compiled another kernel"
    )


@CASES.behaviour()
def probabilities(session: Session) -> None:
    """Another probability drops other pairs; 0 drops none, and is the call without dropout bit for
    bit."""
    session.needs("dropout" in session.backend.capabilities.known_fields, "it isn't declared")
    for p in (0.5, 2.0**-33, 0.999):
        compare(session, plain(session, "probabilities", dropout_p=p))
    tensors: dict[str, Any] = dict(plain(session, "p").draw(session.device).tensors)
    without = anyflex.flex_attention(**tensors, backend=session.name)
    with_none = anyflex.flex_attention(**tensors, dropout_p=0.0, backend=session.name)
    session.require(same_bytes(without, with_none), "dropout_p=0 changes out")
