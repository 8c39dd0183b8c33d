"""Metal source of a forward on the matrix units of an M5: the option ``mpp``.

It walks as `forward` does, with products of tensors in place of 8x8 matrices. Scores go from
their product's result to threadgroup memory, where each lane finds those of its row for mods,
maxima and sums; weights go back through it. Operands are staged there as well, with zeros past
their ends: what a product reads past a tensor is undefined.
"""

from __future__ import annotations

from typing import NamedTuple

from anyflex.plugin import Spec
from anyflex_mps.arguments import place
from anyflex_mps.forward import (
    SUMS_OF_ROW,
    output_buffers,
    place_of_tile,
    stored_element,
    stored_sums,
    whole_sum,
)
from anyflex_mps.mods import mods_source
from anyflex_mps.tensor_text import (
    INCLUDES,
    MULTIPLE,
    USING,
    declared_product,
    declared_rows,
    each_element,
)
from anyflex_mps.text import (
    PLACE_OF_LANE,
    TYPES,
    Shader,
    any_of_group,
    fill,
    head_of,
    index_type,
    kernel_text,
    load_rows_text,
    mask_buffers,
    mod_arguments,
    row_of_blocks,
    run_bounds,
    staged_rows,
)
from anyflex_mps.tiles import BYTES

__all__ = [
    "ROWS",
    "SIMDGROUPS",
    "Products",
    "forward_matmul_shader",
    "keys_of_step",
    "products_of",
    "threadgroup_bytes",
]

ROWS = 32
"""Query rows of a threadgroup."""
SIMDGROUPS = ROWS // 8
"""Simdgroups of a threadgroup, which run a product together."""


def _width(dim: int) -> int:
    """Return the columns of staged rows."""
    return -(-dim // MULTIPLE) * MULTIPLE


def _bytes(spec: Spec, step: int) -> int:
    width, value_width = _width(spec.head_dim), _width(spec.value_head_dim)
    staged = ROWS * width + step * max(width, value_width) + ROWS * step
    return staged * spec.dtype.itemsize + 4 * (ROWS * step + 2 * ROWS + SIMDGROUPS)


def keys_of_step(spec: Spec) -> int:
    """Return the keys of a step: as many as threadgroup memory holds."""
    return next(step for step in (32, 16) if _bytes(spec, step) <= BYTES)


class Products(NamedTuple):
    """Sizes of a kernel's products: of queries [ROWS, depth] and keys [keys, depth], and of
    weights [ROWS, keys] and values [keys, columns]."""

    keys: int
    depth: int
    columns: int


def products_of(spec: Spec) -> Products:
    """Return the sizes of the products, head dims padded."""
    return Products(keys_of_step(spec), _width(spec.head_dim), _width(spec.value_head_dim))


def threadgroup_bytes(spec: Spec) -> int:
    """Return the threadgroup memory that the kernel takes."""
    return _bytes(spec, keys_of_step(spec))


# The kernel

_FORWARD = """\
threadgroup $type q_rows[$query_size];
threadgroup $type kv_rows[$kv_size];
threadgroup $type p_rows[$weights_size];
threadgroup float s_rows[$weights_size];
threadgroup float factors[$rows];
threadgroup float inverse_sums[$rows];
threadgroup uint flags[$simdgroups];
const int q_length = (int)$q_length;
const int kv_length = (int)$kv_length;
const int b = (int)group.z;
const int h = (int)group.y;
$place_of_tile
if (first_row >= end_row)
  return;
$place_of_lane
const int lane_row = (int)sg * 8 + r;
const int row = first_row + lane_row;
const int q_idx = min(row, end_row - 1);
$query_head
$row_of_blocks
$load_queries
const long kv_batch = $kv_batch;
const long kv_head = h / $ratio;
$key_head
$value_head
$tensors
auto acc = add_values.get_destination_cooperative_tensor<
    decltype(weights), decltype(values), float>();
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
      threadgroup_barrier(mem_flags::mem_threadgroup);
      auto s = score_keys.get_destination_cooperative_tensor<
          decltype(queries), decltype(keys), float>();
      score_keys.run(queries, keys, s);
      $store_scores
      threadgroup_barrier(mem_flags::mem_threadgroup);
      $load_values
      float x[$elements];
      float high = top;
      for (int j = 0; j < $elements; j++) {
        const int column = j / 2 * 8 + c + j % 2;
        const int at = first_key + column;
        const int kv_idx = min(at, end - 1);
        const float raw = s_rows[lane_row * $step + column] * F[0];
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
      for (int j = 0; j < $elements; j++) {
        const int at = lane_row * $step + j / 2 * 8 + c + j % 2;
        const float weight = fast::exp2((x[j] - base) * 1.44269504f);
        sum += weight;
        p_rows[at] = ($type)weight;
        s_rows[at] = x[j];
      }
      if (c == 0)
        factors[lane_row] = factor;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      $rescale
      add_values.run(weights, values, acc);
      if (pass == 0)
        continue;
      $add_nonfinite
    }
  }
  if (pass == 0) {
    $any_nonfinite
    if (!odd)
      break;
    sum = 0.0f;
    $zeros
  }
}
$sums_of_row
if (c == 0)
  inverse_sums[lane_row] = dead ? 0.0f : 1.0f / $whole;
threadgroup_barrier(mem_flags::mem_threadgroup);
$store_rows
if (row < end_row && c == 0) {
  const long at = ((long)b * $heads + h) * q_length + row;
  $stored_sums
}
"""

_ADD_NONFINITE = """\
for (int j = 0; j < $step; j++) {
  const int at = first_key + j;
  float v = 0.0f;
  if (s_rows[tile_row * $step + j] != -INFINITY && at < end && column < $dim)
    v = (float)value_head[
        ($index)at * ($index)$row + ($index)column * ($index)$column];
  acc[i] += isfinite(v) ? 0.0f : v;
}"""

_STORE_ROWS = """\
const int q_row = first_row + tile_row;
if (q_row < end_row && column < $dim) {
  const long at = ((long)b * $heads + h) * q_length + q_row;
  device $type* out_row = out + b * $batch + h * $head + ($index)q_row * ($index)$row;
  const float x = acc[i] * inverse_sums[tile_row];
  $stored
}"""


def forward_matmul_shader(spec: Spec) -> Shader:
    """Return the kernel; a threadgroup is `ROWS` rows of a head. Grid and buffers are those of
    `forward.forward_shader`; the dtype is one of `DTYPES`."""
    step, width, value_width = products_of(spec)
    threads, type_ = 32 * SIMDGROUPS, TYPES[spec.dtype]
    arguments = mod_arguments(spec)
    scored, masked = spec.score_graph is not None, spec.mask_graph is not None
    body = fill(
        _FORWARD,
        type=type_,
        rows=ROWS,
        step=step,
        elements=step // 4,
        simdgroups=SIMDGROUPS,
        query_size=ROWS * width,
        kv_size=step * max(width, value_width),
        weights_size=ROWS * step,
        q_length=place("q_length"),
        kv_length=place("kv_length"),
        heads=place("heads"),
        place_of_tile=place_of_tile(spec, spec.block_size[0], ROWS, "q_length"),
        place_of_lane=PLACE_OF_LANE,
        query_head=head_of(spec, "query", "b", "h"),
        row_of_blocks=row_of_blocks(spec),
        load_queries=staged_rows(
            spec, "q_rows", "query", "first_row", "end_row", ROWS, width=width
        ),
        kv_batch="0" if spec.kv_broadcast else "b",
        ratio=spec.gqa_ratio,
        key_head=head_of(spec, "key", "kv_batch", "kv_head"),
        value_head=head_of(spec, "value", "kv_batch", "kv_head"),
        tensors=_tensors(spec),
        zeros=each_element("acc", "acc[i] = 0.0f;"),
        run_bounds=run_bounds(spec, spec.block_size[1], "0", "kv_length"),
        load_keys=staged_rows(spec, "kv_rows", "key", "first_key", "end", step, width=width),
        load_values=staged_rows(
            spec,
            "kv_rows",
            "value",
            "first_key",
            "end",
            step,
            finite_only="pass == 1",
            width=value_width,
        ),
        store_scores=each_element("s", f"s_rows[tile_row * {step} + column] = s[i];"),
        score=f"score_mod(raw, {arguments})" if scored else "raw",
        live=f"(full || mask_mod({arguments}))" if masked else "true",
        rescale=each_element("acc", "acc[i] *= factors[tile_row];"),
        add_nonfinite=each_element("acc", _nonfinite_values(spec)),
        any_nonfinite=any_of_group(
            each_element("acc", "own = own || !isfinite(acc[i]);"), SIMDGROUPS
        ),
        sums_of_row=SUMS_OF_ROW,
        whole=whole_sum(spec),
        store_rows=each_element("acc", _stored_rows(spec)),
        stored_sums=stored_sums(spec),
    )
    buffers = [f"device const {type_}* {name}" for name in ("query", "key", "value")]
    buffers += [*mask_buffers(spec), *output_buffers(spec)]
    functions = USING + mods_source(spec, body) + load_rows_text(spec, body, threads)
    return kernel_text(
        "forward_matmul", spec, buffers, functions, body, threads, includes=INCLUDES
    )


def _tensors(spec: Spec) -> str:
    """Return the declarations of operands and products; keys and values share their memory."""
    (step, width, value_width), dtype = products_of(spec), spec.dtype
    return "\n".join(
        [
            declared_rows(dtype, "queries", "q_rows", ROWS, width),
            declared_rows(dtype, "keys", "kv_rows", step, width),
            declared_rows(dtype, "weights", "p_rows", ROWS, step),
            declared_rows(dtype, "values", "kv_rows", step, value_width),
            declared_product(
                "score_keys",
                (ROWS, step, width),
                transposed=True,
                mode="multiply",
                simdgroups=SIMDGROUPS,
            ),
            declared_product(
                "add_values",
                (ROWS, value_width, step),
                transposed=False,
                mode="multiply_accumulate",
                simdgroups=SIMDGROUPS,
            ),
        ]
    )


def _nonfinite_values(spec: Spec) -> str:
    """Return statements that add values which aren't finite to an element, where its row sees
    them: see `forward.softmax_over_runs`."""
    return fill(
        _ADD_NONFINITE,
        step=keys_of_step(spec),
        dim=spec.value_head_dim,
        index=index_type(spec),
        row=place("value", "row"),
        column=place("value", "column"),
    )


def _stored_rows(spec: Spec) -> str:
    """Return statements that store an element of out, and of rest."""
    return fill(
        _STORE_ROWS,
        type=TYPES[spec.dtype],
        index=index_type(spec),
        heads=place("heads"),
        batch=place("out", "batch"),
        head=place("out", "head"),
        row=place("out", "row"),
        dim=spec.value_head_dim,
        stored=stored_element(spec),
    )
