"""Dropout: which pairs of a tile are kept.

A pair's 32 random bits are a hash of its key's index under two keys of its query row, which are
hashes of the seed and of the row's indices. docs/plugins.md has the function; every backend has
the same bits.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from anyflex_triton.records import record

__all__ = ["Dropout", "kept_pairs", "of_rows", "with_seed"]


@record
class Dropout:
    """Dropout of a call, or of some of its query rows.

    Attributes:
        first, second: words of the seed; after `of_rows` keys of rows, which broadcast to a tile.
        threshold: pairs whose bits are below it are dropped.
        scale: factor of the weights that are kept.
    """

    first: Any
    second: Any
    threshold: Any
    scale: Any


# Argument lists would be a line an argument.
# fmt: off


@triton.jit
def hashed(word, between):
    """Return the hash of unsigned words; `between` goes in after its first round."""
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) ^ between
    word = (word ^ (word >> 15)) * 0x735A2D97
    return word ^ (word >> 15)


@triton.jit
def key_of_rows(word, b, h, q_idx):
    """Return the keys of rows under one word of the seed."""
    none = (b * 0).to(tl.uint32)
    key = hashed(word ^ b.to(tl.uint32), none)
    key = hashed(key ^ h.to(tl.uint32), none)
    return hashed(key ^ q_idx.to(tl.uint32), none)


@triton.jit
def with_seed(dropout):
    """Return `Dropout` with the seed of a kernel's argument `dropout`."""
    return Dropout(
        first=dropout[0].to(tl.uint32, bitcast=True),
        second=dropout[1].to(tl.uint32, bitcast=True),
        threshold=dropout[2].to(tl.uint32, bitcast=True), scale=dropout[3],
    )


@triton.jit
def of_rows(dropout, b, h, q_idx):
    """Return `Dropout` of rows, from that with the seed."""
    return Dropout(
        first=key_of_rows(dropout.first, b, h, q_idx),
        second=key_of_rows(dropout.second, b, h, q_idx), threshold=dropout.threshold,
        scale=dropout.scale,
    )


@triton.jit
def kept_pairs(dropout, kv_idx):
    """Return which pairs of rows and keys are kept; the indices are those that mods see."""
    return hashed(dropout.first ^ kv_idx.to(tl.uint32), dropout.second) >= dropout.threshold
