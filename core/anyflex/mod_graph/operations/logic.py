"""Records of operations on bits, of comparisons, and of what holds a graph together."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyflex.mod_graph.operations.bounds import (
    Bounds,
    End,
    choose,
    corners,
    equal,
    greater,
    lesser,
)
from anyflex.mod_graph.operations.record import Operation, Sample
from anyflex.mod_graph.operations.terms import where

__all__ = ["BITWISE", "COMPARISONS", "STRUCTURE"]


def _bits_above(end: End) -> End:
    """Return the smallest 2^n - 1 that is not below `end`, which is not negative."""
    if isinstance(end, int):
        return (1 << end.bit_length()) - 1
    # The highest bit is copied into all below it.
    for places in (1, 2, 4, 8, 16, 32):
        end = end | (end >> places)
    return end


def _and_bounds(a: End, b: End, c: End, d: End) -> tuple[End, End]:
    # A non-negative side bounds the result whatever the other is.
    top = greater(b, d)
    high = lesser(choose(a >= 0, b, top), choose(c >= 0, d, top))
    least = -_bits_above(greater(greater(~a, ~c), 0)) - 1
    return choose((a >= 0) | (c >= 0), 0, least), high


def _or_bounds(a: End, b: End, c: End, d: End) -> tuple[End, End]:
    """Bounds of or, and of xor: no result has more bits than the longer operand."""
    top = _bits_above(greater(greater(b, ~a), greater(d, ~c)))
    return choose((a >= 0) & (c >= 0), 0, -top - 1), top


def _exact_at_points(
    apply: Callable[[Any, Any], Any], bounds: Callable[..., tuple[End, End]]
) -> Bounds:
    def refined(a: End, b: End, c: End, d: End) -> tuple[End, End]:
        low, high = bounds(a, b, c, d)
        points, value = equal(a, b) & equal(c, d), apply(a, c)
        return choose(points, value, low), choose(points, value, high)

    return refined


def _shift_bounds(apply: Callable[[Any, Any], Any]) -> Bounds:
    def bounds(a: End, b: End, c: End, d: End) -> tuple[End, End] | None:
        if isinstance(c, Tensor) or isinstance(d, Tensor):
            return None
        if isinstance(c, int) and isinstance(d, int) and not 0 <= c <= d < 64:
            return None
        return corners(apply, a, b, c, d)

    return bounds


def _bits(
    name: str, value: Callable[..., Tensor], sign: str, bounds: Bounds, sample: Sample
) -> Operation:
    return Operation(
        name,
        value,
        operands=2,
        types=("bool", "int"),
        reading="bits",
        sign=sign,
        integer_bounds=bounds,
        index_samples={name: sample},
    )


_shift = functools.partial(Operation, operands=2, types=("int",), reading="shift")

BITWISE = (
    _bits(
        "and",
        torch.bitwise_and,
        "&",
        _exact_at_points(operator.and_, _and_bounds),
        lambda s, q, k: ((q - k) & 5) * 0.5,
    ),
    _bits(
        "or",
        torch.bitwise_or,
        "|",
        _exact_at_points(operator.or_, _or_bounds),
        lambda s, q, k: ((q - k) | 5) * 0.1,
    ),
    _bits(
        "xor",
        torch.bitwise_xor,
        "^",
        _exact_at_points(operator.xor, _or_bounds),
        lambda s, q, k: ((q - k) ^ 5) * 0.1,
    ),
    Operation(
        "not",
        torch.bitwise_not,
        types=("bool", "int"),
        reading="bits",
        sign="~",
        method="invert",
        bounds=lambda a, b: (~b, ~a),
        keeps_steps=1,
        index_samples={"not": lambda s, q, k: (~(q - k)) * 0.1},
    ),
    # An amount outside 0..width-1 gives 0, or the sign for shr, as torch defines it.
    _shift(
        "shl",
        torch.bitwise_left_shift,
        sign="<<",
        method="lshift",
        integer_bounds=_shift_bounds(operator.lshift),
        index_samples={"shl": lambda s, q, k: ((q - k) << 2) * 0.1},
    ),
    _shift(
        "shr",
        torch.bitwise_right_shift,
        sign=">>",
        method="rshift",
        integer_bounds=_shift_bounds(operator.rshift),
        keeps_steps=1,
        index_samples={"shr": lambda s, q, k: ((q - k) >> 1) * 0.3},
    ),
)


def _comparison(name: str, sign: str, *names: str) -> Operation:
    value = getattr(torch, name)
    return Operation(name, value, 2, names=names, reading="comparison", sign=sign)


COMPARISONS = (
    _comparison("eq", "=="),
    _comparison("ne", "!=", "not_equal"),
    _comparison("lt", "<", "less"),
    _comparison("le", "<=", "less_equal"),
    _comparison("gt", ">", "greater"),
    _comparison("ge", ">=", "greater_equal"),
)
"""Both operands have one dtype; the result is bool."""

STRUCTURE = (
    # Leaves. input: attr is score, b, h, q_idx, kv_idx or grad; a block graph has ends of boxes.
    # number: a closed-over Python number, attr is its slot (i3 in the call's ints, f0 in its
    # floats). const: attr is the value.
    Operation("input", operands=0),
    Operation("number", operands=0),
    Operation("const", operands=0),
    # captured[attr], one index a dimension: -N..-1 wraps, then the index clamps.
    Operation("load", operands=None),
    Operation(
        "where",
        torch.where,
        operands=3,
        gradients=(
            None,
            lambda g, r, condition, x, y: where(condition, g, 0.0),
            lambda g, r, condition, x, y: where(condition, 0.0, g),
        ),
        samples={"where": lambda s, q, k: torch.where(q > k, s * s, torch.sin(s))},
    ),
    Operation(
        "cast",
        # The gradient is converted to its own type where it is added up.
        gradients=(lambda g, r, x: g,),
        index_samples={
            "float_to_int": lambda s, q, k: ((q - k) * 0.75).int() * 0.3,
            "int_to_bool": lambda s, q, k: (q - k).bool() * 0.5,
            "int_to_narrow": lambda s, q, k: ((q - k) * 40).to(torch.int8) * 0.01,
            "float_to_half": lambda s, q, k: ((q - k) * 0.3).half().float(),
        },
    ),
    Operation(  # the same value, without a gradient
        "detach",
        Tensor.detach,
        samples={"detach": lambda s, q, k: s * s.detach() * 0.5},
    ),
)
