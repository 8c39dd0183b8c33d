"""M1 to M46 of the acceptance list, in its order and with its names.

Each builder takes the captured tensors, then the closed-over numbers, and returns the mod.
"""

from __future__ import annotations

import torch

from anyflex.testing.mods.leaves import (
    Sizes,
    booleans,
    document_starts,
    document_stops,
    documents,
    floats,
    integers,
    parents,
    permutation,
    spans,
)
from anyflex.testing.mods.mod import mod, numbered

__all__ = ["MASK_MODS"]

i32, i64 = torch.int32, torch.int64


def kv_bound(sizes: Sizes) -> int:
    return sizes.kv_length + 1


MASK_MODS = numbered(
    "M",
    all_true=mod(lambda: lambda b, h, q, k: k >= 0),
    all_false=mod(lambda: lambda b, h, q, k: (q == k) & (q != k)),
    causal=mod(lambda: lambda b, h, q, k: q >= k),
    anti_causal=mod(lambda: lambda b, h, q, k: q < k),
    causal_bottom_right=mod(
        lambda L, S: lambda b, h, q, k: k - q <= S - L,
        numbers=lambda sizes: (sizes.q_length, sizes.kv_length),
    ),
    diagonal=mod(lambda: lambda b, h, q, k: q == k),
    last_column=mod(
        lambda S: lambda b, h, q, k: k == S - 1, numbers=lambda sizes: (sizes.kv_length,)
    ),
    first_block_dead=mod(lambda: lambda b, h, q, k: k >= 130),
    window_left=mod(lambda: lambda b, h, q, k: (q - k >= 0) & (q - k < 24)),
    window_both=mod(
        lambda left, right: lambda b, h, q, k: (k >= q - left) & (k <= q + right),
        numbers=lambda sizes: (17, 5),
    ),
    window_head=mod(
        lambda win: lambda b, h, q, k: (q - k).abs() <= win[h],
        headed=True,
        win=integers("H", 0, 40),
    ),
    chunked_local=mod(lambda: lambda b, h, q, k: (q // 32 == k // 32) & (q >= k)),
    sink_window=mod(lambda: lambda b, h, q, k: (q >= k) & ((k < 4) | (q - k < 16))),
    global_window=mod(lambda: lambda b, h, q, k: (k < 4) | (q < 4) | ((q - k).abs() <= 8)),
    prefix_batch=mod(
        lambda pre: lambda b, h, q, k: (k < pre[b]) | (k <= q),
        batched=True,
        pre=integers("B", 0, kv_bound),
    ),
    padding=mod(
        lambda n: lambda b, h, q, k: (q < n[b]) & (k < n[b]),
        batched=True,
        n=integers("B", 0, kv_bound),
    ),
    decode_position=mod(
        lambda cur: lambda b, h, q, k: k <= cur[b], batched=True, cur=integers("B", 0, kv_bound)
    ),
    doc_sorted=mod(lambda doc: lambda b, h, q, k: doc[q] == doc[k], doc=documents("M", i32)),
    doc_batch=mod(
        lambda dob: lambda b, h, q, k: dob[b, q] == dob[b, k],
        batched=True,
        dob=documents("B M", i64),
    ),
    doc_permuted=mod(
        lambda seg: lambda b, h, q, k: seg[q] == seg[k], seg=documents("M", i64, shuffled=True)
    ),
    doc_start=mod(
        lambda start: lambda b, h, q, k: (k >= start[q]) & (k <= q), start=document_starts("M")
    ),
    doc_span=mod(
        lambda start, stop: lambda b, h, q, k: (start[q] <= k) & (k < stop[q]),
        start=document_starts("M"),
        stop=document_stops("M"),
    ),
    doc_positions=mod(
        lambda seg, place: lambda b, h, q, k: (seg[q] == seg[k]) & (place[k] <= place[q]),
        seg=documents("M", i64, shuffled=True),
        place=permutation("M", i64),
    ),
    # With uniform bounds about half of the rows are empty.
    random_spans=mod(
        lambda lo, hi: lambda b, h, q, k: (lo[q] <= k) & (k < hi[q]),
        lo=integers("L", 0, kv_bound),
        hi=integers("L", 0, kv_bound),
    ),
    dead_columns=mod(lambda ok: lambda b, h, q, k: ok[k], ok=booleans("S", 0.7)),
    dilated_head=mod(
        lambda dil: (
            lambda b, h, q, k: ((q - k) % dil[h] == 0) & (q - k >= 0) & (q - k < 8 * dil[h])
        ),
        headed=True,
        dil=integers("H", 1, 5),
    ),
    stride_mix=mod(
        lambda: lambda b, h, q, k: torch.where(h % 2 == 0, q >= k, (q - k).abs() < 16), headed=True
    ),
    natten_2d=mod(
        lambda: (
            lambda b, h, q, k: (
                ((k // 8 - (q // 8).clamp(1, 6)).abs() < 2)
                & ((k % 8 - (q % 8).clamp(2, 5)).abs() < 3)
            )
        )
    ),
    natten_3d=mod(
        lambda: (
            lambda b, h, q, k: (
                ((q // 12 - k // 12).abs() < 2)
                & ((q // 4 % 3 - k // 4 % 3).abs() < 2)
                & ((q % 4 - k % 4).abs() < 2)
            )
        )
    ),
    tiles_2d=mod(lambda: lambda b, h, q, k: (q // 32 == k // 32) & (q % 8 // 4 == k % 8 // 4)),
    block_table_head=mod(
        lambda tab: lambda b, h, q, k: tab[h, q // 16, k // 16],
        headed=True,
        tab=booleans("H L/16 S/16", 0.4),
    ),
    dense_table=mod(lambda keep: lambda b, h, q, k: keep[q, k], keep=booleans("L S", 0.3)),
    hash_mask=mod(lambda: lambda b, h, q, k: (q * 7919 + k * 104729) % 97 < 40),
    block_diffusion=mod(
        lambda blk, new: (
            lambda b, h, q, k: (
                (blk[k] < blk[q]) & ~new[k] | (blk[q] == blk[k]) & (new[q] == new[k])
            )
        ),
        blk=documents("M", i32),
        new=booleans("M", 0.5),
    ),
    shared_prefix=mod(
        lambda seg: lambda b, h, q, k: (k < 16) | ((seg[q] == seg[k]) & (k <= q)),
        seg=documents("M", i64),
    ),
    tree_parents=mod(
        lambda par: (
            lambda b, h, q, k: (
                (k == q) | (k == par[q]) | (k == par[par[q]]) | (k == par[par[par[q]]])
            )
        ),
        par=parents("M"),
    ),
    image_latest=mod(
        lambda img: lambda b, h, q, k: img[q] == k // 16,
        img=integers("L", -1, lambda sizes: -(-sizes.kv_length // 16)),
    ),
    span_bidirectional=mod(
        lambda span: lambda b, h, q, k: (q >= k) | ((span[q] == span[k]) & (span[q] >= 0)),
        span=spans("M"),
    ),
    frame_or_pixel=mod(lambda: lambda b, h, q, k: (q // 16 == k // 16) | (q % 16 == k % 16)),
    float_distance=mod(
        lambda xs: lambda b, h, q, k: (xs[q] - xs[k]).abs() < 0.3, xs=floats("M", scale=1.0)
    ),
    float_bound=mod(lambda: lambda b, h, q, k: q - k <= 0.5 * q),
    page_order=mod(
        lambda page: lambda b, h, q, k: page[k // 16] * 16 + k % 16 <= q,
        page=permutation("S/16", i32),
    ),
    de_morgan=mod(lambda: lambda b, h, q, k: ~((q < k) | ((q - k > 5) & (k > 2)))),
    bit_checker=mod(lambda: lambda b, h, q, k: ((q // 4 ^ k // 4) & 1).bool()),
    logical_names=mod(
        lambda: lambda b, h, q, k: torch.logical_and(q >= k, torch.logical_not(k == 3))
    ),
    batch_head_mix=mod(
        lambda: lambda b, h, q, k: (q + b >= k) & (k % (h + 2) != 1), batched=True, headed=True
    ),
)
