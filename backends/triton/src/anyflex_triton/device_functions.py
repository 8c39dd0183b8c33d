"""Device side of the interface for other backends' kernels: functions of Triton and constants.

They are Triton's, not Gluon's; a kernel in Gluon may call them, and elementwise ones keep a
tensor's layout. Each is documented where it is defined. `operations` has the functions that the
text of mods calls.
"""

from __future__ import annotations

from anyflex_triton import operations
from anyflex_triton.backward import store_row_values
from anyflex_triton.backward_keys import HeadRowValues, add_to_keys
from anyflex_triton.backward_queries import add_to_queries
from anyflex_triton.column_parts import load_pointed_rows, store_parts, zeros_of_parts
from anyflex_triton.forward import tile_of_program, unit_of_scores
from anyflex_triton.kernel_records import (
    DeltaSources,
    HeadRows,
    ModGradients,
    ModInputs,
    Mods,
    Pages,
    RowLayouts,
    RowResults,
    RowValues,
)
from anyflex_triton.records import record
from anyflex_triton.sequences import (
    SequenceTile,
    line_of_sequence,
    pages_of_line,
    pages_of_sequence,
    sequence_of_tile,
)
from anyflex_triton.tiles import (
    FAR,
    FULL,
    LOG2E,
    bounded_run,
    is_far,
    mask_row,
    masked_scores,
    natural_scores,
    nonfinite,
    nonfinite_counts,
    rows_by_pointers,
    store_row,
    store_rows,
    sum_of_counts,
    tensor_at,
    with_sink,
)

__all__ = [
    "FAR",
    "FULL",
    "LOG2E",
    "DeltaSources",
    "HeadRowValues",
    "HeadRows",
    "ModGradients",
    "ModInputs",
    "Mods",
    "Pages",
    "RowLayouts",
    "RowResults",
    "RowValues",
    "SequenceTile",
    "add_to_keys",
    "add_to_queries",
    "bounded_run",
    "is_far",
    "line_of_sequence",
    "load_pointed_rows",
    "mask_row",
    "masked_scores",
    "natural_scores",
    "nonfinite",
    "nonfinite_counts",
    "operations",
    "pages_of_line",
    "pages_of_sequence",
    "record",
    "rows_by_pointers",
    "sequence_of_tile",
    "store_parts",
    "store_row",
    "store_row_values",
    "store_rows",
    "sum_of_counts",
    "tensor_at",
    "tile_of_program",
    "unit_of_scores",
    "with_sink",
    "zeros_of_parts",
]
