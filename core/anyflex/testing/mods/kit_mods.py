"""Mods that the kit needs beyond the acceptance list, by the same rules.

Their numbers start with the list's letter for the kind of mod.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyflex.testing.mods.leaves import Leaf, Sizes, floats, integers, shape_of
from anyflex.testing.mods.mod import Entry
from anyflex.testing.mods.register import register

__all__ = ["KIT_MASKS", "KIT_MODS"]

KIT_MODS: dict[str, Entry] = {}
KIT_MASKS: dict[str, Entry] = {}
score_mod = functools.partial(register, KIT_MODS)
mask_mod = functools.partial(register, KIT_MASKS)

ScoreMod = Callable[..., Any]
MaskMod = Callable[..., Any]


@score_mod("S+1", low=floats("S"), smooth=False)
def maximum_of_table(low: Any) -> ScoreMod:
    """NaN wins against every number."""
    return lambda s, b, h, q, k: torch.maximum(s, low[k])


@score_mod("S+4", high=floats("S"), smooth=False)
def minimum_of_table(high: Any) -> ScoreMod:
    """NaN wins against every number."""
    return lambda s, b, h, q, k: torch.minimum(s, high[k])


@score_mod("S+2", w=floats("16", torch.bfloat16, grad=True))
def bf16_collide(w: Any) -> ScoreMod:
    """Every pair adds into one of two bf16 addresses."""
    return lambda s, b, h, q, k: s + w[(q + k) % 2]


@score_mod("S+5", w=floats("16", torch.float16, grad=True))
def f16_collide(w: Any) -> ScoreMod:
    """As `bf16_collide` with float16."""
    return lambda s, b, h, q, k: s + w[(q + k) % 2]


@score_mod(
    "S+6",
    factors=floats("H", torch.float16, grad=True),
    offsets=floats("B H"),
    rows=floats("L", torch.bfloat16, grad=True),
    columns=floats("Hkv S", torch.float16, grad=True),
    distances=floats("16", grad=True),
    kinds=integers("S", 0, 3),
    of_kinds=floats("3"),
)
def seven_tables(
    factors: Any, offsets: Any, rows: Any, columns: Any, distances: Any, kinds: Any, of_kinds: Any
) -> ScoreMod:
    """Tables of four types; four learn. Head, KV head, batch, row, key and pair decide
    elements."""
    group = factors.shape[0] // columns.shape[0]

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        s = s * factors[h] + offsets[b, h] + rows[q] + columns[h // group, k]
        return s + distances[(q - k) % 16] + of_kinds[kinds[k]]

    return score_mod


@score_mod("S+3", w=floats("H", grad=True))
def squared_table(w: Any) -> ScoreMod:
    """Gradients of the score and of the table need each other's values."""
    return lambda s, b, h, q, k: s * w[h] * w[h]


@mask_mod("M+2")
def constant_true() -> MaskMod:
    """Reads no index."""
    return lambda b, h, q, k: b.new_ones((), dtype=torch.bool)


def _wide_ids(sizes: Sizes, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """int64 [M]: some are equal in their low halves, some to a float32, some to a float64."""
    some = torch.tensor([0, 1 << 32, 1 << 24, (1 << 24) + 1, 1 << 53, (1 << 53) + 1], device="cpu")
    return some[torch.randint(0, len(some), shape_of("M", sizes), generator=generator)]


@mask_mod("M+1", ids=Leaf(_wide_ids))
def wide_ids(ids: Any) -> MaskMod:
    """Ids that only differ as 64-bit integers."""
    return lambda b, h, q, k: ids[q] == ids[k]
