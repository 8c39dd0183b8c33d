"""Metal text that both passes of backward share: staged tiles, gradients of scores, and products
with what isn't finite."""

from __future__ import annotations

from anyflex.plugin import Spec
from anyflex_mps.arguments import place
from anyflex_mps.mods import changes_gradients
from anyflex_mps.text import (
    LANE_OF_COLUMN,
    PLACE_OF_LANE,
    TYPES,
    fill,
    index_type,
    mod_arguments,
    row_of_blocks,
    staged_rows,
)
from anyflex_mps.tiles import Tile, pitch_of, whole_fragments

__all__ = [
    "backward_memory",
    "common_values",
    "gradient_of_score",
    "load_own",
    "nonfinite_products",
    "zero_nonfinite",
]

_TENSORS = {"q": "query", "k": "key", "v": "value", "g": "dout"}


def common_values(spec: Spec, tile: Tile) -> dict[str, object]:
    """Return the values of the names that the templates of both passes have."""
    size, e, ev = spec.dtype.itemsize, spec.head_dim, spec.value_head_dim
    return {
        "type": TYPES[spec.dtype],
        "q_length": place("q_length"),
        "kv_length": place("kv_length"),
        "heads": place("heads"),
        "row_plane": place("row_plane"),
        "place_of_lane": PLACE_OF_LANE,
        "ratio": spec.gqa_ratio,
        "row_of_blocks": row_of_blocks(spec),
        "step": tile.step,
        "steps": tile.step // 8,
        "columns": whole_fragments(e) // 8,
        "values": whole_fragments(ev) // 8,
        "pitch": pitch_of(e, size),
        "value_pitch": pitch_of(ev, size),
    }


def backward_memory(spec: Spec, tile: Tile, *, own: str, stepped: str) -> str:
    """Return the declarations of a pass's threadgroup memory.

    Args:
        own, stepped: letters of the tensors whose rows are the tile's own, and the steps':
            ``"kv"`` or ``"qg"``.
    """
    pitches = {
        letter: pitch_of(dim, spec.dtype.itemsize)
        for letters, dim in (("qk", spec.head_dim), ("gv", spec.value_head_dim))
        for letter in letters
    }
    rows = [(letter, tile.rows) for letter in (own if tile.stages_rows else "")]
    rows += [(letter, tile.step) for letter in stepped]
    type_ = TYPES[spec.dtype]
    lines = [f"threadgroup {type_} {name}_rows[{count * pitches[name]}];" for name, count in rows]
    return "\n".join([*lines, f"threadgroup uint flags[{tile.simdgroups}];"])


def load_own(spec: Spec, tile: Tile, own: str) -> str:
    """Return the statements that stage a tile's own rows, if they are staged."""
    return "\n".join(
        staged_rows(spec, f"{letter}_rows", _TENSORS[letter], "first_row", "end_row", tile.rows)
        for letter in (own if tile.stages_rows else "")
    )


_GRADIENT = """\
const float score = $score;
const bool live = inside && size != INFINITY && score != -INFINITY && $live;
const float exponent = (score - top) * 1.44269504f - size;
// Products that are summed in another order than forward's may exceed its largest score.
const float weight = live ? fast::exp2(exponent > 0.0f ? 0.0f : exponent) : 0.0f;
float grad = live ? weight * (dweight - delta) : 0.0f;
$captured
grad = live ? $slope * F[0] : 0.0f;"""


def gradient_of_score(spec: Spec, captured: str = "") -> str:
    """Return statements that compute a pair's ``weight``, and ``grad``, the gradient of q k^T.

    They take ``raw``, the scaled product; ``dweight``, the product of dout and value; ``inside``,
    whether the pair exists; ``full``; ``top``, ``size`` and ``delta`` of its row; and the indices.
    They declare ``live`` too.

    Args:
        captured: statements that add gradients of captured tensors, where ``grad`` is that of the
            modified score.
    """
    arguments = mod_arguments(spec)
    score, live, slope = "raw", "true", "grad"
    if spec.score_graph is not None:
        score = f"score_mod(raw, {arguments})"
        if changes_gradients(spec):
            slope = f"score_mod_backward(grad, raw, {arguments})"
    if spec.mask_graph is not None:
        live = f"(full || mask_mod({arguments}))"
    return fill(_GRADIENT, score=score, live=live, slope=slope, captured=captured)


def zero_nonfinite(spec: Spec, staged: str, count: int, threads: int) -> str:
    """Return the statement that zeroes what isn't finite in staged rows."""
    return f"""\
for (int i = (int)tid; i < {count}; i += {threads})
  if (!isfinite((float){staged}[i]))
    {staged}[i] = ({TYPES[spec.dtype]})0.0f;"""


_PRODUCTS = """\
for (int j = 0; j < $step; j++) {
  const ushort other = $lane_of_column;
  const uint seen = simd_shuffle(lives, other) >> (uint)(j / 8 * 2 + j % 2) & 1u;
  for (int d = 0; d < $count; d++) {
    for (int i = 0; i < 2; i++) {
      const int column = ($first_fragment + d) * 8 + c + i;
      float x = 0.0f;
      if (seen != 0u && $first + j < end && column < $dim)
        x = (float)$rows[
            ($index)($first + j) * ($index)$row + ($index)column * ($index)$column];
      $sums[d].thread_elements()[i] += isfinite(x) ? 0.0f : x;
    }
  }
}"""


def nonfinite_products(
    spec: Spec,
    sums: str,
    tensor: str,
    *,
    first: str,
    step: int,
    first_fragment: str,
    count: int,
) -> str:
    """Return statements that add to sums what isn't finite in a step's rows, from device memory,
    where ``lives``, a bit for each of a lane's pairs, has a live pair.

    It counts whatever its factor is: a small weight is 0 in half, and 0 * infinity is NaN. A
    factor that is NaN has reached the sums by products with the zeros that are staged instead.

    Args:
        sums: ``count`` fragments of columns, from ``first_fragment`` on.
        tensor: whose rows the step has, from row ``first`` on; ``end`` is where they end.
    """
    return fill(
        _PRODUCTS,
        sums=sums,
        rows=f"{tensor}_head",
        first=first,
        step=step,
        first_fragment=first_fragment,
        count=count,
        dim=spec.value_head_dim if tensor == "dout" else spec.head_dim,
        index=index_type(spec),
        row=place(tensor, "row"),
        column=place(tensor, "column"),
        lane_of_column=LANE_OF_COLUMN,
    )
