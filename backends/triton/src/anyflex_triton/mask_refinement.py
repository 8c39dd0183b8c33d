"""Block mask runs as kernels read them: the mask's own, or those of finer blocks.

PARTIAL blocks of 128 x 128 can have dead tiles of 64 x 64, and tiles without a dead pair. Two
kernels that run before attention's classify them tile by tile, once for all heads, so that dead
tiles are skipped and whole ones need no mask. The option `finer_mask` says when.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from anyflex.plugin import Call, MaskViews, TensorSpec
from anyflex_triton import mask_refinement_kernels
from anyflex_triton.kernel_signatures import MaskRows, Programs
from anyflex_triton.launch import FixedLaunch, Launch
from anyflex_triton.program import Options

__all__ = ["Tiled", "finer_specs", "mask_rows", "rows_for", "with_rows"]

_MOST_BYTES = 64 << 20
"""Maximum bytes of finer runs: space for one run per tile, which no mask uses up."""
_LEAST_PAIRS = 1 << 28
"""Minimum number of query-key pairs in all heads: smaller calls take less time than the two
kernels would add."""
_MOST_RUNS = 16
"""Maximum average number of runs per row: each program that classifies a part of a row reads all
of them."""
_KINDS_CHUNK = 8
"""Number of tiles of a row that one program classifies, one after the other."""
_RUNS_CHUNK = 256

Tiled = Literal["forward", "keys", "queries"]
"""Kernels whose blocks may be finer."""


def mask_rows(views: MaskViews) -> MaskRows:
    """Return the mask's own rows."""
    if views.offsets.is_contiguous():
        return views.once("anyflex_triton.rows", MaskRows, partial(_own_rows, views))
    # A copy is made for each call, because offsets may be overwritten in place.
    return _own_rows(views)


def _own_rows(views: MaskViews) -> MaskRows:
    offsets = views.offsets.contiguous()
    batch, heads, edges = offsets.shape
    strides = (heads * edges if batch > 1 else 0, edges if heads > 1 else 0)
    return MaskRows(offsets, offsets[..., 1:], views.runs, strides, views.block_size)


def with_rows(values: dict[str, Any], rows: MaskRows | None) -> dict[str, Any]:
    """Return a kernel's values with other rows of a mask; unchanged where there is none."""
    return values if rows is None else {**values, **rows.values()}


def finer_specs(made: Programs, call: Call, kernel: Tiled) -> tuple[TensorSpec, ...]:
    """Return the workspace of finer runs; it is empty where the mask's own runs are used."""
    if not made.is_finer or call.mask is None or call.mask.shape[:2] != (1, 1):
        return ()
    batch, heads, length = call.query.shape[:3]
    if "finer_mask" not in made.overrides and (
        batch * heads * length * call.key.shape[2] < _LEAST_PAIRS
        or call.mask.runs.shape[0] > _MOST_RUNS * call.mask.shape[2]
    ):
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
        -(-length // config.block_m),
        -(-call.key.shape[2] // config.block_n),
    )
    if kernel == "keys":
        tiles, columns = columns, tiles
    if tiles * columns * 12 > _MOST_BYTES:
        return ()
    return (
        TensorSpec((2, tiles), torch.int32),
        TensorSpec((tiles, columns, 3), torch.int32),
        TensorSpec((tiles, columns), torch.int8),
    )


def _finer(
    made: Programs, call: Call, kernel: Tiled, workspace: Sequence[Tensor]
) -> tuple[MaskRows, list[Launch]]:
    """Return the runs of blocks that have the size of a kernel's tiles, and the launches that
    compute them.

    Args:
        workspace: tensors of `finer_specs`.
    """
    assert call.mask is not None
    edges, runs, kinds = workspace
    config = made.config(kernel)
    transposed = kernel == "keys"
    tile = (config.block_m, config.block_n)
    lengths = (call.query.shape[2], call.key.shape[2])
    views = call.mask
    if transposed:
        tile, lengths, views = tile[::-1], lengths[::-1], views.transposed()
    mods = made.mods(call, False)
    rows = mask_rows(views)
    values = made.common_values(call, rows)
    tiles, columns = kinds.shape
    chunks = -(-columns // _KINDS_CHUNK)
    sizes = {
        "length": lengths[0], "column_length": lengths[1], "tiles": tiles, "columns": columns,
        "chunks": chunks,
    }  # fmt: skip
    constants = {
        "MASK_MOD": mods.mask_mod,
        "TRANSPOSED": transposed,
        "ROW_BLOCK": views.block_size[0],
        "COLUMN_BLOCK": views.block_size[1],
        "ROWS": tile[0],
        "COLUMNS": tile[1],
        "CHUNK": _KINDS_CHUNK,
    }

    def make() -> tuple[FixedLaunch, FixedLaunch]:
        # A larger tile spills with fewer warps.
        options = Options(4 if tile[0] * tile[1] <= 64 * 64 else 8, 1)
        kinds_kernel = mask_refinement_kernels.kinds_kernel
        runs_kernel, of_runs = mask_refinement_kernels.runs_kernel, {"CHUNK": _RUNS_CHUNK}
        return (
            made.fixed_launch(kinds_kernel, tiles * chunks, constants, options, sizes),
            made.fixed_launch(runs_kernel, tiles, of_runs, Options(4, 1), sizes),
        )

    values.update(kinds=kinds, new_edges=edges, new_runs=runs)
    parts = made.kept(call, ("anyflex_triton.finer", kernel, mods.key), make)
    launches = [part.launch(values) for part in parts]
    return MaskRows(edges[0], edges[1], runs, (0, 0), tile), launches


def rows_for(
    made: Programs, call: Call, kernel: Tiled, workspace: Sequence[Tensor]
) -> tuple[MaskRows | None, list[Launch]]:
    """Return the mask's rows that a kernel reads, and the launches that must run before it.

    Args:
        workspace: tensors of `finer_specs`, or nothing.
    """
    if call.mask is None:
        return None, []
    if workspace:
        return _finer(made, call, kernel, workspace)
    return mask_rows(call.mask.transposed() if kernel == "keys" else call.mask), []
