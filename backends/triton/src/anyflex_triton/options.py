"""User options, ``kernel_options["cuda.triton"]``, and the sizes that kernels may have."""

from __future__ import annotations

from collections.abc import Mapping

from anyflex.plugin import Option

__all__ = ["OPTIONS", "STAGES", "TILES", "WARPS"]

TILES = (16, 32, 64, 128)
WARPS = (1, 2, 4, 8, 16, 32)
STAGES = (1, 2, 3, 4, 5)

OPTIONS: Mapping[str, Option] = {
    "block_m": Option(int, None, "query rows of a forward tile", TILES, "BLOCK_M"),
    "block_n": Option(int, None, "keys of a forward tile", TILES, "BLOCK_N"),
    "num_warps": Option(int, None, "warps of a forward program", WARPS, "num_warps"),
    "num_stages": Option(
        int,
        None,
        "tiles in flight of forward, at most: as many as shared memory holds",
        STAGES,
        "num_stages",
    ),
    "finer_mask": Option(
        bool,
        None,
        "decide a mask's PARTIAL blocks anew, tile by tile; left out: in large calls whose mask "
        "mod reads tensors",
    ),
    "dkv_block_m": Option(int, None, "query rows of a tile of dK and dV", TILES, "BLOCK_M1"),
    "dkv_block_n": Option(int, None, "keys of a tile of dK and dV", TILES, "BLOCK_N1"),
    "dq_block_m": Option(int, None, "query rows of a tile of dQ", TILES, "BLOCK_M2"),
    "dq_block_n": Option(int, None, "keys of a tile of dQ", TILES, "BLOCK_N2"),
    "backward_num_warps": Option(int, None, "warps of a backward program", WARPS),
    "backward_num_stages": Option(int, None, "tiles in flight of backward, at most", STAGES),
    "autotune": Option(
        bool, False, "time configurations at the first call of each size, keep the fastest"
    ),
}
