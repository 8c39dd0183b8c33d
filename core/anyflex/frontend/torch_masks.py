"""torch's BlockMask given to a call: converted once, or as part of a compiled graph."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from anyflex.block_mask.block_mask import BlockMask
from anyflex.block_mask.torch_format import TENSOR_FIELDS
from anyflex.mask_structure.from_index_lists import runs_while_compiling
from anyflex.mask_structure.runs import block_count
from anyflex.tensors.torch_versions import version_counter
from anyflex.tracing.trace import trace_mod

__all__ = ["converted"]


def converted(mask: Any) -> BlockMask:
    """Return anyflex's form of torch's mask for a call, converted once and kept with the mask.

    Under torch.compile the conversion becomes part of the graph, and nothing is checked.
    """
    if torch.compiler.is_dynamo_compiling():
        return _converted_while_compiling(mask)
    found = _CONVERTED.get(mask)
    facts = _facts(mask)
    if found is None or found[0] != facts:
        found = _CONVERTED[mask] = (facts, BlockMask.from_torch(mask))
    return found[1]


_CONVERTED: weakref.WeakKeyDictionary[Any, tuple[object, BlockMask]] = weakref.WeakKeyDictionary()


def _facts(mask: Any) -> object:
    """Return a key that changes whenever a mask has to be converted again."""
    facts: list[object] = [getattr(mask, "mask_mod", None), getattr(mask, "seq_lengths", None)]
    for name in TENSOR_FIELDS:
        tensor = getattr(mask, name, None)
        if isinstance(tensor, Tensor):
            facts += [id(tensor), version_counter(tensor)]
    return facts


def _converted_while_compiling(mask: Any) -> BlockMask:
    q_length, kv_length = mask.seq_lengths
    q_block, kv_block = mask.BLOCK_SIZE
    offsets, runs = runs_while_compiling(
        mask.kv_num_blocks,
        mask.kv_indices,
        mask.full_kv_num_blocks,
        mask.full_kv_indices,
        block_count(kv_length, kv_block),
    )
    traced = trace_mod(mask.mask_mod, "mask")
    return BlockMask._unchecked(
        offsets, runs, (q_length, kv_length), (q_block, kv_block), traced, None, mask.mask_mod
    )
