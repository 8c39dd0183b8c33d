"""Metal source of dQ and of captured tensors' gradients: a tile of query rows walks along its runs
of keys. No sum but those of captured tensors is made of several threadgroups' parts."""

from __future__ import annotations

from anyflex.plugin import Spec
from anyflex_mps.arguments import place
from anyflex_mps.backward_tiles import (
    backward_memory,
    common_values,
    gradient_of_score,
    load_own,
    nonfinite_products,
    zero_nonfinite,
)
from anyflex_mps.forward import place_of_tile
from anyflex_mps.mods import (
    Sums,
    captured_arguments,
    mods_source,
    row_sum_count,
    sums_by_key,
    total_arguments,
    total_buffers,
)
from anyflex_mps.text import (
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
    run_bounds,
    shifted_row,
    staged_rows,
    zeros,
)
from anyflex_mps.tiles import Tile, pitch_of, tile_for, whole_fragments

__all__ = ["queries_shader"]

_QUERIES = """\
$memory
const int q_length = (int)$q_length;
const int kv_length = (int)$kv_length;
const int b = (int)group.z;
const int h = (int)group.y;
$place_of_tile
if (first_row >= end_row)
  return;
$place_of_lane
const int row = first_row + (int)sg * 8 + r;
const int q_idx = min(row, end_row - 1);
const int kv_batch = $kv_batch;
const int kv_head = h / $ratio;
$heads_of_tensors
$row_of_blocks
$load_own
const long at_row = ((long)b * $heads + h) * q_length + q_idx;
const float top = rows[at_row];
const float size = rows[$row_plane + at_row];
const float delta = rows[2 * $row_plane + at_row];
$no_row_sums
$zeros
for (int pass = 0; pass < $passes; pass++) {
  for (int run = first_run; run < last_run; run++) {
    $run_bounds
    for (int first_key = begin; first_key < end; first_key += $step) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      $load_keys
      $load_values
      threadgroup_barrier(mem_flags::mem_threadgroup);
      $no_ds
      for (int j = 0; j < $steps; j++) {
        simdgroup_matrix<float, 8, 8> s = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        simdgroup_matrix<float, 8, 8> dp = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        for (int d = 0; d < $columns; d++) {
          $own_query
          simdgroup_matrix<$type, 8, 8> k;
          simdgroup_load(k, k_rows + j * 8 * $pitch + d * 8, $pitch, ulong2(0), true);
          simdgroup_multiply_accumulate(s, q, k, s);
        }
        for (int d = 0; d < $values; d++) {
          $own_dout
          simdgroup_matrix<$type, 8, 8> v;
          simdgroup_load(v, v_rows + j * 8 * $value_pitch + d * 8, $value_pitch, ulong2(0), true);
          simdgroup_multiply_accumulate(dp, g, v, dp);
        }
        for (int i = 0; i < 2; i++) {
          const int at = first_key + j * 8 + c + i;
          const int kv_idx = min(at, end - 1);
          const bool inside = at < end && row < end_row;
          const float raw = s.thread_elements()[i] * F[0];
          const float dweight = dp.thread_elements()[i];
          $gradient
          $kept
        }
      }
      $products
    }
  }
  $repeat
}
$stored
$row_gradients
"""


def queries_shader(spec: Spec, sums: Sums | None, wants_dq: bool) -> Shader:
    """Return the kernel; a threadgroup is ``tile_for("queries", spec)``'s rows of a head. Its grid
    is forward's.

    Its buffers are query, key, value, dout, rows; offsets and runs with a mask; dq where it is
    wanted; the accumulators of captured tensors (`mods.total_buffers`).

    Args:
        sums: numbers that captured tensors' gradients add up; None where none is wanted.
    """
    tile, type_ = tile_for("queries", spec), TYPES[spec.dtype]
    step = tile.step
    buffers = [f"device const {type_}* {name}" for name in ("query", "key", "value", "dout")]
    buffers += ["device const float* rows", *mask_buffers(spec)]
    buffers += [f"device {type_}* dq"] if wants_dq else []
    row_sums, by_key = 0, False
    captured = no_row_sums = row_gradients = ""
    if sums is not None:
        buffers += total_buffers(spec, sums)
        totals, row_sums = total_arguments(spec, sums), row_sum_count(spec)
        by_key = sums_by_key(spec)
        given = f"{mod_arguments(spec)}{totals}{', r == 0' if by_key else ''}"
        given += ", row_sums" if row_sums else ""
        # A second pass computes the same pairs.
        captured = f"if (pass == 0)\n  captured_gradients(grad, raw, live, {given});"
    if row_sums:
        no_row_sums = f"""\
float row_sums[{row_sums}];
for (int i = 0; i < {row_sums}; i++)
  row_sums[i] = 0.0f;"""
        given = f"{shifted_row(spec)}{captured_arguments(spec)}{totals}, row_sums"
        row_gradients = f"""\
// Four lanes hold parts of a row.
for (int i = 0; i < {row_sums}; i++) {{
  row_sums[i] += simd_shuffle_xor(row_sums[i], (ushort)1);
  row_sums[i] += simd_shuffle_xor(row_sums[i], (ushort)8);
}}
if (row < end_row && c == 0)
  captured_row_gradients({given});"""
    heads = [head_of(spec, tensor, "b", "h") for tensor in ("query", "dout")]
    heads += [head_of(spec, tensor, "kv_batch", "kv_head") for tensor in ("key", "value")]
    body = fill(
        _QUERIES,
        **common_values(spec, tile),
        memory=backward_memory(spec, tile, own="qg", stepped="kv"),
        place_of_tile=place_of_tile(spec, spec.block_size[0], tile.rows, "q_length"),
        kv_batch="0" if spec.kv_broadcast else "b",
        heads_of_tensors="\n".join(heads),
        load_own=load_own(spec, tile, "qg"),
        no_row_sums=no_row_sums,
        **_dq_parts(spec, tile, wants_dq),
        run_bounds=run_bounds(spec, spec.block_size[1], "0", "kv_length"),
        load_keys=staged_rows(spec, "k_rows", "key", "first_key", "end", step),
        load_values=staged_rows(spec, "v_rows", "value", "first_key", "end", step),
        own_query=own_fragment(spec, tile, "q", "query"),
        own_dout=own_fragment(spec, tile, "g", "dout"),
        gradient=gradient_of_score(spec, captured),
        row_gradients=row_gradients,
    )
    functions = mods_source(spec, body, sums=sums or "floats", by_row=row_sums > 0, by_key=by_key)
    functions += load_rows_text(spec, body, tile.threads)
    return kernel_text("queries", spec, buffers, functions, body, tile.threads)


# Parts that make dQ

_NO_DS = """\
simdgroup_matrix<$type, 8, 8> ds[$steps];
uint lives = 0u;"""
_KEPT = """\
ds[j].thread_elements()[i] = ($type)grad;
lives |= live ? 1u << (uint)(j * 2 + i) : 0u;"""
_PRODUCTS = """\
if (pass == 1) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  $zero_keys
  threadgroup_barrier(mem_flags::mem_threadgroup);
  $nonfinite_products
}
for (int d = 0; d < $columns; d++) {
  for (int j = 0; j < $steps; j++) {
    simdgroup_matrix<$type, 8, 8> k;
    simdgroup_load(k, k_rows + j * 8 * $pitch + d * 8, $pitch);
    simdgroup_multiply_accumulate(sums[d], ds[j], k, sums[d]);
  }
}"""
_REPEAT = """\
if (pass == 0) {
  $any_nonfinite
  if (!odd)
    break;
  $zeros_again
}"""


def _dq_parts(spec: Spec, tile: Tile, wants_dq: bool) -> dict[str, object]:
    """Return the values of the names in `_QUERIES` that make dQ. Without it a second pass, whose
    numbers are dQ's alone, doesn't run."""
    if not wants_dq:
        return {
            "passes": 1,
            **dict.fromkeys(("zeros", "no_ds", "kept", "products", "repeat", "stored"), ""),
        }
    columns, step = whole_fragments(spec.head_dim) // 8, tile.step
    pitch, type_ = pitch_of(spec.head_dim, spec.dtype.itemsize), TYPES[spec.dtype]
    products = fill(
        _PRODUCTS,
        zero_keys=zero_nonfinite(spec, "k_rows", step * pitch, tile.threads),
        nonfinite_products=nonfinite_products(
            spec, "sums", "key",
            first="first_key", step=step, first_fragment="0", count=columns,
        ),
        type=type_,
        columns=columns,
        steps=step // 8,
        pitch=pitch,
    )  # fmt: skip
    repeat = fill(
        _REPEAT,
        any_nonfinite=any_nonfinite({"sums": columns}, tile.simdgroups),
        zeros_again=zeros("sums", columns, declared=False),
    )
    return {
        "passes": 2,
        "zeros": zeros("sums", columns),
        "no_ds": fill(_NO_DS, type=type_, steps=step // 8),
        "kept": fill(_KEPT, type=type_),
        "products": products,
        "repeat": repeat,
        "stored": _stored(spec),
    }


_STORED = """\
if (row < end_row) {
  device $type* dq_row = dq + b * $batch + h * $head + ($index)row * ($index)$row;
  for (int d = 0; d < $columns; d++) {
    for (int i = 0; i < 2; i++) {
      const int column = d * 8 + c + i;
      if (column < $dim)
        dq_row[($index)column * ($index)$column] = ($type)sums[d].thread_elements()[i];
    }
  }
}"""


def _stored(spec: Spec) -> str:
    return fill(
        _STORED,
        type=TYPES[spec.dtype],
        index=index_type(spec),
        batch=place("dq", "batch"),
        head=place("dq", "head"),
        row=place("dq", "row"),
        column=place("dq", "column"),
        columns=whole_fragments(spec.head_dim) // 8,
        dim=spec.head_dim,
    )
