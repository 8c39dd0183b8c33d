"""M1 to M46 of the acceptance list, in its order and with its names.

Each builder takes the captured tensors, then the closed-over numbers, and returns the mod.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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
    places,
    span_ends,
    spans,
)
from anyflex.testing.mods.mod import Entry
from anyflex.testing.mods.register import register

__all__ = ["MASK_MODS"]

MASK_MODS: dict[str, Entry] = {}
mask_mod = functools.partial(register, MASK_MODS)

MaskMod = Callable[..., Any]
i32, i64 = torch.int32, torch.int64


def kv_bound(sizes: Sizes) -> int:
    return sizes.kv_length + 1


@mask_mod("M1")
def all_true() -> MaskMod:
    return lambda b, h, q, k: k >= 0


@mask_mod("M2")
def all_false() -> MaskMod:
    return lambda b, h, q, k: (q == k) & (q != k)


@mask_mod("M3")
def causal() -> MaskMod:
    return lambda b, h, q, k: q >= k


@mask_mod("M4")
def anti_causal() -> MaskMod:
    return lambda b, h, q, k: q < k


@mask_mod("M5", numbers=lambda sizes: (sizes.q_length, sizes.kv_length))
def causal_bottom_right(L: Any, S: Any) -> MaskMod:
    return lambda b, h, q, k: k - q <= S - L


@mask_mod("M6")
def diagonal() -> MaskMod:
    return lambda b, h, q, k: q == k


@mask_mod("M7", numbers=lambda sizes: (sizes.kv_length,))
def last_column(S: Any) -> MaskMod:
    return lambda b, h, q, k: k == S - 1


@mask_mod("M8")
def first_block_dead() -> MaskMod:
    return lambda b, h, q, k: k >= 130


@mask_mod("M9")
def window_left() -> MaskMod:
    return lambda b, h, q, k: (q - k >= 0) & (q - k < 24)


@mask_mod("M10", numbers=lambda sizes: (17, 5))
def window_both(left: Any, right: Any) -> MaskMod:
    return lambda b, h, q, k: (k >= q - left) & (k <= q + right)


@mask_mod("M11", headed=True, win=integers("H", 0, 40))
def window_head(win: Any) -> MaskMod:
    return lambda b, h, q, k: (q - k).abs() <= win[h]


@mask_mod("M12")
def chunked_local() -> MaskMod:
    return lambda b, h, q, k: (q // 32 == k // 32) & (q >= k)


@mask_mod("M13")
def sink_window() -> MaskMod:
    return lambda b, h, q, k: (q >= k) & ((k < 4) | (q - k < 16))


@mask_mod("M14")
def global_window() -> MaskMod:
    return lambda b, h, q, k: (k < 4) | (q < 4) | ((q - k).abs() <= 8)


@mask_mod("M15", batched=True, pre=integers("B", 0, kv_bound))
def prefix_batch(pre: Any) -> MaskMod:
    return lambda b, h, q, k: (k < pre[b]) | (k <= q)


@mask_mod("M16", batched=True, n=integers("B", 0, kv_bound))
def padding(n: Any) -> MaskMod:
    return lambda b, h, q, k: (q < n[b]) & (k < n[b])


@mask_mod("M17", batched=True, cur=integers("B", 0, kv_bound))
def decode_position(cur: Any) -> MaskMod:
    return lambda b, h, q, k: k <= cur[b]


@mask_mod("M18", doc=documents("M", i32))
def doc_sorted(doc: Any) -> MaskMod:
    return lambda b, h, q, k: doc[q] == doc[k]


@mask_mod("M19", batched=True, dob=documents("B M", i64))
def doc_batch(dob: Any) -> MaskMod:
    return lambda b, h, q, k: dob[b, q] == dob[b, k]


@mask_mod("M20", seg=documents("M", i64, shuffled=True))
def doc_permuted(seg: Any) -> MaskMod:
    return lambda b, h, q, k: seg[q] == seg[k]


@mask_mod("M21", start=document_starts("M"))
def doc_start(start: Any) -> MaskMod:
    return lambda b, h, q, k: (k >= start[q]) & (k <= q)


@mask_mod("M22", start=document_starts("M"), stop=document_stops("M"))
def doc_span(start: Any, stop: Any) -> MaskMod:
    return lambda b, h, q, k: (start[q] <= k) & (k < stop[q])


@mask_mod("M23", seg=documents("M", i64, shuffled=True), place=places("M"))
def doc_positions(seg: Any, place: Any) -> MaskMod:
    return lambda b, h, q, k: (seg[q] == seg[k]) & (place[k] <= place[q])


@mask_mod("M24", lo=span_ends("L"), hi=span_ends("L"))
def random_spans(lo: Any, hi: Any) -> MaskMod:
    return lambda b, h, q, k: (lo[q] <= k) & (k < hi[q])


@mask_mod("M25", ok=booleans("S", 0.7))
def dead_columns(ok: Any) -> MaskMod:
    return lambda b, h, q, k: ok[k]


@mask_mod("M26", headed=True, dil=integers("H", 1, 5))
def dilated_head(dil: Any) -> MaskMod:
    return lambda b, h, q, k: ((q - k) % dil[h] == 0) & (q - k >= 0) & (q - k < 8 * dil[h])


@mask_mod("M27", headed=True)
def stride_mix() -> MaskMod:
    return lambda b, h, q, k: torch.where(h % 2 == 0, q >= k, (q - k).abs() < 16)


@mask_mod("M28")
def natten_2d() -> MaskMod:
    return lambda b, h, q, k: (
        ((k // 8 - (q // 8).clamp(1, 6)).abs() < 2) & ((k % 8 - (q % 8).clamp(2, 5)).abs() < 3)
    )


@mask_mod("M29")
def natten_3d() -> MaskMod:
    return lambda b, h, q, k: (
        ((q // 12 - k // 12).abs() < 2)
        & ((q // 4 % 3 - k // 4 % 3).abs() < 2)
        & ((q % 4 - k % 4).abs() < 2)
    )


@mask_mod("M30")
def tiles_2d() -> MaskMod:
    return lambda b, h, q, k: (q // 32 == k // 32) & (q % 8 // 4 == k % 8 // 4)


@mask_mod("M31", headed=True, tab=booleans("H L/16 S/16", 0.4))
def block_table_head(tab: Any) -> MaskMod:
    return lambda b, h, q, k: tab[h, q // 16, k // 16]


@mask_mod("M32", keep=booleans("L S", 0.3))
def dense_table(keep: Any) -> MaskMod:
    return lambda b, h, q, k: keep[q, k]


@mask_mod("M33")
def hash_mask() -> MaskMod:
    return lambda b, h, q, k: (q * 7919 + k * 104729) % 97 < 40


@mask_mod("M34", blk=documents("M", i32), new=booleans("M", 0.5))
def block_diffusion(blk: Any, new: Any) -> MaskMod:
    return lambda b, h, q, k: (blk[k] < blk[q]) & ~new[k] | (blk[q] == blk[k]) & (new[q] == new[k])


@mask_mod("M35", seg=documents("M", i64))
def shared_prefix(seg: Any) -> MaskMod:
    return lambda b, h, q, k: (k < 16) | ((seg[q] == seg[k]) & (k <= q))


@mask_mod("M36", par=parents("M"))
def tree_parents(par: Any) -> MaskMod:
    return lambda b, h, q, k: (
        (k == q) | (k == par[q]) | (k == par[par[q]]) | (k == par[par[par[q]]])
    )


@mask_mod("M37", img=integers("L", -1, lambda sizes: -(-sizes.kv_length // 16)))
def image_latest(img: Any) -> MaskMod:
    return lambda b, h, q, k: img[q] == k // 16


@mask_mod("M38", span=spans("M"))
def span_bidirectional(span: Any) -> MaskMod:
    return lambda b, h, q, k: (q >= k) | ((span[q] == span[k]) & (span[q] >= 0))


@mask_mod("M39")
def frame_or_pixel() -> MaskMod:
    return lambda b, h, q, k: (q // 16 == k // 16) | (q % 16 == k % 16)


@mask_mod("M40", xs=floats("M", scale=1.0))
def float_distance(xs: Any) -> MaskMod:
    return lambda b, h, q, k: (xs[q] - xs[k]).abs() < 0.3


@mask_mod("M41")
def float_bound() -> MaskMod:
    return lambda b, h, q, k: q - k <= 0.5 * q


@mask_mod("M42", page=permutation("S/16", i32))
def page_order(page: Any) -> MaskMod:
    return lambda b, h, q, k: page[k // 16] * 16 + k % 16 <= q


@mask_mod("M43")
def de_morgan() -> MaskMod:
    return lambda b, h, q, k: ~((q < k) | ((q - k > 5) & (k > 2)))


@mask_mod("M44")
def bit_checker() -> MaskMod:
    return lambda b, h, q, k: ((q // 4 ^ k // 4) & 1).bool()


@mask_mod("M45")
def logical_names() -> MaskMod:
    return lambda b, h, q, k: torch.logical_and(q >= k, torch.logical_not(k == 3))


@mask_mod("M46", batched=True, headed=True)
def batch_head_mix() -> MaskMod:
    return lambda b, h, q, k: (q + b >= k) & (k % (h + 2) != 1)
