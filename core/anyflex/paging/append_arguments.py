"""Checks of the arguments of `PagedKVCache.append` and `attend`.

Part of the traced half: plain Python on shapes and types, inlined by Dynamo.
"""

from __future__ import annotations

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


def check_rows(name: str, rows: Any, pool: Tensor, dtype: torch.dtype, tokens: int) -> None:
    """Check the rows that are appended to a pool.

    Args:
        name: ``"key"`` or ``"value"``.
        rows: at least `tokens` of them.
        pool: [P, Hkv, page, D].
    """
    if not isinstance(rows, Tensor):
        fail("ArgumentTypeError", f"{name} must be a Tensor, got {type(rows).__name__}.")
    heads, dim = pool.shape[1], pool.shape[3]
    if rows.dim() != 3 or rows.shape[1] != heads or rows.shape[2] != dim:
        fail(
            "ArgumentError",
            f"{name} must have shape [T, {heads}, {dim}], got {list(rows.shape)}.",
        )
    if rows.dtype is not dtype:
        fail("ArgumentTypeError", f"{name} must have the cache's dtype {dtype}, got {rows.dtype}.")
    if rows.device != pool.device:
        fail("ArgumentError", f"{name} must be on {pool.device}, got {rows.device}.")
    if rows.requires_grad and torch.is_grad_enabled():
        fail(
            "ArgumentError",
            f"{name} requires grad, and no gradient goes through pages: append under "
            "torch.no_grad() or torch.inference_mode().",
        )
    if name == "value" and rows.shape[0] != tokens:
        fail(
            "ArgumentError",
            f"value must have the {tokens} rows of key, got {rows.shape[0]}.",
        )
    if rows.shape[0] < tokens:
        fail(
            "ArgumentError",
            f"{name} must have a row for each of the step's {tokens} tokens, got {rows.shape[0]}.",
        )
