"""T5's relative bias: a learned number for each head and bucket of distances."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from anyflex.mods.factory_arguments import (
    FLOATS,
    check_one_device,
    check_tensor,
    checked_bool,
    checked_int,
    query_position,
)
from anyflex.tensors.dynamo_errors import fail
from anyflex.tracing.mod_types import ScoreMod

__all__ = ["t5_bias", "t5_buckets"]


def t5_buckets(
    buckets: int,
    max_distance: int = 128,
    bidirectional: bool = True,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the bucket of each distance, int32 [2 * max_distance + 1].

    Entry ``max_distance + d`` is for a key d places after its query; beyond max_distance on either
    side the buckets are those of the ends. Half of a direction's buckets hold one distance each,
    the others grow logarithmically. Bidirectional: the second half of the buckets is for keys
    after the query; else these share the bucket of distance 0.

    Args:
        buckets: how many there are; at least 2, bidirectional: even and at least 4.
        max_distance: from where on all is one bucket; larger than the distances with a bucket of
            their own.
        device: of the tensor; None: torch's default.

    Raises:
        ArgumentTypeError: a wrong type.
        ArgumentError: a number that is too small, or an odd one.

    Source: as `t5_bias`; its logarithm, too, is taken in float32.
    """
    checked_int("t5_buckets: buckets", buckets, 4 if bidirectional else 2)
    if checked_bool("t5_buckets: bidirectional", bidirectional) and buckets % 2:
        fail(
            "ArgumentError",
            f"t5_buckets: buckets must be even where bidirectional, got {buckets}.",
        )
    count = buckets // 2 if bidirectional else buckets
    exact = count // 2
    checked_int("t5_buckets: max_distance", max_distance, exact + 1)
    distance = torch.arange(max_distance + 1, dtype=torch.float32, device=device)
    # The first entries, whose logarithm is below 0, are replaced below.
    logarithm = torch.log(distance.clamp(min=1.0) / exact) / math.log(max_distance / exact)
    grown = exact + (logarithm * (count - exact)).to(torch.int32)
    one_side = torch.where(distance < exact, distance.to(torch.int32), grown.clamp(max=count - 1))
    before = one_side.flip(0)
    after = one_side[1:] + count if bidirectional else torch.zeros_like(one_side[1:])
    return torch.cat([before, after])


def t5_bias(
    table: Tensor,
    max_distance: int = 128,
    bidirectional: bool = True,
    offset: int | Tensor = 0,
) -> ScoreMod:
    """Return the score mod ``score + table[bucket(kv_idx - q_idx), h]``.

    The buckets are a table of ints, made here, so that no backend's logarithm decides.

    Args:
        table: [buckets, Hq], floating; usually learned.
        max_distance, bidirectional: as for `t5_buckets`; decoders use bidirectional=False.
        offset: of the query's place; int, or int32 or int64 tensor, [] or [B].

    Raises:
        ArgumentTypeError: a wrong type or dtype.
        ArgumentError: a wrong rank, a number of buckets or max_distance that `t5_buckets` refuses,
            or tensors on different devices.

    Source: Raffel et al. 2019, T5, arXiv:1910.10683.
    """
    check_tensor("t5_bias: table", table, ("[buckets, Hq]",), FLOATS)
    position = query_position("t5_bias: offset", offset)
    check_one_device("t5_bias", table=table, offset=offset)
    bucket = t5_buckets(table.shape[0], max_distance, bidirectional, table.device)

    def t5_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        distance = (kv_idx - position(b, q_idx)).clamp(-max_distance, max_distance)
        return score + table[bucket[distance + max_distance], h]

    return t5_mod
