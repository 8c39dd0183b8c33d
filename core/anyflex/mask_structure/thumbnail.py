"""Thumbnail of a block mask: numbers of FULL and PARTIAL blocks in each cell of a coarse grid.

Computed from the runs alone: time and memory grow with runs and cells, not with blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.mask_structure.device_views import MaskViews
from anyflex.mask_structure.runs import FULL, PARTIAL, unpack_rows

__all__ = ["coarse_grid"]


def coarse_grid(
    views: MaskViews, batch: int, head: int, row_step: int, column_step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cells of ``row_step x column_step`` blocks of one batch entry and head: counts of
    their FULL blocks, of their PARTIAL ones and of all, int64 [rows, columns] on the CPU. The last
    cells may be smaller."""
    host = views.on(torch.device("cpu"))
    rows, columns = host.q_blocks, host.kv_blocks
    runs = unpack_rows(host.offsets[batch, head], host.runs)
    lines = -(-rows // row_step)
    # One column more than there are, because a run may end behind the last.
    width = columns // column_step + 1
    line = runs.row // row_step * width
    counts = []
    for kind in (FULL, PARTIAL):
        chosen = (runs.kind == kind).nonzero().squeeze(1)
        # A run covers the cells before its end minus those before its first block. Up to an edge
        # at x, x // step cells are whole and x % step blocks are in the next one.
        whole = torch.zeros(lines * width, dtype=torch.int64, device="cpu")
        rest = torch.zeros_like(whole)
        for edge, sign in ((runs.end, 1), (runs.first, -1)):
            place, inside = line[chosen], edge[chosen]
            cell = place + inside // column_step
            one = torch.full_like(place, sign)
            whole.index_add_(0, cell, one)
            rest.index_add_(0, cell, one * (inside % column_step))
        # Edges in later cells have this cell before them.
        later = whole.view(lines, width).flip(1).cumsum(1).flip(1) - whole.view(lines, width)
        cells = later * column_step + rest.view(lines, width)
        counts.append(cells[:, : -(-columns // column_step)])
    heights, widths = (
        (length - torch.arange(0, length, step, device="cpu")).clamp(max=step)
        for length, step in ((rows, row_step), (columns, column_step))
    )
    return counts[0], counts[1], heights[:, None] * widths
