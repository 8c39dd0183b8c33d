"""Metal source of forward for a few query rows: keys are cut into splits, whose results are
combined.

Split-KV (Flash-Decoding, Dao et al., 2023). The query heads of a KV head are rows of one tile, so
that keys are read once for all of them.
"""

from __future__ import annotations

from anyflex.plugin import Spec
from anyflex_mps.arguments import place
from anyflex_mps.forward import (
    output_buffers,
    softmax_memory,
    softmax_over_runs,
    stored_element,
    stored_sums,
    whole_sum,
)
from anyflex_mps.mods import mods_source
from anyflex_mps.sequences import sequence_buffers, sequence_of_block
from anyflex_mps.text import (
    PLACE_OF_LANE,
    TYPES,
    Shader,
    fill,
    index_type,
    kernel_text,
    load_rows_text,
    mask_buffers,
    row_of_blocks,
)
from anyflex_mps.tiles import Tile, pitch_of, whole_fragments

__all__ = ["ROWS_A_GROUP", "combine_shader", "decode_shader"]

ROWS_A_GROUP = 4
"""Rows of a threadgroup that combines: a simdgroup takes one."""

_DECODE = """\
$memory
const int q_length = (int)$q_length;
const int splits = (int)$splits;
$place
const int split = (int)group.x % splits;
const int split_begin = split * (int)$split_length;
const int split_end = min(split_begin + (int)$split_length, $kv_length);
const int first_head = (int)group.y * $packed;
const int first_row = (int)group.x / splits * $rows;
const int end_row = $packed * $rows_of_head;
$nothing_to_do
$place_of_lane
const int row = first_row + (int)sg * 8 + r;
const int h = first_head + min(row, end_row - 1) / $rows_of_head;
$place_of_row
$row_of_blocks
for (int i = (int)tid; i < $rows * $width; i += $threads) {
  const int packed_row = first_row + i / $width;
  const int column = i % $width;
  $type x = ($type)0.0f;
  if (packed_row < end_row && column < $dim)
    x = query[
        b * $q_batch + (first_head + packed_row / $rows_of_head) * $q_head
        + ($index)($staged_row) * ($index)$q_row
        + ($index)column * ($index)$q_column];
  q_rows[i / $width * $pitch + column] = x;
}
$softmax
if (row < end_row) {
  const long at = (((long)b * $heads + h) * q_length + $query_row) * splits + split;
  for (int d = 0; d < $values; d++) {
    for (int i = 0; i < 2; i++) {
      const int column = d * 8 + c + i;
      if (column < $value_dim)
        partial_out[at * $value_dim + column] = acc[d].thread_elements()[i];
    }
  }
  if (c == 0) {
    partial_sums[at * 3] = dead ? -INFINITY : top;
    partial_sums[at * 3 + 1] = sum;
    partial_sums[at * 3 + 2] = nans != 0u ? 1.0f : 0.0f;
  }
}
"""
_PLACE = """\
const int b = (int)group.z;
const int block = 0;"""
_STAGED_ROW = "packed_row % q_length"
_PLACE_OF_ROW = "const int q_idx = min(row, end_row - 1) % q_length;"

_NOTHING_TO_DO = """\
if (owner == sequences || first_row >= end_row)
  return;"""
_STAGED_PACKED_ROW = "block_row + packed_row % row_count"
_PLACE_OF_PACKED_ROW = """\
const int own_row = min(row, end_row - 1) % row_count;
const int q_idx = q_start + own_row;"""


def decode_shader(spec: Spec, tile: Tile, packed: int) -> Shader:
    """Return the kernel of a split; its grid is (splits x tiles of rows, heads / packed, batch).
    Of packed sequences the last is `PackedRows.blocks`, each of which is a whole sequence.

    Its buffers are query, key, value; `sequence_buffers`; offsets and runs with a mask;
    partial_out [B, Hq, L, splits, Ev], relative to each split's own largest score; partial_sums
    [B, Hq, L, splits, 3]: the largest score, the sum relative to it, and 1 if a score is NaN.

    Args:
        tile: of ``tile_for("decode", ...)``.
        packed: query heads that are rows of a tile.
    """
    assert tile.stages_rows, "packed rows lie in several heads: they are staged here"
    type_, e, ev = TYPES[spec.dtype], spec.head_dim, spec.value_head_dim
    sequences = spec.q_layout == "packed"
    place_of_sequence = "const int row_count = block_end - block_row;"
    body = fill(
        _DECODE,
        type=type_,
        index=index_type(spec),
        memory=softmax_memory(spec, tile),
        q_length=place("q_length"),
        place=sequence_of_block(spec) + place_of_sequence if sequences else _PLACE,
        kv_length="kv_length" if sequences else f"(int){place('kv_length')}",
        rows_of_head="row_count" if sequences else "q_length",
        nothing_to_do=_NOTHING_TO_DO if sequences else "",
        place_of_row=_PLACE_OF_PACKED_ROW if sequences else _PLACE_OF_ROW,
        staged_row=_STAGED_PACKED_ROW if sequences else _STAGED_ROW,
        query_row="block_row + own_row" if sequences else "q_idx",
        heads=place("heads"),
        splits=place("splits"),
        split_length=place("split_length"),
        packed=packed,
        rows=tile.rows,
        threads=tile.threads,
        width=whole_fragments(e),
        pitch=pitch_of(e, spec.dtype.itemsize),
        dim=e,
        value_dim=ev,
        values=whole_fragments(ev) // 8,
        q_batch=place("query", "batch"),
        q_head=place("query", "head"),
        q_row=place("query", "row"),
        q_column=place("query", "column"),
        place_of_lane=PLACE_OF_LANE,
        row_of_blocks=row_of_blocks(spec),
        softmax=softmax_over_runs(spec, tile, "split_begin", "split_end"),
    )
    buffers = [f"device const {type_}* {name}" for name in ("query", "key", "value")]
    buffers += [*sequence_buffers(spec), *mask_buffers(spec)]
    buffers += ["device float* partial_out", "device float* partial_sums"]
    functions = mods_source(spec, body) + load_rows_text(spec, body, tile.threads)
    return kernel_text("decode", spec, buffers, functions, body, tile.threads)


_COMBINE = """\
const int b = (int)group.z;
const int h = (int)group.y;
const int row = (int)group.x * $rows + (int)sg;
const int q_length = (int)$q_length;
if (row >= q_length)
  return;
const int splits = $splits;
const long at = ((long)b * $heads + h) * q_length + row;
device const float* sums = partial_sums + at * splits * 3;
float top = -INFINITY;
uint nans = 0u;
for (int i = 0; i < splits; i++) {
  top = max(top, sums[3 * i]);
  nans |= sums[3 * i + 2] != 0.0f ? 1u : 0u;
}
const float base = top == -INFINITY ? 0.0f : top;
float sum = 0.0f;
for (int i = 0; i < splits; i++)
  sum += sums[3 * i + 1] * fast::exp2((sums[3 * i] - base) * 1.44269504f);
const bool dead = sum == 0.0f && top == -INFINITY;
const float over = dead ? 0.0f : 1.0f / $whole;
device $type* out_row = out + b * $batch + h * $head + ($index)row * ($index)$row;
for (int column = (int)lane; column < $dim; column += 32) {
  float x = 0.0f;
  for (int i = 0; i < splits; i++) {
    const float part = partial_out[(at * splits + i) * $dim + column];
    const float factor = fast::exp2((sums[3 * i] - base) * 1.44269504f);
    // A weight may vanish; what isn't finite stays so.
    x += isfinite(part) ? part * factor : part;
  }
  x *= over;
  $stored
}
if (lane == 0) {
  $stored_sums
}
"""


def combine_shader(spec: Spec) -> Shader:
    """Return the kernel that combines the splits of each row; its grid is (rows / `ROWS_A_GROUP`,
    query heads, batch). Its buffers are partial_out, partial_sums, q_offsets of packed sequences,
    and `output_buffers`."""
    splits, buffers = f"(int){place('splits')}", []
    if spec.q_layout == "packed":
        # Padding rows have none.
        splits = f"row < q_offsets[(int){place('sequences')}] ? {splits} : 0"
        buffers = ["device const int* q_offsets"]
    body = fill(
        _COMBINE,
        type=TYPES[spec.dtype],
        index=index_type(spec),
        rows=ROWS_A_GROUP,
        q_length=place("q_length"),
        splits=splits,
        heads=place("heads"),
        batch=place("out", "batch"),
        head=place("out", "head"),
        row=place("out", "row"),
        dim=spec.value_head_dim,
        whole=whole_sum(spec),
        stored=stored_element(spec),
        stored_sums=stored_sums(spec),
    )
    partial = ["device const float* partial_out", "device const float* partial_sums"]
    buffers = [*partial, *buffers, *output_buffers(spec)]
    return kernel_text("combine", spec, buffers, "", body, 32 * ROWS_A_GROUP)
