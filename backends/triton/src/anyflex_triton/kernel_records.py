"""Records that several kernels use: rows of a head, mods and their inputs, row values."""

from __future__ import annotations

from typing import Any

from anyflex_triton.records import record

__all__ = [
    "DeltaSources",
    "HeadRows",
    "ModGradients",
    "ModInputs",
    "Mods",
    "Pages",
    "RowLayouts",
    "RowResults",
    "RowValues",
    "Scales",
]


@record
class RowLayouts:
    """Layouts of a kernel's tensors [B, H, rows, columns]: constants that `kernel_arguments`
    describes."""

    UNITS: Any
    SCATTERED: Any
    WIDE: Any
    PRECISION: Any


@record
class HeadRows:
    """Rows of a tensor [B, H, rows, columns] in one head, which are loaded tile by tile.

    Attributes:
        tensor: where DESCRIBED, a descriptor: "host", of all rows of all heads, which TMA loads
            without registers; "kernel", of this head's alone.
        base: result of `tiles.head_at`. strides: in units of UNIT elements.
        DIM: columns of a row. D: columns of a part (`column_parts`).
        UNIT: elements that a stride counts.
        SCATTERED: the last stride isn't 1. WIDE: offsets are 64-bit.
        PRECISION: input precision of products with these rows.
        pages: `Pages` where the rows are keys of one sequence that lie in pages; then the first
            stride is a page's.
        scales: `Scales` where the rows are stored in 8 bits.
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
    pages: Any = None
    scales: Any = None


@record
class Pages:
    """Pages of one sequence.

    Attributes:
        table: pointer to their numbers in the pool, int32. last: number of the pool's last page.
        SIZE: rows of a page.
    """

    table: Any
    last: Any
    SIZE: Any


@record
class Scales:
    """Scales of the rows of one head, which stored numbers are multiplied by.

    Attributes:
        base: pointer to the first row's, float32. page, row: strides in elements.
    """

    base: Any
    page: Any
    row: Any


@record
class Mods:
    """Mods of a call, and those of their arguments that are the same for all of its pairs.

    Attributes:
        ints, floats: numbers that the mods capture.
        shifts: added to b, h, q_idx and kv_idx before a mod sees them.
        scale: factor of raw products before a score mod; without one it is folded into exp2.
        READ: reads elements that a step's rows or keys alone decide; SCORE_MOD and MASK_MOD then
            take the values. None: nothing is read early.
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
        totals: accumulators of the captured tensors that need gradients, added to atomically.
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
        tables: the captured tensors, or the values that were read from them early.
        dropout: `Dropout` of the tile's rows, or with the seed where the loop steps over rows; or
            None.
        first_q, read: arguments of functions of `anyflex_triton.pair_reads`, for kernels that call
            them.
    """

    b: Any
    h: Any
    q_idx: Any
    kv_idx: Any
    tables: Any
    dropout: Any = None
    first_q: Any = None
    read: Any = None


@record
class RowValues:
    """Row values, from which backward computes weights and score gradients: see
    `backward.row_kernel`.

    Attributes:
        row_max, size: only careful steps read them.
    """

    lse2: Any
    delta: Any
    row_max: Any
    size: Any


@record
class DeltaSources:
    """Sources of `backward.delta_of_rows`: arguments of `backward.row_kernel`."""

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
    """Destinations of the row results beside out.

    Attributes:
        tops, lse, max_scores: arguments of `forward.forward_kernel`.
        WANT_TOPS, WANT_LSE, WANT_MAX: which of them are wanted.
        SCORED: there is a score mod.
        sinks: argument of `forward.forward_kernel`.
    """

    tops: Any
    lse: Any
    max_scores: Any
    SCORED: Any
    WANT_LSE: Any
    WANT_MAX: Any
    WANT_TOPS: Any
    sinks: Any = None
