"""torch's BlockMask, read and written by attribute: its tuple has 13 to 17 items by version."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.block_mask.mask_function import sliced_mask_mod
from anyflex.block_mask.mask_state import MaskContent
from anyflex.errors import ArgumentTypeError, BlockMaskError

__all__ = ["LISTS", "TENSOR_FIELDS", "torch_fields", "torch_lists", "torch_mask"]

_MODULE = "torch.nn.attention.flex_attention"
_NEEDED = ("seq_lengths", "BLOCK_SIZE", "mask_mod", "kv_num_blocks", "kv_indices")
_OPTIONAL = ("full_kv_num_blocks", "full_kv_indices")
TENSOR_FIELDS = (*_NEEDED[-2:], *_OPTIONAL)
"""Attributes of torch's mask that say which blocks are live."""
_TRANSPOSES = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
LISTS = (*TENSOR_FIELDS, *_TRANSPOSES)
"""Attributes of torch's mask that a mask of anyflex derives when it is asked for them."""
_DERIVED = (
    # Ignored fields: transposes, which are derived again, and orders of deterministic
    # accumulation. Neither changes which elements are live.
    *_TRANSPOSES,
    "dq_write_order",
    "dq_write_order_full",
    "dq_kv_order",
    "dq_kv_order_spt",
)


def torch_fields(mask: Any) -> dict[str, Any]:
    """Return the arguments of `BlockMask.from_kv_blocks` that say what torch's mask means.

    Raises:
        ArgumentTypeError: an attribute is missing: it is no torch BlockMask.
        BlockMaskError: it has a field that is set and that this version doesn't know.
    """
    missing = [name for name in _NEEDED if not hasattr(mask, name)]
    if missing:
        raise ArgumentTypeError(
            f"from_torch needs a {_MODULE}.BlockMask; this {type(mask).__name__} has no attribute "
            f"{missing[0]}"
        )
    unknown = [
        name
        for name in _field_names(mask)
        if name not in (*_NEEDED, *_OPTIONAL, *_DERIVED) and getattr(mask, name, None) is not None
    ]
    if unknown:
        raise BlockMaskError(
            f"torch {torch.__version__} made a BlockMask with a field {unknown[0]!r} that this "
            "version of anyflex doesn't know, so it can't tell what the mask means: upgrade "
            "anyflex, or build the mask with anyflex.create_block_mask"
        )
    mask_mod = mask.mask_mod
    if getattr(mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        mask_mod = sliced_mask_mod
    return {
        "kv_num_blocks": mask.kv_num_blocks,
        "kv_indices": mask.kv_indices,
        "full_kv_num_blocks": getattr(mask, "full_kv_num_blocks", None),
        "full_kv_indices": getattr(mask, "full_kv_indices", None),
        "BLOCK_SIZE": mask.BLOCK_SIZE,
        "mask_mod": mask_mod,
        "seq_lengths": tuple(mask.seq_lengths),
    }


def _field_names(mask: Any) -> list[str]:
    """Names of the fields that torch declares; an attribute that a user added isn't one."""
    declared = [
        name
        for attribute in ("_TENSOR_ATTRS", "_CONTEXT_ATTRS")
        for name in getattr(type(mask), attribute, ())
    ]
    return declared or [name for name in vars(mask) if not name.startswith("_")]


def torch_mask(mask: MaskContent) -> Any:
    """Return torch's BlockMask of `mask`, see `BlockMask.to_torch`."""
    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

    lists = mask.views().index_lists(ragged_is_partial=True)
    # torch's kernels read lists of all batch entries and heads, one behind the other.
    sizes = mask.shape[:2]
    found = {name: getattr(lists, name) for name in TENSOR_FIELDS}
    found = {name: t.expand(*sizes, *t.shape[2:]).contiguous() for name, t in found.items()}
    return TorchBlockMask.from_kv_blocks(
        **found,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        seq_lengths=mask.seq_lengths,
    )


def torch_lists(mask: MaskContent) -> dict[str, Tensor]:
    """Return the lists of torch's mask by name, made once and kept with the mask's structure."""

    def made() -> dict[str, Tensor]:
        theirs = torch_mask(mask)
        return {name: getattr(theirs, name) for name in LISTS}

    return mask.views().once(("torch_lists", mask.shape[:2]), dict, made)
