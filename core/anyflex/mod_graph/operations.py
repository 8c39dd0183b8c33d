"""The closed list of scalar operations that a mod graph may hold.

Everything a user may write (`anyflex.tracing.torch_functions`) is reduced to these. A backend
lowers a graph with one dictionary from these names to its target (`anyflex.mod_graph.lowering`); a
test proves that every such dictionary covers every name.
"""

from __future__ import annotations

import torch

__all__ = [
    "ARITHMETIC",
    "BITWISE",
    "COMPARISONS",
    "DTYPES",
    "DTYPE_NAMES",
    "FUNCTIONS",
    "LEAVES",
    "OPERATIONS",
    "ROUNDING",
]

DTYPES: dict[str, torch.dtype] = {
    "bool": torch.bool,
    "u8": torch.uint8,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
}
"""Names of the scalar types in a graph's text."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

LEAVES = ("input", "number", "const")
"""Nodes without arguments. ``input``: attr is ``score``, ``b``, ``h``, ``q_idx``, ``kv_idx`` or
``grad``. ``number``: a closed-over Python number, attr is its slot (``i3`` in the call's ints,
``f0`` in its floats). ``const``: attr is the value."""

ARITHMETIC = {
    "add": 2,
    "sub": 2,
    "mul": 2,
    "truediv": 2,  # floating operands only
    "floordiv": 2,  # rounds down
    "mod": 2,  # takes the divisor's sign
    "fmod": 2,  # takes the dividend's sign
    "pow": 2,
    "minimum": 2,  # NaN wins
    "maximum": 2,  # NaN wins
    "atan2": 2,
    "neg": 1,
    "abs": 1,
}
BITWISE = {
    "and": 2,
    "or": 2,
    "xor": 2,
    "not": 1,
    # An amount outside 0..width-1 gives 0, or the sign for shr, as torch defines it.
    "shl": 2,
    "shr": 2,
}
"""On ints, and the first four on bools too."""

COMPARISONS = {"eq": 2, "ne": 2, "lt": 2, "le": 2, "gt": 2, "ge": 2}
"""Both operands have one dtype; the result is bool."""

ROUNDING = {"floor": 1, "ceil": 1, "round": 1, "trunc": 1, "sign": 1}
"""``round`` takes halves to even. The derivative of each is 0."""

FUNCTIONS = dict.fromkeys(
    (
        "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh "
        "asinh acosh atanh sigmoid erf erfc"
    ).split(),
    1,
)
"""Floating operand, floating result."""

OPERATIONS: dict[str, int | None] = {
    **dict.fromkeys(LEAVES, 0),
    **ARITHMETIC,
    **BITWISE,
    **COMPARISONS,
    **ROUNDING,
    **FUNCTIONS,
    "where": 3,
    "cast": 1,
    "detach": 1,  # the same value, without a gradient
    "load": None,  # captured[attr], one index a dimension: -N..-1 wraps, then the index clamps
}
"""Operation name -> number of arguments (None: any)."""
