"""A block mask's runs as kernels read them: its own, or those of finer blocks.

Blocks of 128 x 128 that are PARTIAL hold tiles of 64 x 64 that are dead, and others without a dead
pair. With the option `finer_mask` a kernel before the attention's decides them tile by tile, once
for all heads, so that dead tiles cost nothing and whole ones no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from anyflex.plugin import Call, MaskViews, TensorSpec
from anyflex_triton import finer_runs
from anyflex_triton.launch import Launch, Options
from anyflex_triton.programs import MaskRows, Programs, int32s

__all__ = ["Tiled", "finer_specs", "mask_rows", "rows_for"]

_MOST_BYTES = 64 << 20
"""Of finer runs: room for a run of each tile, which no mask needs."""

Tiled = Literal["forward", "keys", "queries"]
"""Kernels whose blocks may be finer."""


def mask_rows(views: MaskViews) -> MaskRows:
    """The mask's own."""
    offsets = views.offsets.contiguous()
    batch, heads, edges = offsets.shape
    strides = (heads * edges if batch > 1 else 0, edges if heads > 1 else 0)
    return MaskRows(offsets, offsets[..., 1:], views.runs, strides, views.block_size)


def finer_specs(made: Programs, call: Call, kernel: Tiled) -> tuple[TensorSpec, ...]:
    """The workspace of finer runs: nothing where the mask stays as it is."""
    if not made.is_finer or call.mask is None or call.mask.offsets.shape[:2] != (1, 1):
        return ()
    config = made.config(kernel)
    q_block, kv_block = call.mask.block_size
    if (
        q_block % config.block_m
        or kv_block % config.block_n
        or (q_block, kv_block) == (config.block_m, config.block_n)
    ):
        return ()
    tiles, columns = (
        -(-call.query.shape[2] // config.block_m),
        -(-call.key.shape[2] // config.block_n),
    )
    if kernel == "keys":
        tiles, columns = columns, tiles
    if tiles * columns * 12 > _MOST_BYTES:
        return ()
    return (
        TensorSpec((2, tiles), torch.int32),
        TensorSpec((tiles, columns, 3), torch.int32),
    )


def _finer(
    made: Programs, call: Call, kernel: Tiled, workspace: Sequence[Tensor]
) -> tuple[MaskRows, Launch]:
    """The runs of blocks that are a kernel's tiles, and what makes them.

    Args:
        workspace: of `finer_specs`.
    """
    assert call.mask is not None
    edges, runs = workspace
    config = made.config(kernel)
    transposed = kernel == "keys"
    tile = (config.block_m, config.block_n)
    lengths = (call.query.shape[2], call.key.shape[2])
    views = call.mask
    if transposed:
        tile, lengths, views = tile[::-1], lengths[::-1], views.transposed()
    mods = made.mods(call, False)
    key = ("finer", transposed, tile, mods.key)
    program = made.existing.get(key)
    if program is None:
        types = made.common_types
        program = made.program(
            key,
            finer_runs.finer_kernel,
            {
                **{name: types[name] for name in ("tables", "ints", "floats", "shifts")},
                **dict.fromkeys(("offsets", "runs", "new_edges", "new_runs"), "*i32"),
                **int32s("length", "column_length", "tiles", "columns"),
            },
            {
                "MASK_MOD": mods.mask_mod,
                "TRANSPOSED": transposed,
                "ROW_BLOCK": views.block_size[0],
                "COLUMN_BLOCK": views.block_size[1],
                "ROWS": tile[0],
                "COLUMNS": tile[1],
            },
            (),
            Options(4, 1),
        )
    rows = mask_rows(views)
    values = made.common_values(call, rows)
    launch = Launch(
        program,
        edges.shape[1],
        {
            **{name: values[name] for name in ("tables", "ints", "floats", "shifts")},
            "offsets": rows.offsets, "runs": rows.runs,
            "new_edges": edges, "new_runs": runs,
            "length": lengths[0], "column_length": lengths[1],
            "tiles": edges.shape[1], "columns": runs.shape[1],
        },
    )  # fmt: skip
    return MaskRows(edges[0], edges[1], runs, (0, 0), tile), launch


def rows_for(
    made: Programs, call: Call, kernel: Tiled, workspace: Sequence[Tensor]
) -> tuple[MaskRows | None, list[Launch]]:
    """What a kernel reads of the mask, and what has to run before it.

    Args:
        workspace: of `finer_specs`, or nothing.
    """
    if call.mask is None:
        return None, []
    if workspace:
        rows, launch = _finer(made, call, kernel, workspace)
        return rows, [launch]
    return mask_rows(call.mask.transposed() if kernel == "keys" else call.mask), []
