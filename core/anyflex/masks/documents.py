"""Documents packed into one row: tokens see their own document only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.errors import ArgumentError
from anyflex.mods.factory_arguments import (
    INDICES,
    INTEGERS,
    check_callable,
    check_one_device,
    check_tensor,
    checked_int,
    table_at,
)
from anyflex.tensors.dynamo_disabled import outside_graphs
from anyflex.tracing.mod_types import MaskMod

__all__ = ["document", "document_offsets"]


def document(ids: Tensor, kv_ids: Tensor | None = None) -> MaskMod:
    """Return the mask mod that is live where query and key have one document id.

    Combine it with `causal` or a window: ``and_masks(causal(), document(ids))``.

    Args:
        ids: [S] or [B, S], integers in any order, one for each token.
        kv_ids: as `ids`, of the keys, where these are other tokens than the queries; None: `ids`.

    Raises:
        ArgumentTypeError: no tensor, or one of another dtype.
        ArgumentError: a tensor of a wrong rank, or tensors on different devices.

    Source: Krell et al. 2021, Efficient Sequence Packing without Cross-contamination,
    arXiv:2107.02027.
    """
    query_id = table_at("document: ids", ids, INTEGERS)
    key_id = query_id if kv_ids is None else table_at("document: kv_ids", kv_ids, INTEGERS)
    check_one_device("document", ids=ids, kv_ids=kv_ids)

    def document_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return query_id(b, q_idx) == key_id(b, kv_idx)

    return document_mask


@outside_graphs
def document_offsets(
    offsets: Tensor, total: int | None = None, inner: MaskMod | None = None
) -> MaskMod:
    """Return the mask mod of documents that are given by their offsets (cu_seqlens).

    The offsets are read here, once: on a device that is a synchronisation. Later changes of the
    tensor are not seen.

    Args:
        offsets: [n + 1], int32 or int64: document i is the tokens ``offsets[i]`` to
            ``offsets[i + 1] - 1``. It begins with 0 and never decreases; documents may be empty.
        total: length of the row, at least ``offsets[-1]``, which is what None stands for. Tokens
            past the last document are one more document, so that their rows aren't dead.
        inner: mask mod of each document, with indices that count from its first token; None: all
            see all. `prefix_lm` needs it; for `causal` and windows, `and_masks` does the same.

    Raises:
        ArgumentTypeError: a wrong type or dtype.
        ArgumentError: offsets of a wrong rank, empty, not beginning with 0, or decreasing; a total
            that is too small.

    Source: as `document`.
    """
    check_tensor("document_offsets: offsets", offsets, ("[n + 1]",), INDICES)
    edges = offsets.detach().cpu().to(torch.int64)
    if not len(edges) or edges[0] != 0:
        got = f"got {int(edges[0])}" if len(edges) else "got none"
        raise ArgumentError(f"document_offsets: offsets must begin with 0, {got}.")
    lengths = edges.diff()
    if bool((lengths < 0).any()):
        at = int((lengths < 0).nonzero()[0]) + 1
        raise ArgumentError(
            f"document_offsets: offsets must not decrease, got {int(edges[at - 1])} and then "
            f"{int(edges[at])} at position {at}. Lengths become offsets by cumsum."
        )
    end = int(edges[-1])
    size = end if total is None else checked_int("document_offsets: total", total, 0)
    if size < end:
        raise ArgumentError(
            f"document_offsets: total must be at least the last offset, {end}, got {size}."
        )
    if inner is not None:
        check_callable("document_offsets: inner", inner, "mask mod")
    lengths = torch.cat([lengths, lengths.new_tensor([size - end])])
    ids = torch.arange(len(lengths), device="cpu").repeat_interleave(lengths)
    # An int32 table is half the memory traffic; a row is never longer.
    positions = (torch.arange(size, device="cpu") - edges[ids]).to(torch.int32).to(offsets.device)
    ids = ids.to(torch.int32).to(offsets.device)

    def document_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        same = ids[q_idx] == ids[kv_idx]
        if inner is None:
            return same
        return same & inner(b, h, positions[q_idx], positions[kv_idx])

    return document_mask
