"""Lengths, tails, head dims, grouped heads and key batches."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from anyflex.testing.attention_case import ALL, QKV, declared_head_dim
from anyflex.testing.case_types import Group, row
from anyflex.testing.checking import compare, differentiable, plain
from anyflex.testing.session import ConformanceFailure, Session

__all__ = ["CASES"]

CASES = Group("shapes")
_LARGEST_DIM = 2048
"""Largest head dim that is tried with a backend that declares any."""
_UNEQUAL_DIMS = ((40, 72), (96, 128), (128, 40), (128, 96), (192, 128))
"""Pairs of E and Ev. A kernel cuts both into the steps of one of them, or of its registers: here
neither need divide the other, nor its halves."""


def last_key_only(tensors: dict[str, Tensor]) -> None:
    """Make every value 0 but the last key's."""
    tensors["value"][..., :-1, :] = 0


def low_scores(tensors: dict[str, Tensor]) -> None:
    """Make all scores about -12, so that one of 0 would outweigh them."""
    tensors["query"].mul_(0.1).add_(2.0)
    tensors["key"].mul_(0.1).sub_(1.5)


CASES.compare(
    {"gradients": QKV},
    no_batch=row("a batch of 0 gives empty results", batch=0, mask_mod="causal", quick=False),
    many_batches=row(
        "batches past 65535, which the second dimension of a device's grid can't count, are there",
        (1, 2),
        heads=(1, 1),
        batch=65537,
    ),
    keys_past_the_end=row(
        "what lies past the last key counts for nothing",
        (1, 17),
        mask_mod="all_true",
        values=low_scores,
    ),
    keys_past_the_end_long=row("the same for many rows and no mask", (80, 141), values=low_scores),
    last_key=row("the last key counts", (1, 17), values=last_key_only),
    last_key_long=row(
        "the last key counts, in the last of several tiles", (70, 257), values=last_key_only
    ),
    full_block_at_the_end=row(
        "a FULL block that is ragged ends with the keys",
        (16, 17),
        mask_mod="all_true",
        values=low_scores,
    ),
    one_row_past_a_block=row("rows past the last are not written", (17, 16), mask_mod="all_true"),
    smaller_value_dim=row("the default scale comes from E", (4, 4), head_dims=(16, 8)),
    larger_value_dim=row(
        "value and out have their own head dim",
        (17, 17),
        heads=(4, 2),
        head_dims=(16, 24),
        mask_mod="causal",
    ),
)
CASES.compare(
    {"gradients": QKV},
    **{
        f"length_{length}": row(f"{length} queries and keys", (length, length), mask_mod="causal")
        for length in range(1, 41)
    },
    **{
        f"lengths_{q_length}_{kv_length}": row(
            f"{q_length} queries and {kv_length} keys",
            (q_length, kv_length),
            heads=(4, 2),
            batch=2,
            mask_mod="causal_bottom_right" if q_length % 2 else None,
            dtype=torch.bfloat16 if q_length % 3 == 0 else torch.float32,
            quick=quick,
        )
        for quick, lengths in (
            (True, [(1, 1), (1, 200), (128, 128), (129, 257), (300, 77)]),
            (False, [(n, 41 - n) for n in range(1, 41)]),
            (False, [(63, 64), (64, 63), (65, 64), (64, 65), (127, 129), (256, 255), (257, 31)]),
        )
        for q_length, kv_length in lengths
    },
    **{
        f"empty_{q_length}_{kv_length}{'_masked' if mask else ''}": row(
            f"{q_length} queries and {kv_length} keys: out is empty or 0, lse -inf",
            (q_length, kv_length),
            mask_mod=mask,
            dlse=True,
        )
        for q_length, kv_length in ((0, 5), (5, 0), (0, 0))
        for mask in (None, "causal")
    },
    **{
        f"no_batch_masked_{q_length}": row(
            f"so does one with a mask for each of its entries, of {q_length} queries",
            (q_length, 40),
            batch=0,
            mask_mod="prefix_batch",
        )
        for q_length in (1, 40)
    },
)

# Ends of the classes of query lengths, and of tiles of grouped query heads.
CASES.compare(
    {"gradients": QKV},
    **{
        f"gqa_{heads}_{kv_heads}_length_{length}": row(
            f"{length} queries of {heads} heads, {kv_heads} of key and value",
            (length, 70),
            heads=(heads, kv_heads),
            mask_mod="causal_bottom_right" if masked else None,
            quick=heads == 4 and not masked,
        )
        for heads, kv_heads in ((4, 1), (8, 2), (6, 2))
        for length, masked in itertools.product((2, 15, 16, 17, 31, 32, 33, 63, 64, 65), (0, 1))
        if masked == (heads == 8)
    },
)

# Grouped heads: sizes that are no power of two, and one KV head for all.
CASES.compare(
    {"batch": 2, "score_mod": "alibi_learned", "gradients": ALL},
    **{
        f"gqa_{heads}_{kv_heads}": row(
            f"{heads} query heads read {kv_heads} key heads, neighbours the same one",
            lengths,
            heads=(heads, kv_heads),
        )
        for heads, kv_heads, lengths in (
            (4, 2, (2, 2)),
            (4, 1, (66, 30)),
            (6, 2, (4, 4)),
            (5, 1, (70, 20)),
            (14, 2, (9, 33)),
        )
    },
)
CASES.compare(
    {"batch": 2, "kv_batch": 1, "gradients": QKV},
    one_key_batch=row("key and value of batch 1 serve every batch", (70, 50), heads=(4, 4)),
    one_key_batch_gqa=row(
        "the same with grouped heads and a mask", (33, 50), heads=(4, 2), mask_mod="padding"
    ),
)


@CASES.behaviour()
def head_dims(session: Session) -> None:
    """Head dims at the ends of the declared range, next to them, and between."""
    can = session.backend.capabilities
    step = can.head_dim_multiple
    least, most = declared_head_dim(can, 1), declared_head_dim(can, _LARGEST_DIM)
    wanted = {
        least, least + step, most - step, most, 3 * step,
        40, 64, 72, 80, 96, 128, 160, 192, 256,
    }  # fmt: skip
    dims = sorted(dim for dim in wanted if least <= dim <= most and dim % step == 0)
    pairs = [(dim, dim) for dim in dims]
    if can.different_value_head_dim:
        pairs += [(least, most), (most, least), (dims[len(dims) // 2], dims[0])]
    _compare_dims(session, pairs)


@CASES.behaviour()
def unequal_head_dims(session: Session) -> None:
    """Head dims E and Ev differ, both are large, and no step that suits one suits the other."""
    can = session.backend.capabilities
    session.needs(can.different_value_head_dim, "the value's head dim must be the key's")

    def declared(dim: int) -> bool:
        fits = can.head_dim_min <= dim <= can.head_dim_max
        return fits and dim % can.head_dim_multiple == 0

    pairs = [pair for pair in _UNEQUAL_DIMS if all(map(declared, pair))]
    session.needs(pairs, "no two such head dims are declared")
    _compare_dims(session, pairs)


def _compare_dims(session: Session, pairs: list[tuple[int, int]]) -> None:
    """Compare a plain call of each (E, Ev)."""
    can = session.backend.capabilities
    for head_dim, value_head_dim in pairs:
        case = plain(
            session,
            f"shapes/head_dim_{head_dim}_{value_head_dim}",
            heads=1,
            kv_heads=1,
            q_length=4 if can.decode else 65,
            kv_length=5,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            gradients=differentiable(session),
        )
        try:
            compare(session, case)
        except ConformanceFailure as error:
            raise ConformanceFailure(f"E {head_dim}, Ev {value_head_dim}: {error}") from error
