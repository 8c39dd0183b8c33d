"""Mods that the kit needs beyond the acceptance list, by the same rules.

Their numbers start with the list's letter for the kind of mod.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyflex.testing.mods.leaves import Leaf, Sizes, floats, integers, shape_of
from anyflex.testing.mods.mod import mod, numbered

__all__ = ["KIT_MASKS", "KIT_MODS"]


def _seven_tables(
    factors: Any, offsets: Any, rows: Any, columns: Any, distances: Any, kinds: Any, of_kinds: Any
) -> Callable[..., Any]:
    """Head, KV head, batch, row, key and pair decide elements."""
    group = factors.shape[0] // columns.shape[0]

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        s = s * factors[h] + offsets[b, h] + rows[q] + columns[h // group, k]
        return s + distances[(q - k) % 16] + of_kinds[kinds[k]]

    return score_mod


def _wide_ids(sizes: Sizes, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """int64 [M]: some are equal in their low halves, some to a float32, some to a float64."""
    some = torch.tensor([0, 1 << 32, 1 << 24, (1 << 24) + 1, 1 << 53, (1 << 53) + 1], device="cpu")
    return some[torch.randint(0, len(some), shape_of("M", sizes), generator=generator)]


KIT_MODS = numbered(
    "S+",
    # NaN wins against every number.
    maximum_of_table=mod(
        lambda low: lambda s, b, h, q, k: torch.maximum(s, low[k]), low=floats("S"), smooth=False
    ),
    # NaN wins against every number.
    minimum_of_table=mod(
        lambda high: lambda s, b, h, q, k: torch.minimum(s, high[k]),
        high=floats("S"),
        smooth=False,
    ),
    # Every pair adds into one of two bf16 addresses.
    bf16_collide=mod(
        lambda w: lambda s, b, h, q, k: s + w[(q + k) % 2],
        w=floats("16", torch.bfloat16, grad=True),
    ),
    # As `bf16_collide` with float16.
    f16_collide=mod(
        lambda w: lambda s, b, h, q, k: s + w[(q + k) % 2],
        w=floats("16", torch.float16, grad=True),
    ),
    # Tables of four types; four learn.
    seven_tables=mod(
        _seven_tables,
        factors=floats("H", torch.float16, grad=True),
        offsets=floats("B H"),
        rows=floats("L", torch.bfloat16, grad=True),
        columns=floats("Hkv S", torch.float16, grad=True),
        distances=floats("16", grad=True),
        kinds=integers("S", 0, 3),
        of_kinds=floats("3"),
    ),
    # Gradients of the score and of the table need each other's values.
    squared_table=mod(lambda w: lambda s, b, h, q, k: s * w[h] * w[h], w=floats("H", grad=True)),
    # One element that every pair reads, and a table that each head reads.
    scalar_and_table=mod(
        lambda a, t: lambda s, b, h, q, k: s * a + t[h],
        a=floats("", grad=True),
        t=floats("H", grad=True),
    ),
    # The same where only the first learns.
    scalar_and_constants=mod(
        lambda a, t: lambda s, b, h, q, k: s * a + t[h], a=floats("", grad=True), t=floats("H")
    ),
    # Constants that float32 can't hold.
    many_digits=mod(lambda: lambda s, b, h, q, k: s * 1.2345678901234567 + 0.0123456789012345678),
)
KIT_MASKS = numbered(
    "M+",
    # Reads no index.
    constant_true=mod(lambda: lambda b, h, q, k: b.new_ones((), dtype=torch.bool)),
    # Ids that only differ as 64-bit integers.
    wide_ids=mod(lambda ids: lambda b, h, q, k: ids[q] == ids[k], ids=Leaf(_wide_ids)),
)
