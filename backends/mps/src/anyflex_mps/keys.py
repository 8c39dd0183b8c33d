"""Metal source of dK and dV: a tile of keys of one KV head walks along its runs of query rows, of
all query heads that share the head. A threadgroup makes each sum whole: there are no atomics."""

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
from anyflex_mps.forward import GROUP_OF_GRID, place_of_tile
from anyflex_mps.mods import mods_source
from anyflex_mps.rows import wants_delta
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
    own_fragment,
    run_bounds,
    staged_rows,
    zeros,
)
from anyflex_mps.tiles import pitch_of, tile_for, whole_fragments

__all__ = ["keys_shader"]

_KEYS = """\
$memory
const int q_length = (int)$q_length;
const int kv_length = (int)$kv_length;
const int kv_batch = (int)group.z;
const int kv_head = (int)group.y;
const int place = $group_of_grid;
const int part = place % $parts;
$place_of_tile
if (first_row >= end_row)
  return;
$place_of_lane
const int row = first_row + (int)sg * 8 + r;
const int kv_idx = min(row, end_row - 1);
$key_head
$value_head
$load_own
$no_dk
$no_dv
for (int pass = 0; pass < 2; pass++) {
  for (int b = $first_batch; b < $end_batch; b++) {
    for (int h = kv_head * $ratio; h < (kv_head + 1) * $ratio; h++) {
      $query_head
      $dout_head
      device const float* row_values = rows + ((long)b * $heads + h) * q_length;
      $row_of_blocks
      for (int run = first_run; run < last_run; run++) {
        $run_bounds
        for (int first_query = begin; first_query < end; first_query += $step) {
          threadgroup_barrier(mem_flags::mem_threadgroup);
          $load_queries
          $load_douts
          threadgroup_barrier(mem_flags::mem_threadgroup);
          simdgroup_matrix<$type, 8, 8> p[$steps];
          simdgroup_matrix<$type, 8, 8> ds[$steps];
          uint lives = 0u;
          for (int j = 0; j < $steps; j++) {
            simdgroup_matrix<float, 8, 8> s = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            simdgroup_matrix<float, 8, 8> dp = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            for (int d = 0; d < $columns; d++) {
              $own_key
              simdgroup_matrix<$type, 8, 8> q;
              simdgroup_load(q, q_rows + j * 8 * $pitch + d * 8, $pitch, ulong2(0), true);
              simdgroup_multiply_accumulate(s, k, q, s);
            }
            for (int d = 0; d < $values; d++) {
              $own_value
              simdgroup_matrix<$type, 8, 8> g;
              simdgroup_load(
                  g, g_rows + j * 8 * $value_pitch + d * 8, $value_pitch, ulong2(0), true);
              simdgroup_multiply_accumulate(dp, v, g, dp);
            }
            for (int i = 0; i < 2; i++) {
              const int at = first_query + j * 8 + c + i;
              const int q_idx = min(at, end - 1);
              const bool inside = at < end && row < end_row;
              const float top = row_values[q_idx];
              const float size = row_values[$row_plane + q_idx];
              const float delta = $delta;
              const float raw = s.thread_elements()[i] * F[0];
              const float dweight = dp.thread_elements()[i];
              $gradient
              p[j].thread_elements()[i] = ($type)weight;
              ds[j].thread_elements()[i] = ($type)grad;
              lives |= live ? 1u << (uint)(j * 2 + i) : 0u;
            }
          }
          if (pass == 1) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            $zero_queries
            $zero_douts
            threadgroup_barrier(mem_flags::mem_threadgroup);
            $nonfinite_queries
            $nonfinite_douts
          }
          $dv_products
          $dk_products
        }
      }
    }
  }
  if (pass == 0) {
    $any_nonfinite
    if (!odd)
      break;
    $no_dk_again
    $no_dv_again
  }
}
if (row < end_row) {
  $stored_dk
  $stored_dv
}
"""


def keys_shader(spec: Spec) -> Shader:
    """Return the kernel; a threadgroup is ``tile_for("keys", spec)``'s keys of a KV head and one
    part of the columns. Its grid is (tiles x parts, KV heads, batch of key); with a mask, no tile
    crosses a block of keys.

    Its buffers are query, key, value, dout, rows; offsets and runs of the transposed mask; dk and
    dv, each where it is wanted.
    """
    tile, type_ = tile_for("keys", spec), TYPES[spec.dtype]
    size, e, ev = spec.dtype.itemsize, spec.head_dim, spec.value_head_dim
    pitch, value_pitch = pitch_of(e, size), pitch_of(ev, size)
    columns, values, step = whole_fragments(e) // 8, whole_fragments(ev) // 8, tile.step
    # Fragments of a part of the columns.
    dk_count, dv_count = -(-columns // tile.parts), -(-values // tile.parts)

    def nonfinite(sums: str, tensor: str, count: int) -> str:
        return nonfinite_products(
            spec, sums, tensor,
            first="first_query", step=step, first_fragment=f"part * {count}", count=count,
        )  # fmt: skip

    body = fill(
        _KEYS,
        **common_values(spec, tile),
        memory=backward_memory(spec, tile, own="kv", stepped="qg"),
        group_of_grid=GROUP_OF_GRID,
        parts=tile.parts,
        place_of_tile=place_of_tile(
            spec, spec.block_size[1], tile.rows, "kv_length", f"place / {tile.parts}"
        ),
        key_head=head_of(spec, "key", "kv_batch", "kv_head"),
        value_head=head_of(spec, "value", "kv_batch", "kv_head"),
        query_head=head_of(spec, "query", "b", "h"),
        dout_head=head_of(spec, "dout", "b", "h"),
        load_own=load_own(spec, tile, "kv"),
        no_dk=zeros("dk_sums", dk_count),
        no_dv=zeros("dv_sums", dv_count),
        no_dk_again=zeros("dk_sums", dk_count, declared=False),
        no_dv_again=zeros("dv_sums", dv_count, declared=False),
        first_batch="0" if spec.kv_broadcast else "kv_batch",
        end_batch=f"(int){place('batch')}" if spec.kv_broadcast else "kv_batch + 1",
        run_bounds=run_bounds(spec, spec.block_size[0], "0", "q_length"),
        load_queries=staged_rows(spec, "q_rows", "query", "first_query", "end", step),
        load_douts=staged_rows(spec, "g_rows", "dout", "first_query", "end", step),
        own_key=own_fragment(spec, tile, "k", "key"),
        own_value=own_fragment(spec, tile, "v", "value"),
        gradient=gradient_of_score(spec),
        delta=f"row_values[2 * {place('row_plane')} + q_idx]" if wants_delta(spec) else "0.0f",
        zero_queries=zero_nonfinite(spec, "q_rows", step * pitch, tile.threads),
        zero_douts=zero_nonfinite(spec, "g_rows", step * value_pitch, tile.threads),
        nonfinite_queries=nonfinite("dk_sums", "query", dk_count),
        nonfinite_douts=nonfinite("dv_sums", "dout", dv_count),
        dv_products=_products(spec, "dv_sums", "p", "g_rows", step, dv_count, values, value_pitch),
        dk_products=_products(spec, "dk_sums", "ds", "q_rows", step, dk_count, columns, pitch),
        any_nonfinite=any_nonfinite({"dk_sums": dk_count, "dv_sums": dv_count}, tile.simdgroups),
        stored_dk=_stored(spec, "dk", dk_count) if "k" in spec.gradients else "",
        stored_dv=_stored(spec, "dv", dv_count) if "v" in spec.gradients else "",
    )
    buffers = [f"device const {type_}* {name}" for name in ("query", "key", "value", "dout")]
    buffers += ["device const float* rows", *mask_buffers(spec)]
    buffers += [f"device {type_}* d{name}" for name in "kv" if name in spec.gradients]
    functions = mods_source(spec, body) + load_rows_text(spec, body, tile.threads)
    return kernel_text("keys", spec, buffers, functions, body, tile.threads)


_PRODUCTS = """\
for (int d = 0; d < $count; d++) {
  const int number = part * $count + d;
  if (number >= $of_all)
    continue;
  for (int j = 0; j < $steps; j++) {
    simdgroup_matrix<$type, 8, 8> x;
    simdgroup_load(x, $staged + j * 8 * $pitch + number * 8, $pitch);
    simdgroup_multiply_accumulate($sums[d], $factors[j], x, $sums[d]);
  }
}"""


def _products(
    spec: Spec,
    sums: str,
    factors: str,
    staged: str,
    step: int,
    count: int,
    of_all: int,
    pitch: int,
) -> str:
    return fill(
        _PRODUCTS,
        type=TYPES[spec.dtype],
        sums=sums,
        factors=factors,
        staged=staged,
        steps=step // 8,
        count=count,
        of_all=of_all,
        pitch=pitch,
    )


_STORED = """\
device $type* $name_row =
    $name + kv_batch * $batch + kv_head * $head + ($index)row * ($index)$row;
for (int d = 0; d < $count; d++) {
  for (int i = 0; i < 2; i++) {
    const int column = (part * $count + d) * 8 + c + i;
    if (column < $dim)
      $name_row[($index)column * ($index)$column] = ($type)$sums[d].thread_elements()[i];
  }
}"""


def _stored(spec: Spec, name: str, count: int) -> str:
    return fill(
        _STORED.replace("$name_row", f"{name}_row"),
        type=TYPES[spec.dtype],
        index=index_type(spec),
        name=name,
        sums=f"{name}_sums",
        count=count,
        batch=place(name, "batch"),
        head=place(name, "head"),
        row=place(name, "row"),
        column=place(name, "column"),
        dim=spec.head_dim if name == "dk" else spec.value_head_dim,
    )
