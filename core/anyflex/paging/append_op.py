"""The static op that writes new keys and values into pages, and quantises them on the way.

It mutates its pools and returns nothing; it reads no number on the host, so that a device graph
may capture it. `anyflex.tensors.static_ops` has its schema.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.paging.append_rows import append_live_rows, append_rows

__all__ = ["append", "append_op", "fake_append"]


def append(
    key_pool: Tensor,
    value_pool: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    key: Tensor,
    value: Tensor,
    places: Tensor,
    drops: bool = True,
) -> None:
    """Implement the op."""
    pools = (key_pool, key_scale, key), (value_pool, value_scale, value)
    if drops:
        append_live_rows(pools, places)
    else:
        size = key_pool.shape[2]
        append_rows(pools, places // size, places % size)


def fake_append(*given: Any) -> None:
    """Stand for the op where a program is recorded."""


append_op = torch.ops.anyflex.append_kv.default
