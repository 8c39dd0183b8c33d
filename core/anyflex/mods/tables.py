"""Biases read from a table: by distance, by relation, or whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anyflex.mods.factory_arguments import (
    FLOATS,
    INDICES,
    check_one_device,
    check_tensor,
    query_position,
)
from anyflex.tensors.dynamo_errors import fail
from anyflex.tracing.mod_types import ScoreMod

__all__ = ["dense_bias", "relative_bias", "table_bias"]


def relative_bias(table: Tensor, offset: int | Tensor = 0) -> ScoreMod:
    """Return the score mod that adds a number for each head and clipped distance.

    It is ``score + table[clip(kv_idx - q_idx, -m, m) + m, h]``, m being half the table.

    Args:
        table: [2 * m + 1, Hq], floating; usually learned.
        offset: of the query's place; int, or int32 or int64 tensor, [] or [B].

    Raises:
        ArgumentTypeError: a wrong type or dtype.
        ArgumentError: a wrong rank, an even number of distances, or tensors on different devices.

    Source: clipping: Shaw et al. 2018, arXiv:1803.02155; one number a distance: Liu et al. 2021,
    Swin Transformer, arXiv:2103.14030.
    """
    check_tensor("relative_bias: table", table, ("[2 * m + 1, Hq]",), FLOATS)
    position = query_position("relative_bias: offset", offset)
    check_one_device("relative_bias", table=table, offset=offset)
    count = table.shape[0]
    if count % 2 == 0:
        fail(
            "ArgumentError",
            "relative_bias: table must have an odd number of distances, 2 * m + 1 from -m to m, "
            f"got {count}.",
        )
    most = count // 2

    def relative_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        distance = (kv_idx - position(b, q_idx)).clamp(-most, most)
        return score + table[distance + most, h]

    return relative_mod


def table_bias(table: Tensor, relation: Tensor) -> ScoreMod:
    """Return the score mod ``score + table[relation[b, q_idx, kv_idx], h]``.

    The relation of two tokens is for example the length of the shortest path between two nodes of
    a graph.

    Args:
        table: [n, Hq], floating; usually learned.
        relation: [Q, KV] or [B, Q, KV], int32 or int64: entries of the table, -1 being the last.

    Raises:
        ArgumentTypeError: a wrong type or dtype.
        ArgumentError: a wrong rank, or tensors on different devices.

    Source: Ying et al. 2021, Graphormer, arXiv:2106.05234.
    """
    check_tensor("table_bias: table", table, ("[n, Hq]",), FLOATS)
    check_tensor("table_bias: relation", relation, ("[Q, KV]", "[B, Q, KV]"), INDICES)
    check_one_device("table_bias", table=table, relation=relation)
    batched = relation.dim() == 3

    def table_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        entry = relation[b, q_idx, kv_idx] if batched else relation[q_idx, kv_idx]
        return score + table[entry, h]

    return table_mod


def dense_bias(bias: Tensor) -> ScoreMod:
    """Return the score mod ``score + bias[b, h, q_idx, kv_idx]``.

    Args:
        bias: [Q, KV], [H, Q, KV] or [B, H, Q, KV], floating; may be learned. Each size may be 1,
            for all batch entries, heads, queries or keys.

    Raises:
        ArgumentTypeError: a wrong type or dtype.
        ArgumentError: a wrong rank.

    Source: common practice; `attn_mask` of torch's scaled_dot_product_attention.
    """
    check_tensor("dense_bias: bias", bias, ("[Q, KV]", "[H, Q, KV]", "[B, H, Q, KV]"), FLOATS)
    rank = bias.dim()
    one = tuple([size == 1 for size in bias.shape])  # the trace's key takes no lists

    def dense_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        indices = (b, h, q_idx, kv_idx)[4 - rank :]
        chosen = [0 if single else index for single, index in zip(one, indices, strict=True)]
        return score + bias[tuple(chosen)]

    return dense_mod
