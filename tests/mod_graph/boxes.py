"""Boxes of elements, what their block graph says of them, and what is true."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyflex.mod_graph.block_graph import block_graph
from anyflex.mod_graph.evaluate import evaluate
from anyflex.mod_graph.graph import ModGraph, parse_graph
from anyflex.mod_graph.simplify import simplify
from anyflex.tracing.trace import trace_mod

__all__ = ["Judged", "judge_graph", "judge_mask", "true_kinds"]

COUNT = 300
"""Number of boxes of each draw."""


@dataclass(frozen=True)
class Judged:
    """Number of boxes of which nothing was said, of those whose elements are all live or all dead,
    and number of these."""

    open: int
    settled: int

    @property
    def share(self) -> float:
        return self.open / self.settled


def judge_mask(
    mask_mod: Callable[..., Any], live: Tensor, *, aligned: bool, block: int = 8, first: int = 0
) -> Judged:
    """Hold a mask mod's block graph against what is live.

    Args:
        live: [B, H, Q, KV].
        aligned: boxes are blocks, of `block` rows and columns, and closed-over numbers are
            constants; else boxes are of any size up to that, and numbers are run-time numbers.
        first: index of the first query.
    """
    traced = trace_mod(mask_mod, "mask")
    graph = parse_graph(traced.text)
    if aligned:
        slots = {f"i{i}": number for i, number in enumerate(traced.ints)}
        graph = graph.bind(
            constants={**slots, **{f"f{i}": number for i, number in enumerate(traced.floats)}}
        )
    return judge_graph(
        simplify(graph),
        live,
        aligned=aligned,
        block=block,
        first=first,
        captured=traced.captured,
        ints=traced.ints,
        floats=traced.floats,
    )


def judge_graph(
    graph: ModGraph,
    live: Tensor,
    *,
    aligned: bool = False,
    block: int = 8,
    first: int = 0,
    captured: Sequence[Tensor] = (),
    ints: Sequence[int] = (),
    floats: Sequence[float] = (),
) -> Judged:
    """Hold a mask graph's block graph against what is live; arguments of `judge_mask`."""
    blocks = block_graph(graph)
    assert parse_graph(blocks.graph.text) == blocks.graph
    assert blocks.graph.dtype is torch.int32
    draw = torch.Generator().manual_seed(int(aligned))

    def numbers(size: int) -> Tensor:
        return torch.randint(size, (COUNT,), generator=draw)

    b, h = numbers(live.shape[0]), numbers(live.shape[1])
    ends = []
    for size in live.shape[2:]:
        low = numbers(-(-size // block)) * block if aligned else numbers(size)
        longer = block - 1 if aligned else numbers(block)
        ends += [low, (low + longer).clamp(max=size - 1)]
    q_low, q_high, kv_low, kv_high = ends
    side = torch.tensor(block)
    (kinds,) = evaluate(
        blocks.graph.nodes,
        (blocks.graph.output,),
        inputs={
            "b": b, "h": h, "q_low": q_low + first, "q_high": q_high + first, "kv_low": kv_low,
            "kv_high": kv_high, "q_block": side, "kv_block": side,
        },
        captured=blocks.tensors(captured, block, block),
        ints=ints,
        floats=floats,
    )  # fmt: skip
    true = true_kinds(live, b, h, q_low, q_high, kv_low, kv_high)
    open_ = kinds == 2
    wrong = ~open_ & (kinds != true)
    assert not bool(wrong.any()), f"{int(wrong.sum())} boxes are wrong\n{graph}\n{blocks.graph}"
    settled = true != 2
    return Judged(int((settled & open_).sum()), int(settled.sum()))


def true_kinds(
    live: Tensor,
    b: Tensor,
    h: Tensor,
    q_low: Tensor,
    q_high: Tensor,
    kv_low: Tensor,
    kv_high: Tensor,
) -> Tensor:
    """Return 0 where no element of a box is live, 1 where all are, else 2."""
    sums = torch.nn.functional.pad(live.long(), (1, 0, 1, 0)).cumsum(2).cumsum(3)
    bottom, right = q_high + 1, kv_high + 1
    count = (
        sums[b, h, bottom, right]
        - sums[b, h, q_low, right]
        - sums[b, h, bottom, kv_low]
        + sums[b, h, q_low, kv_low]
    )
    area = (bottom - q_low) * (right - kv_low)
    return torch.where(count == 0, 0, torch.where(count == area, 1, 2))
