"""Implementations of the static ops of block masks, for when a program runs.

They build on the host, as eager calls do, and put the result into tensors whose sizes the recorded
program knows.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from anyflex.block_mask.elementwise_evaluation import TracedElements
from anyflex.block_mask.mask_function import check_captured
from anyflex.block_mask.mask_request import Request, read_request, room
from anyflex.block_mask.row_slicing import checked_rows, row_views
from anyflex.block_mask.structure_builder import built_runs, captured_device
from anyflex.errors import PerformanceWarning
from anyflex.intervals.evaluation import Domain
from anyflex.mask_structure.device_views import MaskViews, packed_views
from anyflex.mask_structure.given_runs import views_of_runs
from anyflex.mask_structure.run_checks import (
    check_structure,
    checked_block_size,
    checked_length,
)
from anyflex.mask_structure.runs import PARTIAL, RunList, spread, unpack
from anyflex.mask_structure.views_registry import find, find_marked, marked
from anyflex.mod_graph.graph import parse_graph
from anyflex.process.user_frames import user_stacklevel
from anyflex.tracing.trace import TracedMod

__all__ = ["built", "checked", "rows"]

Outputs = tuple[Tensor, Tensor, Tensor]
"""offsets, runs and mark."""

_CPU = torch.device("cpu")


def built(tensors: list[Tensor], ints: list[int], request: str, device: torch.device) -> Outputs:
    """Build the mask of a traced mask mod. Raises as `create_block_mask` does."""
    count, batch, heads, q_length, kv_length, q_block, kv_block, *numbers = ints
    wanted = read_request(request)
    sizes = {"B": batch, "H": heads, "Q_LEN": q_length, "KV_LEN": kv_length}
    for name, size in sizes.items():
        checked_length(name, size)
    block_size = checked_block_size((q_block, kv_block))
    captured, floats = tensors[:count], tuple(number.item() for number in tensors[count + 1 :])
    for position, facts in parse_graph(wanted.text).loads().items():
        check_captured(position, captured[position], *facts)
    domain = Domain(batch, heads, (q_length, kv_length), block_size)
    if captured:
        views = _views(wanted, captured, tuple(numbers), floats, domain)
    else:
        views = _views_of_numbers(wanted, tuple(numbers), floats, domain)
    rows_of_blocks, columns = views.q_blocks, views.kv_blocks
    return _outputs(views, room(batch, heads, rows_of_blocks, columns), device)


def _views(
    wanted: Request,
    captured: list[Tensor],
    ints: tuple[int, ...],
    floats: tuple[float, ...],
    domain: Domain,
) -> MaskViews:
    traced = TracedMod(wanted.text, captured, list(ints), list(floats), list(wanted.names))
    captured_device(traced)
    runs = built_runs(TracedElements(traced, _CPU), domain, wanted.exact)
    if not wanted.separate_full_blocks:
        runs = runs._replace(kind=torch.full_like(runs.kind, PARTIAL))
    grids = (domain.batch, domain.heads)
    views = packed_views(runs, grids, domain.lengths, domain.block_size)
    most = room(*grids, views.q_blocks, views.kv_blocks)
    listed = unpack(views.offsets, views.runs)
    if listed.row.numel() <= most:
        return views
    limit = most // (domain.batch * domain.heads * views.q_blocks)
    warnings.warn(
        f"a block mask built inside of a compiled graph has {listed.row.numel()} runs, and the "
        f"graph has room for {most}: neighbours in rows of more than {limit} runs are merged, "
        "which is right but may be slower. Build it outside of the graph and pass it in.",
        PerformanceWarning,
        stacklevel=user_stacklevel(),
    )
    merged = at_most(listed, limit)
    return packed_views(merged, grids, domain.lengths, domain.block_size)


@functools.lru_cache(maxsize=32)
def _views_of_numbers(
    wanted: Request, ints: tuple[int, ...], floats: tuple[float, ...], domain: Domain
) -> MaskViews:
    """`_views` of a mask mod that reads no tensor: a causal mask is built once, not at each
    step."""
    return _views(wanted, [], ints, floats, domain)


def at_most(runs: RunList, limit: int) -> RunList:
    """Return the runs with at most `limit` a row: neighbours of a row that has more become one
    PARTIAL run, over what lies between them too, where the mask mod is False.

    Args:
        runs: sorted by row and column.
    """
    counts = torch.bincount(runs.row)
    _, place = spread(counts)
    group = runs.row * limit + place * limit // counts[runs.row].clamp(min=limit)
    _, size = torch.unique_consecutive(group, return_counts=True)
    end = size.cumsum(0)
    begin = end - size
    kind = runs.kind[begin].masked_fill(size > 1, PARTIAL)
    return RunList(runs.row[begin], runs.first[begin], runs.end[end - 1], kind)


def checked(offsets: Tensor, runs: Tensor, ints: list[int]) -> Outputs:
    """Check the runs of `BlockMask.from_runs`. Raises as it does."""
    q_length, kv_length, q_block, kv_block, has_mod, capacity = ints
    sizes = (q_length, kv_length), (q_block, kv_block)
    limit = None if capacity < 0 else capacity
    views = views_of_runs(offsets, runs, *sizes, bool(has_mod), limit)
    return _outputs(views, max(runs.shape[0], capacity), offsets.device)


def rows(structure: list[Tensor], ints: list[int]) -> Outputs:
    """Slice rows of elements. Raises as `BlockMask.row_slice` does."""
    offsets, runs, *mark = structure
    q_length, kv_length, q_block, kv_block, start, stop, new, decided = ints
    lengths, block_size = (q_length, kv_length), (q_block, kv_block)
    checked_rows(lengths, start, stop, new)
    found = find_marked(mark[0], offsets, lengths, block_size) if mark else None
    views = found or find(offsets, runs, lengths, block_size)
    if views is None:
        check_structure(offsets, runs, lengths, block_size)
        views = MaskViews(offsets, runs, *lengths, block_size)
    sliced = row_views(views.on(_CPU), start, stop, new, decided=bool(decided))
    batch, heads, _ = sliced.shape
    most = min(2 * runs.shape[0], batch * heads * sliced.q_blocks * sliced.kv_blocks)
    return _outputs(sliced, most, offsets.device)


def _outputs(views: MaskViews, most: int, device: torch.device) -> Outputs:
    """Return views on the host as an op's outputs, which the program may write to after their last
    use, with room for `most` runs and for two at least."""
    views, mark = marked(views)
    used = int(views.offsets[-1, -1, -1]) if views.offsets.numel() else 0
    runs = torch.zeros((max(2, most), 3), dtype=torch.int32, device=device)
    runs[:used].copy_(views.runs[:used])
    offsets = torch.empty(views.shape, dtype=torch.int32, device=device)
    return offsets.copy_(views.offsets), runs, mark
