"""Metal source of the row values that backward takes, and of the end of exact sums."""

from __future__ import annotations

from anyflex.plugin import Spec
from anyflex_mps.arguments import place
from anyflex_mps.operations import EXACT_WORDS, functions_for
from anyflex_mps.text import TYPES, Shader, fill, index_type, kernel_text

__all__ = ["ROWS_A_GROUP", "rows_shader", "totals_shader", "wants_delta"]

ROWS_A_GROUP = 4
"""Rows of a threadgroup: a simdgroup takes one."""
_THREADS = 32 * ROWS_A_GROUP

_ROWS = """\
const int b = (int)group.z;
const int h = (int)group.y;
const int row = (int)group.x * $rows_a_group + (int)sg;
if (row >= (int)$q_length)
  return;
const long at = ((long)b * $heads + h) * $q_length + row;
$values
$minus_dlse
if (lane == 0) {
  rows[at] = top;
  rows[$row_plane + at] = size;
  $delta
}
"""
_GIVEN = """\
const bool dead = lse[at] == -INFINITY;
const float top = dead ? 0.0f : lse[at];
const float size = dead ? INFINITY : 0.0f;
float sum = delta[at];"""
_COMPUTED = """\
const float top = tops[at * 2];
const float size = tops[at * 2 + 1];
const bool dead = size == INFINITY;
device const $type* out_row = out + b * $o_batch + h * $o_head + ($index)row * ($index)$o_row;
device const $type* dout_row = dout + b * $do_batch + h * $do_head + ($index)row * ($index)$do_row;
float sum = 0.0f;
for (int column = (int)lane; column < $dim; column += 32) {
  const float x = (float)out_row[column]$rest;
  sum += x * (float)dout_row[($index)column * ($index)$do_column];
}
sum = simd_sum(sum);"""


def wants_delta(spec: Spec) -> bool:
    """Return whether some gradient needs delta: all but value's do."""
    return set(spec.gradients) != {"v"} or any(facts.needs_grad for facts in spec.captured)


def rows_shader(spec: Spec, given: bool, dlse: bool) -> Shader:
    """Return the kernel that fills ``rows`` [3, B, Hq, L], or [2, ...] where nothing needs delta.

    They are the largest score and the logarithm of the sum of a row, in powers of two, and delta,
    the sum of out * dout minus dlse. In a row without a live key they are 0, infinity and 0, so
    that its weights are 0.

    Its grid is (rows / `ROWS_A_GROUP`, query heads, batch). Its buffers are rows; where delta is
    `given`, as for keys of which the call has a part only, delta and lse; else tops, out, dout
    and, of a 16-bit type, rest; then dlse where there is one.
    """
    type_, dim = TYPES[spec.dtype], spec.value_head_dim
    if given:
        buffers = ["device const float* delta", "device const float* lse"]
        values = _GIVEN
    else:
        buffers = ["device const float* tops", f"device const {type_}* out"]
        buffers.append(f"device const {type_}* dout")
        buffers += [f"device const {type_}* rest"] if type_ != "float" else []
        values = fill(
            _COMPUTED,
            type=type_,
            index=index_type(spec),
            dim=dim,
            rest="" if type_ == "float" else f" + (float)rest[at * {dim} + column]",
            o_batch=place("out", "batch"),
            o_head=place("out", "head"),
            o_row=place("out", "row"),
            do_batch=place("dout", "batch"),
            do_head=place("dout", "head"),
            do_row=place("dout", "row"),
            do_column=place("dout", "column"),
        )
    minus_dlse = ""
    if dlse:
        buffers.append("device const float* dlse")
        batch, head, row = (place("dlse", axis) for axis in ("batch", "head", "row"))
        minus_dlse = f"sum -= dlse[b * {batch} + h * {head} + row * {row}];"
    delta = ""
    if wants_delta(spec):
        delta = f"rows[2 * {place('row_plane')} + at] = dead ? 0.0f : sum;"
    body = fill(
        _ROWS,
        rows_a_group=ROWS_A_GROUP,
        q_length=place("q_length"),
        heads=place("heads"),
        row_plane=place("row_plane"),
        values=values,
        minus_dlse=minus_dlse,
        delta=delta,
    )
    return kernel_text("rows", spec, ["device float* rows", *buffers], "", body, _THREADS)


def totals_shader(spec: Spec) -> Shader:
    """Return the kernel that adds the numbers which exact sums stand for to a captured tensor's
    accumulator. Its grid is (elements / threads, 1, 1); its buffers are total and words."""
    body = f"""\
const long at = (long)group.x * {_THREADS} + tid;
if (at < {place("elements")})
  total[at] += op_exact_sum(words + {EXACT_WORDS} * at);
"""
    buffers = ["device float* total", "device const uint* words"]
    return kernel_text("totals", spec, buffers, functions_for(body), body, _THREADS)
