"""Ready-made mask mods: each function returns a mask mod ``f(b, h, q_idx, kv_idx) -> bool``.

They are mask mods like any other: `create_block_mask` makes block masks of them, `and_masks` and
`or_masks` combine them with each other and with a user's own.

>>> import anyflex, torch
>>> ids = torch.tensor([0, 0, 0, 1, 1])
>>> packed = anyflex.and_masks(anyflex.masks.causal(), anyflex.masks.document(ids))

An ``offset`` is what is added to q_idx to get the query's place among the keys. It is an int, the
same for all, or an int32 or int64 tensor: [] for one number, [B] for one a batch entry. A block
mask is built of their values, and has to be built anew when they change.
"""

from __future__ import annotations

from anyflex.masks.blocks import block_causal, block_diffusion, chunked
from anyflex.masks.causality import causal, causal_bottom_right
from anyflex.masks.documents import document, document_offsets
from anyflex.masks.grids import neighbourhood
from anyflex.masks.prefixes import padding, prefix_lm, shared_prefix
from anyflex.masks.trees import tree
from anyflex.masks.windows import (
    causal_window,
    dilated,
    global_and_window,
    sinks_and_window,
    sliding_window,
)

__all__ = [
    "block_causal",
    "block_diffusion",
    "causal",
    "causal_bottom_right",
    "causal_window",
    "chunked",
    "dilated",
    "document",
    "document_offsets",
    "global_and_window",
    "neighbourhood",
    "padding",
    "prefix_lm",
    "shared_prefix",
    "sinks_and_window",
    "sliding_window",
    "tree",
]
