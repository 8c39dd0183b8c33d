"""Gradients: which arrive, which are asked for, and which must not be computed."""

from __future__ import annotations

import itertools
import math

import torch

from anyflex.plugin import TensorSpec
from anyflex.testing.attention_case import ALL, LSE, QKV
from anyflex.testing.case_types import Group, row
from anyflex.testing.checking import compare, differentiable, plain
from anyflex.testing.session import Session

__all__ = ["CASES"]

CASES = Group("gradients")

CASES.compare(
    {"gradients": QKV},
    of_lse=row(
        "a gradient that arrives at lse alone",
        (2, 2),
        gradients=frozenset({"q", "k"}),
        dout=False,
        dlse=True,
    ),
    of_out_and_lse=row("gradients that arrive at out and at lse add up", (2, 2), dlse=True),
    of_out_and_lse_long=row(
        "the same over several tiles, under a mask",
        (140, 150),
        heads=(4, 2),
        batch=2,
        score_mod="alibi_learned",
        mask_mod="random_spans",
        gradients=ALL,
        dlse=True,
    ),
    of_sums=row(
        "gradients of sums, whose strides are 0",
        (70, 50),
        heads=(4, 2),
        score_mod="softcap",
        mask_mod="causal",
        dlse=True,
        of_sums=True,
    ),
    grouped_heads=row("key and value get the sum over their query heads", (2, 2), heads=(4, 1)),
    small=row("gradients of two rows and two keys, by normalised weights", (2, 2), heads=(1, 1)),
    scale=row("query and key get their gradients with the scale", (2, 2), scale=0.5),
    one_key_batch=row(
        "key and value of batch 1 get the sum over the batch", (20, 30), batch=2, kv_batch=1
    ),
    captured_under_mask=row(
        "dead pairs add nothing to a captured tensor's gradient",
        (4, 4),
        score_mod="alibi_learned",
        mask_mod="causal",
        gradients=ALL,
    ),
    captured_under_mask_long=row(
        "the same over several tiles",
        (140, 150),
        score_mod="alibi_learned",
        mask_mod="causal",
        gradients=ALL,
    ),
    scalar_and_table=row(
        "a learned tensor without dimensions gets its gradient beside a table that learns too",
        (20, 30),
        heads=(4, 2),
        score_mod="scalar_and_table",
        gradients=ALL,
    ),
    scalar_and_constants=row(
        "the same beside a table that doesn't learn",
        (20, 30),
        heads=(4, 2),
        score_mod="scalar_and_constants",
        gradients=ALL,
    ),
    dead_columns=row("dead keys have gradients of 0", (70, 90), mask_mod="dead_columns"),
    padding=row(
        "dead rows and dead keys have gradients of 0",
        (90, 70),
        batch=2,
        mask_mod="padding",
        dlse=True,
    ),
    blocks_that_nobody_visits=row(
        "rows and keys of blocks that are never visited have gradients of 0",
        (48, 64),
        mask_mod="all_true",
        runs=((1, 0, 0, 0), (0, 0, 0, 0), (0, 0, 1, 0)),
        dlse=True,
    ),
    infinite_scores=row(
        "a score of -inf from the score mod is a dead pair to backward",
        (4, 4),
        score_mod="causal_by_score",
    ),
    dead_rows_by_score=row(
        "rows that the score mod makes -inf are dead where there is no mask as well",
        (70, 300),
        score_mod="dead_rows_by_score",
        dlse=True,
    ),
)
CASES.compare(
    row(lengths=(256, 256), heads=(1, 1), gradients=ALL, dlse=True),
    **{
        f"many_additions{ending}": row(
            f"many additions into one address of a {dtype} table are summed in a wider type",
            score_mod=score_mod,
        )
        for ending, dtype, score_mod in (
            ("", "bf16", "bf16_collide"),
            ("_float16", "float16", "f16_collide"),
        )
    },
)
# Every subset of the gradients that can be asked for, with each way that gradients arrive.
CASES.compare(
    row(heads=(4, 2), score_mod="alibi_learned", mask_mod="causal_bottom_right", aux=LSE),
    **{
        f"{'_'.join(sorted(wanted))}_{arrives}": row(
            f"gradients of {', '.join(sorted(wanted))} only, from {arrives}",
            (q_length, 50),
            dtype=dtype,
            gradients=frozenset(wanted),
            dout=arrives != "dlse",
            dlse=arrives != "dout",
            quick=dtype is torch.float32 and len(wanted) in (1, 2),
        )
        for size in (1, 2, 3)
        for wanted in itertools.combinations(sorted(ALL), size)
        for arrives, q_length, dtype in (
            ("dout", 20, torch.float32),
            ("dlse", 70, torch.bfloat16),
            ("both", 70, torch.float32),
        )
    },
)


@CASES.behaviour()
def nothing_unasked(session: Session) -> None:
    """No workspace is asked for the gradients of inputs that need none."""
    session.needs(
        differentiable(session) == QKV, "the backend declares no gradient of query, key and value"
    )
    asked = {}
    for wanted in (frozenset({"v"}), QKV):
        session.journal.workspaces.clear()
        compare(session, plain(session, "gradients/workspace", q_length=70, gradients=wanted))
        asked[wanted] = sum(
            _bytes(spec)
            for direction, specs in session.journal.workspaces
            if direction == "backward"
            for spec in specs
        )
    alone, all_three = asked.values()
    session.require(
        alone < all_three or all_three == 0,
        f"backward asks for {alone} bytes of workspace where only value needs a gradient, and for "
        f"{all_three} where query and key need one too",
    )


def _bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize
