"""Metal source of forward: a tile of query rows of one head walks along its runs of keys.

FlashAttention-2's online softmax (Dao, 2023) on simdgroup matrices. Weights are relative to the
row's largest score, and the difference is taken before it is scaled: scores may be huge.
"""

from __future__ import annotations

from anyflex.plugin import Spec
from anyflex_mps.arguments import place
from anyflex_mps.mods import mods_source
from anyflex_mps.sequences import (
    keys_of_sequence,
    sequence_buffers,
    sequence_of_block,
)
from anyflex_mps.text import (
    LANE_OF_COLUMN,
    PLACE_OF_LANE,
    TYPES,
    Shader,
    any_nonfinite,
    fill,
    head_of,
    index_type,
    kernel_text,
    load_rows_text,
    mask_buffers,
    mod_arguments,
    own_fragment,
    row_of_blocks,
    run_bounds,
    staged_rows,
    value_element,
    zeros,
)
from anyflex_mps.tiles import Tile, pitch_of, tile_for, whole_fragments

__all__ = [
    "GROUP_OF_GRID",
    "SUMS_OF_ROW",
    "forward_shader",
    "output_buffers",
    "place_of_tile",
    "softmax_memory",
    "softmax_over_runs",
    "stored_element",
    "stored_row",
    "stored_sums",
    "whole_sum",
]

_FORWARD = """\
$memory
const int q_length = (int)$q_length;
const int h = (int)group.y;
$place
if (first_row >= end_row)
  return;
$place_of_lane
const int row = first_row + (int)sg * 8 + r;
const int q_idx = $q_idx;
$query_head
$row_of_blocks
$load_queries
$softmax
if (row < end_row) {
  const long at = ((long)b * $heads + h) * q_length + row;
  $stored_row
  if (c == 0) {
    $stored_sums
  }
}
"""


def forward_shader(spec: Spec) -> Shader:
    """Return the kernel; a threadgroup is ``tile_for("forward", spec)``'s rows of a head. Its grid
    is (tiles, query heads, batch); with a mask, no tile crosses a block of rows. Of packed
    sequences it is (tiles of a block, query heads, `PackedRows.blocks`).

    Its buffers are query, key, value; `sequence_buffers`; offsets and runs with a mask;
    `output_buffers`.
    """
    tile, type_ = tile_for("forward", spec), TYPES[spec.dtype]
    load_queries = ""
    if tile.stages_rows:
        load_queries = staged_rows(spec, "q_rows", "query", "first_row", "end_row", tile.rows)
    body = fill(
        _FORWARD,
        memory=softmax_memory(spec, tile),
        q_length=place("q_length"),
        heads=place("heads"),
        place=_place(spec, tile),
        place_of_lane=PLACE_OF_LANE,
        q_idx=_Q_IDX if spec.q_layout == "packed" else _LAST_ROW,
        query_head=head_of(spec, "query", "b", "h"),
        row_of_blocks=row_of_blocks(spec),
        load_queries=load_queries,
        softmax=softmax_over_runs(spec, tile, "0", "kv_length"),
        stored_row=stored_row(spec),
        stored_sums=stored_sums(spec),
    )
    buffers = [f"device const {type_}* {name}" for name in ("query", "key", "value")]
    buffers += [*sequence_buffers(spec), *mask_buffers(spec), *output_buffers(spec)]
    functions = mods_source(spec, body) + load_rows_text(spec, body, tile.threads)
    return kernel_text("forward", spec, buffers, functions, body, tile.threads)


_LAST_ROW = "min(row, end_row - 1)"
_Q_IDX = f"q_start + ({_LAST_ROW} - sequence_row)"


def _place(spec: Spec, tile: Tile) -> str:
    """Return statements that name a tile's rows and keys."""
    if spec.q_layout == "packed":
        rows = f"block_row + (int)group.x * {tile.rows}"
        return (
            f"{sequence_of_block(spec)}const int first_row = {rows};\n"
            "const int end_row = block_end;"
        )
    return f"""\
const int kv_length = (int){place("kv_length")};
const int b = (int)group.z;
{place_of_tile(spec, spec.block_size[0], tile.rows, "q_length")}"""


GROUP_OF_GRID = f"(int)group.x + (int){place('first_group')}"
"""Text of a threadgroup's place in the grid of all parts of a launch."""


def place_of_tile(
    spec: Spec, block: int, rows: int, length: str, tile: str = GROUP_OF_GRID
) -> str:
    """Return statements that name a ``tile``, its rows, ``first_row`` and ``end_row``, and its
    ``block`` of the mask.

    Args:
        tile: text of its number.
    """
    if spec.mask_kind == "none":
        return f"""\
const int tile = {tile};
const int first_row = tile * {rows};
const int end_row = {length};"""
    tiles = -(-block // rows)
    return f"""\
const int tile = {tile};
const int block = tile / {tiles};
const int first_row = block * {block} + tile % {tiles} * {rows};
const int end_row = min((block + 1) * {block}, {length});"""


# The softmax

_SOFTMAX = """\
const long kv_batch = $kv_batch;
const long kv_head = h / $ratio;
$key_head
$value_head
$keys_of_sequence
$zeros
float top = -INFINITY;
float sum = 0.0f;
bool has_nan = false;
for (int pass = 0; pass < 2; pass++) {
  for (int run = first_run; run < last_run; run++) {
    $run_bounds
    for (int first_key = begin; first_key < end; first_key += $step) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      $load_keys
      $load_values
      threadgroup_barrier(mem_flags::mem_threadgroup);
      $no_scores
      for (int d = 0; d < $columns; d++) {
        $own_fragment
        for (int j = 0; j < $steps; j++) {
          simdgroup_matrix<$type, 8, 8> k;
          simdgroup_load(k, k_rows + j * 8 * $pitch + d * 8, $pitch, ulong2(0), true);
          simdgroup_multiply_accumulate(s[j], q, k, s[j]);
        }
      }
      float x[$elements];
      float high = top;
      for (int j = 0; j < $elements; j++) {
        const int at = first_key + j / 2 * 8 + c + j % 2;
        const int kv_idx = min(at, end - 1);
        const float raw = s[j / 2].thread_elements()[j % 2] * F[0];
        const float score = $score;
        const bool live = at < end && $live;
        x[j] = live ? score : -INFINITY;
        has_nan = has_nan || isnan(x[j]);
        high = max(high, x[j]);
      }
      high = max(high, simd_shuffle_xor(high, (ushort)1));
      high = max(high, simd_shuffle_xor(high, (ushort)8));
      const float base = high == -INFINITY ? 0.0f : high;
      const float factor = fast::exp2((top - base) * 1.44269504f);
      top = high;
      sum *= factor;
      simdgroup_matrix<$type, 8, 8> p[$steps];
      for (int j = 0; j < $elements; j++) {
        const float weight = fast::exp2((x[j] - base) * 1.44269504f);
        sum += weight;
        p[j / 2].thread_elements()[j % 2] = ($type)weight;
      }
      for (int d = 0; d < $values; d++) {
        acc[d].thread_elements()[0] *= factor;
        acc[d].thread_elements()[1] *= factor;
        for (int j = 0; j < $steps; j++) {
          simdgroup_matrix<$type, 8, 8> v;
          simdgroup_load(v, v_rows + j * 8 * $value_pitch + d * 8, $value_pitch);
          simdgroup_multiply_accumulate(acc[d], p[j], v, acc[d]);
        }
      }
      if (pass == 0)
        continue;
      for (int j = 0; j < $step; j++) {
        const float of_row = simd_shuffle(x[j / 8 * 2 + j % 2], $lane_of_column);
        const int at = first_key + j;
        for (int d = 0; d < $values; d++) {
          for (int i = 0; i < 2; i++) {
            const int column = d * 8 + c + i;
            float v = 0.0f;
            if (of_row != -INFINITY && at < end && column < $value_dim)
              v = (float)$value_element;
            acc[d].thread_elements()[i] += isfinite(v) ? 0.0f : v;
          }
        }
      }
    }
  }
  if (pass == 0) {
    $any_nonfinite
    if (!odd)
      break;
    sum = 0.0f;
    $zeros_again
  }
}
$sums_of_row
"""

SUMS_OF_ROW = """\
sum += simd_shuffle_xor(sum, (ushort)1);
sum += simd_shuffle_xor(sum, (ushort)8);
uint nans = has_nan ? 1u : 0u;
nans |= simd_shuffle_xor(nans, (ushort)1);
nans |= simd_shuffle_xor(nans, (ushort)8);
const bool dead = sum == 0.0f && top == -INFINITY;"""
"""Sums that the lanes of a row have of its columns, added up; whether it is dead."""


def softmax_memory(spec: Spec, tile: Tile) -> str:
    """Return the declarations of the threadgroup memory that `softmax_over_runs` takes."""
    type_, size = TYPES[spec.dtype], spec.dtype.itemsize
    pitch, value_pitch = pitch_of(spec.head_dim, size), pitch_of(spec.value_head_dim, size)
    own = f"threadgroup {type_} q_rows[{tile.rows * pitch}];\n" if tile.stages_rows else ""
    return f"""\
{own}threadgroup {type_} k_rows[{tile.step * pitch}];
threadgroup {type_} v_rows[{tile.step * value_pitch}];
threadgroup uint flags[{tile.simdgroups}];"""


def softmax_over_runs(spec: Spec, tile: Tile, first_key: str, end_key: str) -> str:
    """Return statements that compute ``acc``, ``sum``, ``top``, ``nans`` and ``dead`` of this
    lane's row from ``first_run`` to ``last_run``.

    A first pass is fast. Where it leaves something that isn't finite, a second one computes the
    same with zeros in place of values that aren't finite, and adds these to the rows that see
    them: in a product they would reach every row, because 0 * NaN is NaN.

    Args:
        first_key, end_key: text of the keys' bounds.
    """
    size, e, ev = spec.dtype.itemsize, spec.head_dim, spec.value_head_dim
    values, arguments = whole_fragments(ev) // 8, mod_arguments(spec)
    scored, masked = spec.score_graph is not None, spec.mask_graph is not None
    return fill(
        _SOFTMAX,
        type=TYPES[spec.dtype],
        kv_batch="0" if spec.kv_broadcast else "b",
        ratio=spec.gqa_ratio,
        key_head=head_of(spec, "key", "kv_batch", "kv_head"),
        value_head=head_of(spec, "value", "kv_batch", "kv_head"),
        keys_of_sequence=keys_of_sequence(spec),
        zeros=zeros("acc", values),
        zeros_again=zeros("acc", values, declared=False),
        sums_of_row=SUMS_OF_ROW,
        run_bounds=run_bounds(spec, spec.block_size[1], first_key, end_key),
        load_keys=staged_rows(spec, "k_rows", "key", "first_key", "end", tile.step),
        load_values=staged_rows(
            spec, "v_rows", "value", "first_key", "end", tile.step, finite_only="pass == 1"
        ),
        no_scores=zeros("s", tile.step // 8),
        own_fragment=own_fragment(spec, tile, "q", "query"),
        score=f"score_mod(raw, {arguments})" if scored else "raw",
        live=f"(full || mask_mod({arguments}))" if masked else "true",
        any_nonfinite=any_nonfinite({"acc": values}, tile.simdgroups),
        lane_of_column=LANE_OF_COLUMN,
        step=tile.step,
        steps=tile.step // 8,
        elements=tile.step // 4,
        columns=whole_fragments(e) // 8,
        values=values,
        value_dim=ev,
        pitch=pitch_of(e, size),
        value_pitch=pitch_of(ev, size),
        value_element=value_element(spec, "at", "column"),
    )


# Outputs


def output_buffers(spec: Spec) -> list[str]:
    """Return the declarations of the outputs that a spec wants: out; rest, of a 16-bit type, and
    tops where there is a backward; lse; max_scores; and of the sinks, which out and tops have."""
    type_ = TYPES[spec.dtype]
    buffers = [f"device {type_}* out"]
    if spec.needs_backward:
        buffers += [f"device {type_}* rest"] if type_ != "float" else []
        buffers.append("device float* tops")
    buffers += ["device float* lse"] if spec.needs_lse else []
    buffers += ["device float* max_scores"] if "max_scores" in spec.aux else []
    buffers += ["device const float* sinks"] if spec.sinks else []
    return buffers


def whole_sum(spec: Spec) -> str:
    """Return the text of a live row's sum of weights, with its sink's."""
    if not spec.sinks:
        return "sum"
    return "(sum + precise::exp2((sinks[h] - top) * 1.44269504f))"


_STORED_ROW = """\
device $type* out_row = out + b * $batch + h * $head + ($index)row * ($index)$row;
const float over = dead ? 0.0f : 1.0f / $whole;
for (int d = 0; d < $values; d++) {
  for (int i = 0; i < 2; i++) {
    const int column = d * 8 + c + i;
    if (column >= $dim)
      continue;
    const float x = acc[d].thread_elements()[i] * over;
    $stored
  }
}"""


def stored_row(spec: Spec) -> str:
    """Return statements that store this lane's elements of a row of out, and of rest."""
    return fill(
        _STORED_ROW,
        type=TYPES[spec.dtype],
        index=index_type(spec),
        batch=place("out", "batch"),
        head=place("out", "head"),
        row=place("out", "row"),
        values=whole_fragments(spec.value_head_dim) // 8,
        dim=spec.value_head_dim,
        whole=whole_sum(spec),
        stored=stored_element(spec),
    )


def stored_element(spec: Spec) -> str:
    """Return statements that store ``x`` at ``column`` of a row: rounded in out, and what rounding
    took away in rest."""
    type_ = TYPES[spec.dtype]
    text = f"out_row[column] = ({type_})x;"
    if not spec.needs_backward or type_ == "float":
        return text
    return f"""\
{text}
const float rounding = x - (float)({type_})x;
rest[at * {spec.value_head_dim} + column] = ({type_})(isfinite(rounding) ? rounding : 0.0f);"""


def stored_sums(spec: Spec) -> str:
    """Return statements that store what is one number a row, at row ``at`` of all rows."""
    lines = []
    if spec.needs_lse:
        lines.append("lse[at] = dead ? -INFINITY : top + precise::log2(sum) * 0.693147181f;")
    if "max_scores" in spec.aux:
        lines.append("max_scores[at] = nans != 0u ? NAN : top;")
    if spec.needs_backward:
        lines.append("tops[at * 2] = dead ? 0.0f : top;")
        lines.append(f"tops[at * 2 + 1] = dead ? INFINITY : precise::log2({whole_sum(spec)});")
    return "\n".join(lines)
