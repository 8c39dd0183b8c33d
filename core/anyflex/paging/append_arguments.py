"""Checks of the arguments of `PagedKVCache.append` and `attend`.

Part of the traced half: plain Python on shapes and types, inlined by Dynamo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anyflex.tensors.dynamo_errors import fail

__all__ = ["check_layer", "check_rows"]


def check_layer(layer: Any, layers: int) -> None:
    if isinstance(layer, bool) or not isinstance(layer, int):
        fail("ArgumentTypeError", f"layer must be an int, got {type(layer).__name__}.")
    if not 0 <= layer < layers:
        fail("ArgumentError", f"layer must be from 0 to {layers - 1}, got {layer}.")


def check_rows(key: Any, value: Any, pools: Sequence[Any], dtype: torch.dtype, least: int) -> int:
    """Check rows that are appended, and return how many they are.

    Args:
        pools: of keys and values, [P, Hkv, page, D].
        least: number of the step's tokens.
    """
    for name, rows, pool in (("key", key, pools[0]), ("value", value, pools[1])):
        if not isinstance(rows, Tensor):
            fail("ArgumentTypeError", f"{name} must be a Tensor, got {type(rows).__name__}.")
        _, heads, _, dim = pool.shape
        if rows.dim() != 3 or rows.shape[1:] != (heads, dim):
            fail(
                "ArgumentError",
                f"{name} must have shape [T, {heads}, {dim}], got {list(rows.shape)}.",
            )
        if rows.dtype is not dtype:
            fail(
                "ArgumentTypeError",
                f"{name} must have the cache's dtype {dtype}, got {rows.dtype}.",
            )
        if rows.device != pool.device:
            fail("ArgumentError", f"{name} must be on {pool.device}, got {rows.device}.")
        if rows.requires_grad and torch.is_grad_enabled():
            fail(
                "ArgumentError",
                f"{name} requires grad, and no gradient goes through pages: append under "
                "torch.no_grad() or torch.inference_mode().",
            )
    tokens: int = key.shape[0]
    if value.shape[0] != tokens:
        fail(
            "ArgumentError",
            f"value must have the {tokens} rows of key, got {value.shape[0]}.",
        )
    if tokens < least:
        fail(
            "ArgumentError",
            f"key must have a row for each of the step's {least} tokens, got {tokens}.",
        )
    return tokens
