"""Faults to seed into the kernels of packed sequences: see `kernel_faults`."""

from __future__ import annotations

__all__ = ["PACKED_TABLE"]

PACKED_TABLE: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    ("forward", "packed"): {
        "batch entry for the slot": ("score_mod(raw, slot +", "score_mod(raw, b +"),
        "position from the block on": (
            "(min(row, end_row - 1) - sequence_row)",
            "(min(row, end_row - 1) - block_row)",
        ),
        "first position forgotten": ("q_start + (min(row,", "(min(row,"),
        "block past its sequence": ("min(block_row + 128, next_row)", "block_row + 128"),
        "rows of another block": ("0) * 128", "0) * 96"),
        "tiles that overlap": ("(int)group.x * 32;", "(int)group.x * 24;"),
        "keys of the first sequence": ("key_head += (long)first_key_row * P[key.row];", ""),
        "rows of values by the keys' stride": (
            "value_head += (long)first_key_row * P[value.row];",
            "value_head += (long)first_key_row * P[key.row];",
        ),
        "keys of another sequence": ("min(kv_lengths[sequence],", "min(kv_lengths[0],"),
        "first position of another sequence": ("q_starts[sequence]", "q_starts[0]"),
        "block taken for its sequence": ("sequence = min(max(owner,", "sequence = min(max(block,"),
    },
    ("forward", "paged"): {
        "number of a sequence for its slot": (
            "table_rows[sequence] : sequence",
            "sequence : sequence",
        ),
        "rows of the table by its height": (
            "(long)table_row * P[table_stride]",
            "(long)table_row * P[table_height]",
        ),
        "row within a page": ("(int)(row % 16)", "(int)(row / 16)"),
        "page of another key": ("pages[row / 16]", "pages[row / 24]"),
        "strides of pages": (
            "k_rows, key_head, pages, last_page, P[key.batch]",
            "k_rows, key_head, pages, last_page, P[value.batch]",
        ),
        "last page left out": ("last_page = (int)P[pages] - 1;", "last_page = (int)P[pages] - 2;"),
        "keys of padding rows": ("keys = owner == sequences ? 0 :", "keys ="),
    },
    ("forward", "paged beyond finite numbers"): {
        "non-finite values of another page": (
            "value_head, pages, last_page, P[value.batch], (int)P[value.row], at)",
            "value_head, pages, last_page, P[value.batch], (int)P[value.row], j)",
        ),
    },
    ("decode", "packed decoding"): {
        "head of a row's mods": ("end_row - 1) / row_count", "end_row - 1) / (row_count + 1)"),
        "query rows of the first sequence": (
            "block_row + packed_row % row_count",
            "packed_row % row_count",
        ),
        "one place for all sequences": ("block_row + own_row", "own_row"),
        "first position forgotten": ("q_start + own_row", "own_row"),
        "split past the last key": (
            "min(split_begin + (int)P[split_length], kv_length)",
            "split_begin + (int)P[split_length]",
        ),
        "rows of the longest sequence": (
            "row_count = block_end - block_row",
            "row_count = (int)P[most_rows]",
        ),
    },
    ("decode", "paged decoding"): {
        "number of a sequence for its slot": (
            "table_rows[sequence] : sequence",
            "sequence : sequence",
        ),
    },
    ("combine", "packed decoding"): {
        "splits of padding rows": ("row < q_offsets[(int)P[sequences]] ?", "row < q_length ?"),
        "first padding row": ("row < q_offsets[", "row <= q_offsets["),
    },
}
"""As `kernel_faults`' table."""
