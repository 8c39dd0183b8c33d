"""Gradients: which arrive, which are asked for, and which must not be computed."""

from __future__ import annotations

import itertools
import math

import torch

from anyflex.plugin import TensorSpec
from anyflex.testing.attention_case import ALL, QKV, AttentionCase
from anyflex.testing.case_types import Case, behaviour, comparisons
from anyflex.testing.checking import compare, differentiable, plain
from anyflex.testing.session import Session

__all__ = ["CASES"]

CASES: dict[str, Case] = {}

comparisons(
    CASES,
    AttentionCase(
        "gradients/of_lse",
        "a gradient that arrives at lse alone",
        q_length=2,
        kv_length=2,
        gradients=frozenset({"q", "k"}),
        dout=False,
        dlse=True,
        quick=True,
    ),
    AttentionCase(
        "gradients/of_out_and_lse",
        "gradients that arrive at out and at lse add up",
        q_length=2,
        kv_length=2,
        gradients=QKV,
        dlse=True,
        quick=True,
    ),
    AttentionCase(
        "gradients/of_out_and_lse_long",
        "the same over several tiles, under a mask",
        batch=2,
        heads=4,
        kv_heads=2,
        q_length=140,
        kv_length=150,
        score_mod="alibi_learned",
        mask_mod="random_spans",
        gradients=ALL,
        dlse=True,
        quick=True,
    ),
    AttentionCase(
        "gradients/of_sums",
        "gradients of sums, whose strides are 0",
        heads=4,
        kv_heads=2,
        q_length=70,
        kv_length=50,
        score_mod="softcap",
        mask_mod="causal",
        gradients=QKV,
        dlse=True,
        of_sums=True,
        quick=True,
    ),
    AttentionCase(
        "gradients/grouped_heads",
        "key and value get the sum over their query heads",
        heads=4,
        kv_heads=1,
        q_length=2,
        kv_length=2,
        gradients=QKV,
        quick=True,
    ),
    AttentionCase(
        "gradients/small",
        "gradients of two rows and two keys, by normalised weights",
        heads=1,
        kv_heads=1,
        q_length=2,
        kv_length=2,
        gradients=QKV,
        quick=True,
    ),
    AttentionCase(
        "gradients/scale",
        "query and key get their gradients with the scale",
        q_length=2,
        kv_length=2,
        scale=0.5,
        gradients=QKV,
        quick=True,
    ),
    AttentionCase(
        "gradients/one_key_batch",
        "key and value of batch 1 get the sum over the batch",
        batch=2,
        kv_batch=1,
        q_length=20,
        kv_length=30,
        gradients=QKV,
        quick=True,
    ),
    AttentionCase(
        "gradients/captured_under_mask",
        "dead pairs add nothing to a captured tensor's gradient",
        q_length=4,
        kv_length=4,
        score_mod="alibi_learned",
        mask_mod="causal",
        gradients=ALL,
        quick=True,
    ),
    AttentionCase(
        "gradients/captured_under_mask_long",
        "the same over several tiles",
        q_length=140,
        kv_length=150,
        score_mod="alibi_learned",
        mask_mod="causal",
        gradients=ALL,
        quick=True,
    ),
    *(
        AttentionCase(
            f"gradients/many_additions{ending}",
            f"many additions into one address of a {dtype} table are summed in a wider type",
            heads=1,
            kv_heads=1,
            q_length=256,
            kv_length=256,
            score_mod=score_mod,
            gradients=ALL,
            dlse=True,
            quick=True,
        )
        for ending, dtype, score_mod in (
            ("", "bf16", "bf16_collide"),
            ("_float16", "float16", "f16_collide"),
        )
    ),
    AttentionCase(
        "gradients/dead_columns",
        "dead keys have gradients of 0",
        q_length=70,
        kv_length=90,
        mask_mod="dead_columns",
        gradients=QKV,
        quick=True,
    ),
    AttentionCase(
        "gradients/padding",
        "dead rows and dead keys have gradients of 0",
        batch=2,
        q_length=90,
        kv_length=70,
        mask_mod="padding",
        gradients=QKV,
        dlse=True,
        quick=True,
    ),
    AttentionCase(
        "gradients/blocks_that_nobody_visits",
        "rows and keys of blocks that are never visited have gradients of 0",
        q_length=48,
        kv_length=64,
        mask_mod="all_true",
        runs=((1, 0, 0, 0), (0, 0, 0, 0), (0, 0, 1, 0)),
        gradients=QKV,
        dlse=True,
        quick=True,
    ),
    AttentionCase(
        "gradients/infinite_scores",
        "a score of -inf from the score mod is a dead pair to backward",
        q_length=4,
        kv_length=4,
        score_mod="causal_by_score",
        gradients=QKV,
        quick=True,
    ),
    AttentionCase(
        "gradients/dead_rows_by_score",
        "rows that the score mod makes -inf are dead where there is no mask as well",
        q_length=70,
        kv_length=300,
        score_mod="dead_rows_by_score",
        gradients=QKV,
        dlse=True,
        quick=True,
    ),
    # Every subset of the gradients that can be asked for, with each way that gradients arrive.
    *(
        AttentionCase(
            f"gradients/{'_'.join(sorted(wanted))}_{arrives}",
            f"gradients of {', '.join(sorted(wanted))} only, from {arrives}",
            heads=4,
            kv_heads=2,
            q_length=q_length,
            kv_length=50,
            score_mod="alibi_learned",
            mask_mod="causal_bottom_right",
            dtype=dtype,
            aux=frozenset({"lse"}),
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
    ),
)


@behaviour(
    CASES,
    "gradients/nothing_unasked",
    "no workspace is asked for the gradients of inputs that need none",
    quick=True,
)
def nothing_unasked(session: Session) -> str | None:
    """Workspace of backward for value alone, and for query, key and value."""
    if differentiable(session) != QKV:
        return "the backend declares no gradient of query, key and value"
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
    return None


def _bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize
