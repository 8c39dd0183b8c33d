"""Windows: a query sees the keys near to it, densely or in steps, and a few special ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.mods.factory_arguments import (
    check_one_device,
    checked_bool,
    checked_int,
    number_at,
    query_position,
    table_at,
)
from anyflex.tensors.dynamo_errors import fail
from anyflex.tracing.mod_types import MaskMod

__all__ = ["causal_window", "dilated", "global_and_window", "sinks_and_window", "sliding_window"]


def sliding_window(
    left: int | Tensor | None, right: int | Tensor | None = 0, offset: int | Tensor = 0
) -> MaskMod:
    """Return the mask mod that is live from `left` keys before the query to `right` keys after it.

    Args:
        left, right: keys on each side, the query's own place not counted, at least 0; None: all of
            them. int; or int32 or int64 tensor, [] or [H], one entry a head.
        offset: of the query's place; see `anyflex.masks`.

    Raises:
        ArgumentTypeError: a wrong type or dtype.
        ArgumentError: a negative int, a tensor of a wrong rank, tensors on different devices, or
            None on both sides.

    Source: Beltagy et al. 2020, Longformer, arXiv:2004.05150.
    """
    position = query_position("sliding_window: offset", offset)
    if left is None and right is None:
        fail("ArgumentError", "sliding_window: left and right are both None; give one of them.")
    check_one_device("sliding_window", left=left, right=right, offset=offset)
    before = None if left is None else number_at("sliding_window: left", left, "H", 0)
    after = None if right is None else number_at("sliding_window: right", right, "H", 0)

    def window_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        place = position(b, q_idx)
        if before is None:
            return kv_idx - place <= after(h)  # type: ignore[misc]
        if after is None:
            return place - kv_idx <= before(h)
        return (place - kv_idx <= before(h)) & (kv_idx - place <= after(h))

    return window_mask


def causal_window(size: int | Tensor, offset: int | Tensor = 0) -> MaskMod:
    """Return the mask mod that is live for the last `size` keys, the query's own included.

    Args:
        size: at least 1. int; or int32 or int64 tensor, [] or [H], one entry a head.
        offset: of the query's place; see `anyflex.masks`.

    Raises:
        ArgumentTypeError: a wrong type or dtype.
        ArgumentError: an int below 1, a tensor of a wrong rank, or tensors on different devices.

    Source: Jiang et al. 2023, Mistral 7B, arXiv:2310.06825.
    """
    position = query_position("causal_window: offset", offset)
    width = number_at("causal_window: size", size, "H", 1)
    check_one_device("causal_window", size=size, offset=offset)

    def window_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        distance = position(b, q_idx) - kv_idx
        return (distance >= 0) & (distance < width(h))

    return window_mask


def dilated(
    dilation: int | Tensor,
    window: int | None = None,
    causal: bool = True,
    offset: int | Tensor = 0,
) -> MaskMod:
    """Return the mask mod that is live for every `dilation`-th key, counted from the query.

    Args:
        dilation: at least 1. int; or int32 or int64 tensor, [] or [H], one entry a head.
        window: how many keys at most on a side, the query's own included, so that they reach
            ``(window - 1) * dilation`` far; None: all.
        causal: False: keys after the query too.
        offset: of the query's place; see `anyflex.masks`.

    Raises:
        ArgumentTypeError: a wrong type or dtype.
        ArgumentError: an int below 1, a tensor of a wrong rank, or tensors on different devices.

    Source: Child et al. 2019, Sparse Transformers, arXiv:1904.10509; Longformer, arXiv:2004.05150.
    """
    position = query_position("dilated: offset", offset)
    step = number_at("dilated: dilation", dilation, "H", 1)
    check_one_device("dilated", dilation=dilation, offset=offset)
    # Steps to the last key: a bound that is reached is the tightest for ranges.
    steps = None if window is None else checked_int("dilated: window", window, 1) - 1
    one_sided = checked_bool("dilated: causal", causal)

    def dilated_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        distance = position(b, q_idx) - kv_idx
        live = distance % step(h) == 0
        if one_sided:
            live = live & (distance >= 0)
        if steps is not None:
            live = live & (distance <= steps * step(h))
            if not one_sided:
                live = live & (-distance <= steps * step(h))
        return live

    return dilated_mask


def global_and_window(
    global_tokens: int | Tensor, left: int | Tensor, right: int | Tensor | None = None
) -> MaskMod:
    """Return the mask mod of a window plus tokens that see everything and that all see.

    Queries and keys are the same tokens. With `and_masks(causal(), ...)` only earlier global
    tokens are seen.

    Args:
        global_tokens: number of global tokens at the beginning, at least 0; or a bool tensor [S],
            or [B, S], that is True at global tokens.
        left, right: the window, as in `sliding_window`; right None: as left.

    Raises:
        ArgumentTypeError: a wrong type or dtype.
        ArgumentError: a negative int, a tensor of a wrong rank, or tensors on different devices.

    Source: Zaheer et al. 2020, Big Bird, arXiv:2007.14062; Longformer, arXiv:2004.05150.
    """
    before = number_at("global_and_window: left", left, "H", 0)
    after = before if right is None else number_at("global_and_window: right", right, "H", 0)
    check_one_device("global_and_window", global_tokens=global_tokens, left=left, right=right)

    def window(h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return (q_idx - kv_idx <= before(h)) & (kv_idx - q_idx <= after(h))

    if isinstance(global_tokens, Tensor):
        is_global = table_at("global_and_window: global_tokens", global_tokens, (torch.bool,))

        def table_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
            return is_global(b, q_idx) | is_global(b, kv_idx) | window(h, q_idx, kv_idx)

        return table_mask
    count = checked_int("global_and_window: global_tokens", global_tokens, 0)

    def count_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return (q_idx < count) | (kv_idx < count) | window(h, q_idx, kv_idx)

    return count_mask


def sinks_and_window(sinks: int, window: int | Tensor, offset: int | Tensor = 0) -> MaskMod:
    """Return the causal mask mod of the first `sinks` keys and the last `window` ones.

    It is what lets a model stream. For sinks that are learned and have no key, see
    `anyflex.with_sinks`.

    Args:
        sinks: at least 0.
        window: the query's own place included, at least 1. int; or int32 or int64 tensor, [] or
            [H], one entry a head.
        offset: of the query's place; see `anyflex.masks`.

    Raises:
        ArgumentTypeError: a wrong type or dtype.
        ArgumentError: an int that is too small, a tensor of a wrong rank, or tensors on different
            devices.

    Source: Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks,
    arXiv:2309.17453.
    """
    position = query_position("sinks_and_window: offset", offset)
    first = checked_int("sinks_and_window: sinks", sinks, 0)
    width = number_at("sinks_and_window: window", window, "H", 1)
    check_one_device("sinks_and_window", window=window, offset=offset)

    def streaming_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        distance = position(b, q_idx) - kv_idx
        return (distance >= 0) & ((kv_idx < first) | (distance < width(h)))

    return streaming_mask
