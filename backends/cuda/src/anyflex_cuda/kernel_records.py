"""Records that several kernels use: the block mask, tensors by pointers, the mods of a loop."""

from __future__ import annotations

from typing import Any

from anyflex_triton.device_functions import record

__all__ = [
    "KeyRing",
    "LoadDescriptors",
    "MaskRuns",
    "PointedTensors",
    "StepMods",
    "TileSchedule",
]


@record
class KeyRing:
    """Keys and values of STAGES steps in shared memory, and the barriers of their slots.

    Attributes:
        k_full, v_full: barriers; a slot is loaded. k_empty, v_empty: nobody reads it any more.
        BLOCK_N: number of keys per step.
    """

    k_bufs: Any
    v_bufs: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    STAGES: Any
    BLOCK_N: Any


@record
class LoadDescriptors:
    """Descriptors of queries, keys and values; on Hopper each is a tuple of parts.

    Attributes:
        D, DV: number of columns of all parts.
        k_page_rows, v_page_rows: numbers of rows from a page to the next, where keys are in pages;
            else None.
    """

    q: Any
    k: Any
    v: Any
    D: Any
    DV: Any
    k_page_rows: Any = None
    v_page_rows: Any = None


@record
class MaskRuns:
    """Runs of a block mask; without HAS_MASK the first four are None.

    Attributes:
        offsets, ends: first run and end of each row. runs: all runs. strides: of offsets and ends,
            from one batch entry and one head to the next.
        Q_BLOCK, KV_BLOCK: sizes of blocks.
    """

    offsets: Any
    ends: Any
    runs: Any
    strides: Any
    HAS_MASK: Any
    Q_BLOCK: Any
    KV_BLOCK: Any


@record
class PointedTensors:
    """Tensors by pointers, with strides (b, h, row) in elements and contiguous columns.

    Attributes:
        GROUP: number of query heads per KV head. KV_SHARED: whether all batch entries have the
            same keys.
        DIM, VALUE_DIM: number of columns.
        WANT_REST: whether rest is written.
    """

    query: Any
    key: Any
    value: Any
    out: Any
    rest: Any
    q_strides: Any
    k_strides: Any
    v_strides: Any
    o_strides: Any
    r_strides: Any
    GROUP: Any
    KV_SHARED: Any
    DIM: Any
    VALUE_DIM: Any
    WANT_REST: Any


@record
class StepMods:
    """The mods as loops over steps call them: `anyflex_triton.kernel_records.Mods` with a mask mod
    that takes scores.

    Attributes:
        READ_COLUMNS, SCORE_MOD, MASK_SCORES: functions of `anyflex_triton.mods`, or None.
        READ_STEP: function of `anyflex_triton.pair_reads`, or None.
    """

    ints: Any
    floats: Any
    shifts: Any
    scale: Any
    READ_COLUMNS: Any
    SCORE_MOD: Any
    MASK_SCORES: Any
    READ_STEP: Any = None


@record
class TileSchedule:
    """Order in which programs take tiles, and numbers of heads: arguments of
    `hopper_forward.forward_kernel`. The last ones are used where queries are packed."""

    counter: Any
    tile_order: Any
    order_strides: Any
    ordered: Any
    batch_heads: Any
    heads: Any
    tiles: Any
    head_group: Any
    GROUP: Any
    KV_SHARED: Any
    DYNAMIC: Any
    sequences: Any = None
    tile_list: Any = None
    PAGE: Any = None
