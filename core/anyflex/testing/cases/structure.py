"""Structure of a block mask: runs, gaps, ragged ends, rows without runs, and masks that change.

Runs that are given by hand may contradict the mask mod: structure wins.
"""

from __future__ import annotations

from torch import Tensor

from anyflex.testing.attention_case import ALL, QKV, AttentionCase
from anyflex.testing.case_types import Case, behaviour, comparisons
from anyflex.testing.checking import compare
from anyflex.testing.session import Session

__all__ = ["CASES"]

CASES: dict[str, Case] = {}


def very_low_scores(tensors: dict[str, Tensor]) -> None:
    """Make all scores about -200, whose exponentials are 0 in float32."""
    tensors["query"].mul_(0.1).add_(10.0)
    tensors["key"].mul_(0.1).sub_(5.0)


comparisons(
    CASES,
    AttentionCase(
        "structure/causal_in_one_block",
        "the mask function applies inside of a PARTIAL block",
        q_length=4,
        kv_length=4,
        mask_mod="causal",
        gradients=QKV,
        quick=True,
    ),
    AttentionCase(
        "structure/full_where_the_function_is_false",
        "in a FULL block the mask function doesn't apply: structure wins",
        q_length=16,
        kv_length=16,
        mask_mod="causal",
        runs=((1,),),
        gradients=QKV,
        quick=True,
    ),
    AttentionCase(
        "structure/unlisted_where_the_function_is_true",
        "a block that isn't listed isn't visited: structure wins",
        q_length=16,
        kv_length=32,
        mask_mod="all_true",
        runs=((1, 0),),
        gradients=QKV,
        quick=True,
    ),
    AttentionCase(
        "structure/lists_without_a_function",
        "FULL blocks without any mask function: the lists alone say what is visited",
        q_length=75,
        kv_length=93,
        score_mod="alibi_learned",
        runs=(
            (0, 1, 1, 0, 1, 1),
            (1, 0, 0, 0, 0, 1),
            (0, 0, 0, 0, 0, 0),
            (1, 1, 1, 0, 0, 0),
            (0, 0, 0, 0, 0, 1),
        ),
        gradients=ALL,
        dlse=True,
        quick=True,
    ),
    AttentionCase(
        "structure/lists_with_a_constant_function",
        "the same where the function of PARTIAL blocks is a constant",
        q_length=75,
        kv_length=93,
        mask_mod="constant_true",
        runs=(
            (0, 1, 2, 0, 2, 1),
            (1, 0, 0, 2, 0, 1),
            (0, 0, 0, 0, 0, 0),
            (2, 2, 1, 0, 0, 0),
            (0, 0, 0, 0, 0, 2),
        ),
        gradients=QKV,
        dlse=True,
        quick=True,
    ),
    AttentionCase(
        "structure/structure_alone",
        "rows of blocks with gaps, FULL beside PARTIAL, a row of none: only structure tells",
        batch=2,
        heads=4,
        kv_heads=2,
        q_length=75,
        kv_length=93,
        score_mod="alibi_learned",
        mask_mod="causal",
        runs=(
            (0, 1, 1, 0, 2, 1),
            (1, 0, 2, 2, 0, 1),
            (0, 0, 0, 0, 0, 0),
            (2, 2, 1, 0, 0, 0),
            (0, 0, 0, 0, 0, 1),
        ),
        gradients=ALL,
        dlse=True,
        quick=True,
    ),
    AttentionCase(
        "structure/many_runs",
        "150 runs of one row of blocks are visited, more than a fixed buffer may hold",
        q_length=16,
        kv_length=4800,
        mask_mod="all_true",
        runs=((1, 0) * 150,),
        gradients=QKV,
        quick=True,
    ),
    AttentionCase(
        "structure/last_block_only",
        "a row whose only block is the last, ragged one",
        q_length=16,
        kv_length=33,
        mask_mod="last_column",
        gradients=QKV,
        quick=True,
    ),
    AttentionCase(
        "structure/end_of_a_run",
        "the block after a run's last is dead",
        q_length=64,
        kv_length=64,
        mask_mod="all_true",
        runs=((1, 0, 0, 0), (1, 1, 0, 0), (0, 1, 1, 0), (0, 0, 1, 1)),
        gradients=QKV,
        quick=True,
    ),
    AttentionCase(
        "structure/two_runs",
        "a row has several runs, with a gap between them",
        q_length=64,
        kv_length=64,
        mask_mod="sink_window",
        gradients=QKV,
        quick=True,
    ),
    AttentionCase(
        "structure/broadcast_over_batch",
        "a mask of batch and heads 1 serves every batch and head",
        batch=3,
        heads=4,
        kv_heads=2,
        mask_mod="causal",
        gradients=QKV,
        quick=True,
    ),
    AttentionCase(
        "structure/one_list_of_blocks_for_all",
        "one list of blocks serves every batch and head, and each has its own mask function there",
        batch=2,
        heads=4,
        kv_heads=2,
        q_length=40,
        kv_length=60,
        mask_mod="batch_head_mix",
        runs=((2, 2, 0, 2), (2, 1, 2, 2), (0, 2, 2, 2)),
        gradients=QKV,
        dlse=True,
        quick=True,
    ),
    AttentionCase(
        "structure/rectangular_blocks",
        "blocks of 32 rows by 128 keys",
        q_length=200,
        kv_length=200,
        mask_mod="causal",
        block_size=(32, 128),
        gradients=QKV,
        quick=True,
    ),
    *(
        AttentionCase(
            f"structure/blocks_of_{size}",
            f"blocks of {size} rows and keys, several of them",
            q_length=300,
            kv_length=2 * size + 9,
            mask_mod="window_both",
            score_mod="alibi_learned",
            block_size=(size, size),
            gradients=ALL,
            quick=True,
        )
        for size in (64, 256)
    ),
    *(
        AttentionCase(
            f"structure/blocks_of_{q_block}_by_{kv_block}",
            f"blocks of {q_block} rows by {kv_block} keys: no powers of two",
            q_length=170,
            kv_length=220,
            mask_mod="window_both",
            score_mod="alibi_learned",
            block_size=(q_block, kv_block),
            gradients=ALL,
            quick=True,
        )
        for q_block, kv_block in ((48, 80), (20, 56))
    ),
    AttentionCase(
        "structure/wide_ids",
        "captured int64 values are not cut to 32 bits",
        q_length=40,
        kv_length=40,
        mask_mod="wide_ids",
        gradients=QKV,
        quick=True,
    ),
    AttentionCase(
        "structure/rectangular_blocks_other_way",
        "blocks of 128 rows by 32 keys",
        q_length=200,
        kv_length=200,
        mask_mod="window_left",
        block_size=(128, 32),
        gradients=QKV,
    ),
    AttentionCase(
        "structure/bottom_right",
        "positions count from the beginning of both sequences, also where lengths differ",
        q_length=3,
        kv_length=7,
        mask_mod="causal_bottom_right",
        gradients=QKV,
        quick=True,
    ),
    AttentionCase(
        "structure/no_live_pair",
        "without a live pair out is 0, lse -inf and every gradient 0",
        q_length=2,
        kv_length=2,
        mask_mod="all_false",
        runs=((2,),),
        gradients=QKV,
        dlse=True,
        quick=True,
    ),
    AttentionCase(
        "structure/dead_then_live",
        "a row that is dead in the first visited blocks and live in a later one",
        q_length=1,
        kv_length=290,
        mask_mod="last_column",
        runs=((2,) * 19,),
        gradients=QKV,
        quick=True,
    ),
    AttentionCase(
        "structure/dead_then_low",
        "the same where all scores are about -200: none is relative to the dead blocks' maximum",
        q_length=300,
        kv_length=320,
        mask_mod="anti_causal",
        runs=((2,) * 20,) * 19,
        values=very_low_scores,
        gradients=QKV,
        quick=True,
    ),
    AttentionCase(
        "structure/dead_then_live_rows",
        "the same for many rows, each its own number of blocks",
        q_length=70,
        kv_length=290,
        mask_mod="anti_causal",
        runs=((2,) * 19,) * 5,
        gradients=QKV,
        dlse=True,
        quick=True,
    ),
    AttentionCase(
        "structure/far_keys",
        "index products past 2^31 are those of int64",
        heads=1,
        kv_heads=1,
        q_length=1,
        kv_length=30000,
        head_dim=8,
        value_head_dim=8,
        mask_mod="hash_mask",
        block_size=(128, 128),
        quick=True,
    ),
    AttentionCase(
        "structure/per_batch",
        "each batch visits its own blocks",
        batch=6,
        q_length=40,
        kv_length=90,
        mask_mod="prefix_batch",
        gradients=QKV,
        quick=True,
    ),
    AttentionCase(
        "structure/per_batch_columns",
        "a key column that is live in the last block of rows only gets its gradient",
        batch=2,
        q_length=64,
        kv_length=64,
        mask_mod="prefix_batch",
        gradients=QKV,
        quick=True,
    ),
)


@behaviour(
    CASES,
    "structure/one_after_another",
    "each call uses its own mask, also where two have one shape",
    quick=True,
)
def one_after_another(session: Session) -> str | None:
    """Causal, its opposite, and causal again."""
    for name in ("causal", "anti_causal", "causal"):
        case = AttentionCase(
            f"structure/{name}",
            "",
            q_length=48,
            kv_length=48,
            mask_mod=name,
            gradients=frozenset(),
        )
        compare(session, case)
    return None


@behaviour(
    CASES,
    "structure/rebuilt",
    "a mask that was built again from other document ids is another mask",
    quick=True,
)
def rebuilt(session: Session) -> str | None:
    """One mask mod over four draws of its ids."""
    for seed in range(4):
        case = AttentionCase(
            "structure/doc_sorted",
            "",
            q_length=72,
            kv_length=72,
            mask_mod="doc_sorted",
            gradients=frozenset(),
            seed=seed,
        )
        compare(session, case)
    return None
