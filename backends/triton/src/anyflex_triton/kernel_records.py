"""Records that several kernels use: rows of a head, the mods, what mods see, values of rows."""

from __future__ import annotations

from typing import Any

from anyflex_triton.records import record

__all__ = [
    "DeltaSources",
    "HeadRows",
    "ModGradients",
    "ModInputs",
    "Mods",
    "RowResults",
    "RowValues",
]


@record
class HeadRows:
    """Rows of a tensor [B, H, rows, columns] in one head, which are loaded tile by tile.

    Attributes:
        tensor, base, strides, DESCRIBED: arguments of `tiles.load_tile`.
        DIM: columns of a row. D: columns of a part (`column_parts`).
        UNIT: elements that a stride counts.
        SCATTERED: the last stride isn't 1. WIDE: offsets are 64-bit.
        PRECISION: input precision of products with these rows.
    """

    tensor: Any
    base: Any
    strides: Any
    DIM: Any
    D: Any
    UNIT: Any
    SCATTERED: Any
    WIDE: Any
    DESCRIBED: Any
    PRECISION: Any


@record
class Mods:
    """The mods of a call, and the arguments of theirs that are the same for all of its pairs.

    Attributes:
        ints, floats: numbers that the mods capture.
        shifts: added to b, h, q_idx and kv_idx before a mod sees them.
        scale: factor of raw products before a score mod; without one it is folded into exp2.
        READ: reads what a step's own rows or keys alone decide; SCORE_MOD and MASK_MOD are those
            of what was read. None: nothing is read early.
        SCORE_MOD, MASK_MOD: functions, or None.
    """

    ints: Any
    floats: Any
    shifts: Any
    scale: Any
    READ: Any
    SCORE_MOD: Any
    MASK_MOD: Any


@record
class ModGradients:
    """Derivatives of the score mod.

    Attributes:
        totals: accumulators of the captured tensors that learn, added to atomically.
        SCORE_MOD_BACKWARD, CAPTURED_GRADIENTS: functions, or None.
    """

    totals: Any
    SCORE_MOD_BACKWARD: Any
    CAPTURED_GRADIENTS: Any


@record
class ModInputs:
    """Indices of a tile as mods see them, and tensors that the mods capture.

    Attributes:
        q_idx, kv_idx: they broadcast to the tile; None for the side that the loop steps over.
        tables: the captured tensors, or what was read of them early.
    """

    b: Any
    h: Any
    q_idx: Any
    kv_idx: Any
    tables: Any


@record
class RowValues:
    """What backward makes weights and score gradients of, for each query row: see
    `backward.row_kernel`.

    Attributes:
        row_max, size: read in careful steps alone.
    """

    lse2: Any
    delta: Any
    row_max: Any
    size: Any


@record
class DeltaSources:
    """What `backward.delta_of_rows` reads: arguments of `backward.row_kernel`."""

    out: Any
    rest: Any
    dout: Any
    dlse: Any
    given: Any
    o_strides: Any
    r_strides: Any
    do_strides: Any
    dl_strides: Any
    VALUE_DIM: Any
    DV: Any
    UNITS: Any
    SCATTERED: Any
    WIDE: Any
    HAS_DLSE: Any
    IS_GIVEN: Any
    HAS_REST: Any


@record
class RowResults:
    """Where rows' results beside out go.

    Attributes:
        tops, lse, max_scores: arguments of `forward.forward_kernel`.
        WANT_TOPS, WANT_LSE, WANT_MAX: which of them are wanted.
        SCORED: there is a score mod.
    """

    tops: Any
    lse: Any
    max_scores: Any
    SCORED: Any
    WANT_LSE: Any
    WANT_MAX: Any
    WANT_TOPS: Any
