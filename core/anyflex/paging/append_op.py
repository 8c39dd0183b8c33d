"""The static op that writes new keys and values into pages, and quantises them on the way.

It mutates its pools and returns nothing; it reads no number on the host, so that a device graph
may capture it. Importing this module defines the op and nothing else, for programs that were saved
by another process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.tensors.static_ops import implement

__all__ = ["append_op"]

# torch.library is not annotated.
_library: Any = torch.library.Library("anyflex", "FRAGMENT")  # type: ignore[no-untyped-call]
# Pools are [P, Hkv, page, E] and [P, Hkv, page, Ev], any strides; scales, of pools in 8 bits,
# float32 [P, Hkv, page]. key and value are [T, Hkv, E] and [T, Hkv, Ev]. places: int64 [T],
# page * page size + row; a row whose place isn't in the pool is dropped. Two rows have one place
# only if it isn't in the pool, or if nobody reads it. drops=False promises that all are in it.
_library.define(
    "append_kv(Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor(c!)? key_scale, "
    "Tensor(d!)? value_scale, Tensor key, Tensor value, Tensor places, bool drops=True) -> ()"
)


def _append(
    key_pool: Tensor,
    value_pool: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    key: Tensor,
    value: Tensor,
    places: Tensor,
    drops: bool = True,
) -> None:
    from anyflex.paging.append_rows import append_live_rows, append_rows

    pools = (key_pool, key_scale, key), (value_pool, value_scale, value)
    if drops:
        append_live_rows(pools, places)
    else:
        size = key_pool.shape[2]
        append_rows(pools, places // size, places % size)


def _fake_append(*given: Any) -> None:
    return None


implement(_library, "append_kv", _append, _fake_append)

append_op = torch.ops.anyflex.append_kv.default
