"""Drawing a block mask with characters."""

from __future__ import annotations

import itertools

from anyflex.block_mask.views import MaskViews

__all__ = ["draw"]


def draw(views: MaskViews, grid_size: int | tuple[int, int], limit: int) -> str:
    """Return the drawing that `BlockMask.to_string` describes."""
    rows, columns = views.q_blocks, views.kv_blocks
    most = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
    row_step, column_step = (
        1 if cells < 0 else max(1, -(-count // max(cells, 1)))
        for count, cells in zip((rows, columns), most, strict=True)
    )
    batch, heads, _ = views.offsets.shape
    drawn = [f"({b}, {h})\n" for b, h in itertools.product(range(batch), range(heads))][:limit]
    for begin in range(0, rows, row_step):
        band = views.kind_rows(begin, min(begin + row_step, rows)).cpu() != 0
        for grid in range(len(drawn)):
            cells = band[grid // heads, grid % heads]
            line = ""
            for column in range(0, columns, column_step):
                share = float(cells[:, column : column + column_step].float().mean())
                line += ("█" if share == 1 else " " if share == 0 else "░") * 2
            drawn[grid] += line + "\n"
    if batch * heads > limit:
        drawn += [
            "...",
            "To print out more, set BlockMask.to_string(limit=N)",
            "You can also index (BlockMask[batch, head]) to choose a specific batch or head",
        ]
    return "\n".join(drawn)
