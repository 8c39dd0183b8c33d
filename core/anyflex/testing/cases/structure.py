"""Structure of a block mask: runs, gaps, ragged ends, rows without runs, and masks that change.

Runs that are given by hand may contradict the mask mod: structure wins.
"""

from __future__ import annotations

from torch import Tensor

from anyflex.testing.attention_case import ALL, QKV, AttentionCase
from anyflex.testing.case_types import Group, row
from anyflex.testing.checking import compare
from anyflex.testing.session import Session

__all__ = ["CASES"]

CASES = Group("structure")


def very_low_scores(tensors: dict[str, Tensor]) -> None:
    """Make all scores about -200, whose exponentials are 0 in float32."""
    tensors["query"].mul_(0.1).add_(10.0)
    tensors["key"].mul_(0.1).sub_(5.0)


CASES.compare(
    {"gradients": QKV},
    causal_in_one_block=row(
        "the mask function applies inside of a PARTIAL block", (4, 4), mask_mod="causal"
    ),
    full_where_the_function_is_false=row(
        "in a FULL block the mask function doesn't apply: structure wins",
        (16, 16),
        mask_mod="causal",
        runs=((1,),),
    ),
    unlisted_where_the_function_is_true=row(
        "a block that isn't listed isn't visited: structure wins",
        (16, 32),
        mask_mod="all_true",
        runs=((1, 0),),
    ),
    lists_without_a_function=row(
        "FULL blocks without any mask function: the lists alone say what is visited",
        (75, 93),
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
    ),
    lists_with_a_constant_function=row(
        "the same where the function of PARTIAL blocks is a constant",
        (75, 93),
        mask_mod="constant_true",
        runs=(
            (0, 1, 2, 0, 2, 1),
            (1, 0, 0, 2, 0, 1),
            (0, 0, 0, 0, 0, 0),
            (2, 2, 1, 0, 0, 0),
            (0, 0, 0, 0, 0, 2),
        ),
        dlse=True,
    ),
    structure_alone=row(
        "rows of blocks with gaps, FULL beside PARTIAL, a row of none: only structure tells",
        (75, 93),
        heads=(4, 2),
        batch=2,
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
    ),
    many_runs=row(
        "150 runs of one row of blocks are visited, more than a fixed buffer may hold",
        (16, 4800),
        mask_mod="all_true",
        runs=((1, 0) * 150,),
    ),
    last_block_only=row(
        "a row whose only block is the last, ragged one", (16, 33), mask_mod="last_column"
    ),
    end_of_a_run=row(
        "the block after a run's last is dead",
        (64, 64),
        mask_mod="all_true",
        runs=((1, 0, 0, 0), (1, 1, 0, 0), (0, 1, 1, 0), (0, 0, 1, 1)),
    ),
    two_runs=row(
        "a row has several runs, with a gap between them", (64, 64), mask_mod="sink_window"
    ),
    broadcast_over_batch=row(
        "a mask of batch and heads 1 serves every batch and head",
        heads=(4, 2),
        batch=3,
        mask_mod="causal",
    ),
    one_list_of_blocks_for_all=row(
        "one list of blocks serves every batch and head, and each has its own mask function there",
        (40, 60),
        heads=(4, 2),
        batch=2,
        mask_mod="batch_head_mix",
        runs=((2, 2, 0, 2), (2, 1, 2, 2), (0, 2, 2, 2)),
        dlse=True,
    ),
    rectangular_blocks=row(
        "blocks of 32 rows by 128 keys", (200, 200), mask_mod="causal", block_size=(32, 128)
    ),
    wide_ids=row("captured int64 values are not cut to 32 bits", mask_mod="wide_ids"),
    rectangular_blocks_other_way=row(
        "blocks of 128 rows by 32 keys",
        (200, 200),
        mask_mod="window_left",
        block_size=(128, 32),
        quick=False,
    ),
    bottom_right=row(
        "positions count from the beginning of both sequences, also where lengths differ",
        (3, 7),
        mask_mod="causal_bottom_right",
    ),
    no_live_pair=row(
        "without a live pair out is 0, lse -inf and every gradient 0",
        (2, 2),
        mask_mod="all_false",
        runs=((2,),),
        dlse=True,
    ),
    dead_then_live=row(
        "a row that is dead in the first visited blocks and live in a later one",
        (1, 290),
        mask_mod="last_column",
        runs=((2,) * 19,),
    ),
    dead_then_low=row(
        "the same where all scores are about -200: none is relative to the dead blocks' maximum",
        (300, 320),
        mask_mod="anti_causal",
        runs=((2,) * 20,) * 19,
        values=very_low_scores,
    ),
    dead_then_live_rows=row(
        "the same for many rows, each its own number of blocks",
        (70, 290),
        mask_mod="anti_causal",
        runs=((2,) * 19,) * 5,
        dlse=True,
    ),
    far_keys=row(
        "index products past 2^31 are those of int64",
        (1, 30000),
        heads=(1, 1),
        head_dims=(8, 8),
        mask_mod="hash_mask",
        block_size=(128, 128),
        gradients=frozenset(),
    ),
    per_batch=row("each batch visits its own blocks", (40, 90), batch=6, mask_mod="prefix_batch"),
    per_batch_columns=row(
        "a key column that is live in the last block of rows only gets its gradient",
        (64, 64),
        batch=2,
        mask_mod="prefix_batch",
    ),
)
CASES.compare(
    {"mask_mod": "window_both", "score_mod": "alibi_learned", "gradients": ALL},
    **{
        f"blocks_of_{size}": row(
            f"blocks of {size} rows and keys, several of them",
            (300, 2 * size + 9),
            block_size=(size, size),
        )
        for size in (64, 256)
    },
    **{
        f"blocks_of_{q_block}_by_{kv_block}": row(
            f"blocks of {q_block} rows by {kv_block} keys: no powers of two",
            (170, 220),
            block_size=(q_block, kv_block),
        )
        for q_block, kv_block in ((48, 80), (20, 56))
    },
)


@CASES.behaviour()
def one_after_another(session: Session) -> None:
    """Each call uses its own mask, also where two have one shape."""
    for name in ("causal", "anti_causal", "causal"):
        compare(session, AttentionCase(name, "", q_length=48, kv_length=48, mask_mod=name))


@CASES.behaviour()
def rebuilt(session: Session) -> None:
    """A mask that was built again from other document ids is another mask."""
    for seed in range(4):
        case = AttentionCase(
            "rebuilt", "", q_length=72, kv_length=72, mask_mod="doc_sorted", seed=seed
        )
        compare(session, case)
