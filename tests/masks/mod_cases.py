"""One case for each ready-made score mod and each kind of its arguments.

`bias` or `curve` defines the mod, in float64 and by the published formula: a number for each
element, by loops over Python numbers, or a function of the score.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anyflex import mods

__all__ = ["MOD_CASES", "ModCase", "Sizes", "t5_bucket"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the call that a case is made for."""

    batch: int = 2
    heads: int = 4
    q_length: int = 19
    kv_length: int = 23


SIZES = Sizes()


@dataclass(frozen=True)
class ModCase:
    """A score mod.

    Args:
        make: returns the mod from the learned tensors.
        learned: shapes of the learned tensors, by name.
        bias: of the learned tensors and b, h, q, k, what is added to the score: a Python number
            or a 0-d tensor; None where `curve` says it.
        curve: of the score, what it becomes.
        tolerance: for results, in the unit of `differences`.
    """

    make: Callable[..., Any]
    learned: dict[str, tuple[int, ...]] = field(default_factory=dict)
    bias: Callable[..., Any] | None = None
    curve: Callable[[Tensor], Tensor] | None = None
    tolerance: float = 1e-11

    def formula(self, learned: dict[str, Tensor]) -> Callable[..., Tensor]:
        """The definition as a score mod of vectors, for the dense oracle."""
        sizes = SIZES
        whole: Tensor | None = None
        if self.bias is not None:
            numbers = [
                torch.as_tensor(self.bias(*learned.values(), b, h, q, k), dtype=torch.float64)
                for b in range(sizes.batch)
                for h in range(sizes.heads)
                for q in range(sizes.q_length)
                for k in range(sizes.kv_length)
            ]
            whole = torch.stack(numbers).reshape(
                sizes.batch, sizes.heads, sizes.q_length, sizes.kv_length
            )

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if whole is not None:
                score = score + whole[b, h, q, k]
            return score if self.curve is None else self.curve(score)

        return score_mod


def t5_bucket(distance: int, buckets: int, max_distance: int, bidirectional: bool) -> int:
    """The bucket of a key `distance` places after its query, in exact terms."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    # Where the logarithm is a whole number of buckets, rounding must not decide.
    return first + min(exact + math.floor(share * (buckets - exact) + 1e-9), buckets - 1)


def t5_number(
    max_distance: int, bidirectional: bool, offset: int = 0
) -> Callable[[Tensor, int, int, int, int], Tensor]:
    def bias(table: Tensor, b: int, h: int, q: int, k: int) -> Tensor:
        return table[t5_bucket(k - q - offset, len(table), max_distance, bidirectional), h]

    return bias


def clipped(table: Tensor, distance: int) -> Tensor:
    middle = (len(table) - 1) // 2
    return table[middle + min(max(distance, -middle), middle)]


PUBLISHED_4 = (2**-2, 2**-4, 2**-6, 2**-8)
PUBLISHED_6 = (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)
OFFSETS = (0, 7)
RELATION = [[[(3 * q + 5 * k + b) % 6 for k in range(23)] for q in range(19)] for b in range(2)]


def tanh(x: Tensor) -> Tensor:
    e = torch.exp(-2 * x.abs())
    return torch.sign(x) * (1 - e) / (1 + e)


MOD_CASES: dict[str, ModCase] = {
    "alibi": ModCase(lambda: mods.alibi(4), bias=lambda b, h, q, k: -PUBLISHED_4[h] * (q - k)),
    "alibi_symmetric": ModCase(
        lambda: mods.alibi(4, symmetric=True),
        bias=lambda b, h, q, k: -PUBLISHED_4[h] * max(q - k, k - q),
    ),
    "alibi_learned": ModCase(
        lambda slopes: mods.alibi(slopes, offset=torch.tensor(OFFSETS)),
        {"slopes": (4,)},
        bias=lambda slopes, b, h, q, k: slopes[h] * (k - OFFSETS[b] - q),
    ),
    "softcap": ModCase(lambda: mods.softcap(1.25), curve=lambda s: 1.25 * tanh(s / 1.25)),
    "softcap_approximate": ModCase(
        lambda: mods.softcap(1.25, approximate=True),
        curve=lambda s: 1.25 * tanh(s / 1.25),
        tolerance=2e-4,
    ),
    "t5_bias": ModCase(
        lambda table: mods.t5_bias(table, 16), {"table": (8, 4)}, bias=t5_number(16, True)
    ),
    "t5_bias_of_a_decoder": ModCase(
        lambda table: mods.t5_bias(table, 20, bidirectional=False, offset=4),
        {"table": (7, 4)},
        bias=t5_number(20, False, 4),
    ),
    "relative_bias": ModCase(
        lambda table: mods.relative_bias(table, offset=torch.tensor(3, dtype=torch.int32)),
        {"table": (11, 4)},
        bias=lambda table, b, h, q, k: clipped(table, k - q - 3)[h],
    ),
    "table_bias": ModCase(
        lambda table: mods.table_bias(table, torch.tensor(RELATION)),
        {"table": (6, 4)},
        bias=lambda table, b, h, q, k: table[RELATION[b][q][k]][h],
    ),
    "table_bias_for_all": ModCase(
        lambda table: mods.table_bias(table, torch.tensor(RELATION[0], dtype=torch.int32)),
        {"table": (6, 4)},
        bias=lambda table, b, h, q, k: table[RELATION[0][q][k]][h],
    ),
    "dense_bias": ModCase(
        lambda bias: mods.dense_bias(bias),
        {"bias": (2, 4, 19, 23)},
        bias=lambda bias, b, h, q, k: bias[b][h][q][k],
    ),
    "dense_bias_for_all_entries": ModCase(
        lambda bias: mods.dense_bias(bias),
        {"bias": (1, 4, 19, 23)},
        bias=lambda bias, b, h, q, k: bias[0][h][q][k],
    ),
    "dense_bias_for_all_heads": ModCase(
        lambda bias: mods.dense_bias(bias),
        {"bias": (2, 1, 19, 23)},
        bias=lambda bias, b, h, q, k: bias[b][0][q][k],
    ),
    "dense_bias_of_heads": ModCase(
        lambda bias: mods.dense_bias(bias),
        {"bias": (4, 19, 23)},
        bias=lambda bias, b, h, q, k: bias[h][q][k],
    ),
    "dense_bias_for_all_queries": ModCase(
        lambda bias: mods.dense_bias(bias),
        {"bias": (2, 1, 1, 23)},
        bias=lambda bias, b, h, q, k: bias[b][0][0][k],
    ),
    "dense_bias_for_all_keys": ModCase(
        lambda bias: mods.dense_bias(bias),
        {"bias": (4, 19, 1)},
        bias=lambda bias, b, h, q, k: bias[h][q][0],
    ),
    "dense_bias_for_all": ModCase(
        lambda bias: mods.dense_bias(bias),
        {"bias": (19, 23)},
        bias=lambda bias, b, h, q, k: bias[q][k],
    ),
    "compose": ModCase(
        lambda slopes: mods.compose(mods.alibi(slopes), mods.softcap(2.0)),
        {"slopes": (4,)},
        bias=lambda slopes, b, h, q, k: slopes[h] * (k - q),
        curve=lambda s: 2.0 * tanh(s / 2.0),
    ),
    "compose_of_nothing": ModCase(lambda: mods.compose(), bias=lambda b, h, q, k: 0.0),
}
