"""Metal text of packed sequences: whose rows and keys a threadgroup has, and keys in pages.

Numbers on a device may break the bounds that the host knows: none leads outside of a tensor.
"""

from __future__ import annotations

from anyflex.plugin import Spec
from anyflex_mps.arguments import place
from anyflex_mps.text import fill

__all__ = ["BLOCK", "keys_of_sequence", "sequence_buffers", "sequence_of_block"]

BLOCK = 128
"""Query rows of an entry of `PackedRows.blocks`."""


def sequence_buffers(spec: Spec) -> list[str]:
    """Return the declarations of what says whose rows are whose; none of a dense call."""
    if spec.q_layout == "dense":
        return []
    keys = ("page_table", "table_rows") if spec.page_size else ("kv_offsets",)
    names = ("blocks", "q_offsets", "q_starts", "kv_lengths", "slots", *keys)
    return [f"device const int* {name}" for name in names]


_SEQUENCE = """\
const int b = 0;
const int block = (int)group.z + (int)$first_group;
const int sequences = (int)$sequences;
const int owner = blocks[block * 2];
const int sequence = min(max(owner, 0), sequences - 1);
const int sequence_row = min(max(q_offsets[max(owner, 0)], 0), q_length);
const int next_row =
    owner == sequences ? q_length : min(max(q_offsets[sequence + 1], 0), q_length);
const int block_row = sequence_row + max(blocks[block * 2 + 1], 0) * $block;
const int block_end = owner < 0 ? 0 : min(block_row + $block, next_row);
const int slot = slots[sequence];
const int q_start = q_starts[sequence];
const int keys = owner == sequences ? 0 : max(min(kv_lengths[sequence], (int)$most_keys), 0);
$place_of_keys
"""
_PACKED_KEYS = """\
const int key_rows = (int)$key_rows;
const int first_key_row = min(max(kv_offsets[sequence], 0), key_rows);
const int kv_length = min(keys, key_rows - first_key_row);"""
_PAGES = """\
const int kv_length = keys;
const int named_row = $table_named != 0 ? table_rows[sequence] : sequence;
const int table_row = min(max(named_row, 0), (int)$table_height - 1);
device const int* pages = page_table + (long)table_row * $table_stride;
const int last_page = (int)$pages - 1;"""


def sequence_of_block(spec: Spec) -> str:
    """Return statements that name what row ``block`` of `PackedRows.blocks` has, which is the
    threadgroup's third place in the grid of all parts of a launch.

    They are ``owner``, which is ``sequences`` for padding rows; the sequence's first row,
    ``sequence_row``, and those of the block, ``block_row`` to ``block_end``, which is 0 where the
    bounds leave the block over; ``slot`` and ``q_start``, as mods see them; ``kv_length``, 0 for
    padding rows; ``first_key_row``, or ``pages`` and ``last_page``; and ``b``, the query's only
    batch entry.
    """
    if spec.page_size:
        names = ("table_named", "table_height", "table_stride", "pages")
        place_of_keys = fill(_PAGES, **{name: place(name) for name in names})
    else:
        place_of_keys = fill(_PACKED_KEYS, key_rows=place("kv_length"))
    return fill(
        _SEQUENCE,
        block=BLOCK,
        first_group=place("first_group"),
        sequences=place("sequences"),
        most_keys=place("most_keys"),
        place_of_keys=place_of_keys,
    )


def keys_of_sequence(spec: Spec) -> str:
    """Return statements that move ``key_head`` and ``value_head`` to a sequence's first key. Pages
    are found key by key."""
    if spec.q_layout == "dense" or spec.page_size:
        return ""
    return "\n".join(
        f"{name}_head += (long)first_key_row * {place(name, 'row')};" for name in ("key", "value")
    )
