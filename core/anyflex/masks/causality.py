"""Causal masks: a query sees the keys up to its own place."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anyflex.mods.factory_arguments import checked_int, query_position
from anyflex.tracing.mod_types import MaskMod

__all__ = ["causal", "causal_bottom_right"]


def causal(offset: int | Tensor = 0) -> MaskMod:
    """Return the mask mod that is live where ``kv_idx <= q_idx + offset``.

    Offset 0 aligns the first query with the first key (top left).

    Examples:
        >>> mask_mod = causal()

    Args:
        offset: int; or int32 or int64 tensor, [] or [B], for decoding: how many keys each batch
            entry has before its first query.

    Raises:
        ArgumentTypeError: no int, or a tensor of another dtype.
        ArgumentError: a tensor of another rank.

    Source: Vaswani et al. 2017, Attention Is All You Need, arXiv:1706.03762.
    """
    position = query_position("causal: offset", offset)

    def causal_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return position(b, q_idx) >= kv_idx

    return causal_mask


def causal_bottom_right(q_length: int, kv_length: int) -> MaskMod:
    """Return the causal mask mod that aligns the last query with the last key.

    Where q_length is larger than kv_length, the first queries see nothing: their rows are dead.

    Args:
        q_length, kv_length: lengths of the call, at least 0.

    Raises:
        ArgumentTypeError, ArgumentError: a length that is no int, or negative.

    Source: as `causal`; the alignment is the one of chunked prefill with a cache.
    """
    first = checked_int("causal_bottom_right: q_length", q_length, 0)
    last = checked_int("causal_bottom_right: kv_length", kv_length, 0)
    return causal(last - first)
