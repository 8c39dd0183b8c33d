"""Records of arithmetic."""

from __future__ import annotations

import functools
import operator

import torch
from torch import Tensor

from anyflex.mod_graph.operations.bounds import (
    End,
    choose,
    corners,
    equal,
    greater,
    lesser,
)
from anyflex.mod_graph.operations.record import Gradient, Operation
from anyflex.mod_graph.operations.terms import Term, call, where
from anyflex.mod_graph.torch_derivatives import clamp_stops_at_numbers

__all__ = ["ARITHMETIC"]

_NUMBERS = ("int", "float")


def _product_bounds(a: End, b: End, c: End, d: End) -> tuple[End, End]:
    # A factor that is one number saves half of the corners.
    return corners(operator.mul, *((c, d, a, b) if a is b else (a, b, c, d)))


def _quotient_bounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[End, End]:
    low, high = corners(operator.truediv, a, b, c, d)
    sure = (c > 0) | (d < 0)
    return torch.where(sure, low, torch.nan), torch.where(sure, high, torch.nan)


def _pow_base(g: Term, r: Term, x: Term, y: Term) -> Term:
    slope = y * call("pow", x, y + -1.0)
    return where(y.test("eq", 0.0), 0.0, g * slope)


def _pow_exponent(g: Term, r: Term, x: Term, y: Term) -> Term:
    flat = x.test("eq", 0.0) & y.test("ge", 0.0)
    return where(flat, 0.0, g * (r * call("log", x)))


def _atan2(g: Term, numerator: Term, sign: float, x: Term, y: Term) -> Term:
    squares = x * x + y * y
    reciprocal = where(squares.test("eq", 0.0), 0.0, 1.0 / squares)
    return g * (numerator * sign) * reciprocal


def _extremum(loses: str, inside: str) -> tuple[Gradient, Gradient]:
    """Gradients of minimum and maximum.

    Args:
        loses: comparison of an operand with the other one that says that it isn't the result.
        inside: likewise with a number, that its gradient passes.
    """

    def gradient(g: Term, own: Term, other: Term, tie: Term) -> Term:
        # Against a number it is a clamp: no gradient passes at NaN.
        if other.is_number:
            return where(own.test(inside, other), g, 0.0)
        halved = where(tie, g * 0.5, g)
        return where(own.test(loses, other), 0.0, halved)

    return (
        lambda g, r, x, y: gradient(g, x, y, x.test("eq", y)),
        lambda g, r, x, y: gradient(g, y, x, x.test("eq", y)),
    )


def _mod_bounds(a: End, b: End, c: End, d: End) -> tuple[End, End]:
    # The remainder has the divisor's sign and is smaller.
    low, high = lesser(c + 1, 0), greater(d - 1, 0)
    if c is not d:
        return low, choose((a >= 0) & (c > 0), lesser(high, b), high)
    # Where the quotient is constant, the remainder moves as the dividend does.
    quotient = a // c
    same = equal(quotient, b // c)
    start = quotient * c
    return choose(same, a - start, low), choose(same, b - start, high)


def _fmod_bounds(a: End, b: End, c: End, d: End) -> tuple[End, End]:
    most = greater(greater(d, -c) - 1, 0)
    return greater(-most, lesser(a, 0)), lesser(most, greater(b, 0))


_binary = functools.partial(Operation, operands=2, types=_NUMBERS)

ARITHMETIC = (
    _binary(
        "add",
        torch.add,
        sign="+",
        gradients=(lambda g, r, x, y: g, lambda g, r, x, y: g),
        bounds=lambda a, b, c, d: (a + c, b + d),
    ),
    _binary(
        "sub",
        torch.sub,
        names=("subtract",),
        sign="-",
        gradients=(lambda g, r, x, y: g, lambda g, r, x, y: -g),
        bounds=lambda a, b, c, d: (a - d, b - c),
    ),
    _binary(
        "mul",
        torch.mul,
        names=("multiply",),
        sign="*",
        gradients=(lambda g, r, x, y: g * y, lambda g, r, x, y: g * x),
        bounds=_product_bounds,
    ),
    _binary(
        "truediv",
        torch.true_divide,
        types=("float",),
        names=("div", "divide"),
        sign="/",
        gradients=(lambda g, r, x, y: g / y, lambda g, r, x, y: -g * (r / y)),
        bounds=_quotient_bounds,
        samples={"truediv": lambda s, q, k: s / (2.0 + s * s)},
    ),
    _binary(  # rounds down
        "floordiv",
        torch.floor_divide,
        sign="//",
        integer_bounds=functools.partial(corners, operator.floordiv),
        index_samples={
            "floordiv_of_floats": lambda s, q, k: ((q - k) * 0.5) // 0.75,
            "floordiv_of_ints": lambda s, q, k: ((q - k) // 3 + (q - k) // -4) * 0.5,
        },
    ),
    _binary(  # takes the divisor's sign
        "mod",
        torch.remainder,
        sign="%",
        gradients=(lambda g, r, x, y: g, lambda g, r, x, y: -g * call("floordiv", x, y)),
        integer_bounds=_mod_bounds,
        index_samples={
            "mod_of_floats": lambda s, q, k: ((q - k) * 0.5) % 0.75,
            "mod_of_ints": lambda s, q, k: ((q - k) % 3 + (q - k) % -4) * 0.5,
        },
    ),
    _binary(  # takes the dividend's sign
        "fmod",
        torch.fmod,
        gradients=(lambda g, r, x, y: g, lambda g, r, x, y: -g * call("trunc", x / y)),
        integer_bounds=_fmod_bounds,
        index_samples={
            "fmod_of_floats": lambda s, q, k: torch.fmod((q - k) * 0.5, 0.75),
            "fmod_of_ints": lambda s, q, k: torch.fmod(q - k, 3) * 0.5,
        },
    ),
    _binary(
        "pow",
        torch.pow,
        sign="**",
        gradients=(_pow_base, _pow_exponent),
        approximate=True,
        samples={
            "pow": lambda s, q, k: torch.pow(s * s + 0.5, s * 0.5),
            "pow_of_negatives": lambda s, q, k: torch.pow(s, 3.0) * 0.1,
        },
        index_samples={"pow_of_ints": lambda s, q, k: ((q - k) ** 3) * 0.01},
    ),
    _binary(  # NaN wins
        "minimum",
        torch.minimum,
        names=("min",),
        gradients=_extremum("gt", "lt" if clamp_stops_at_numbers else "le"),
        bounds=lambda a, b, c, d: (lesser(a, c), lesser(b, d)),
        keeps_steps=2,
        samples={"minimum": lambda s, q, k: torch.minimum(s, (q - k) * 0.5 + 0.3)},
        index_samples={"minimum_of_ints": lambda s, q, k: torch.minimum(q, k + 2) * 0.3},
    ),
    _binary(  # NaN wins
        "maximum",
        torch.maximum,
        names=("max",),
        gradients=_extremum("lt", "gt" if clamp_stops_at_numbers else "ge"),
        bounds=lambda a, b, c, d: (greater(a, c), greater(b, d)),
        keeps_steps=2,
        samples={"maximum": lambda s, q, k: torch.maximum(s, (q - k) * 0.5 + 0.3)},
        index_samples={"maximum_of_ints": lambda s, q, k: torch.maximum(q, k - 2) * 0.3},
    ),
    _binary(
        "atan2",
        torch.atan2,
        types=("float",),
        names=("arctan2",),
        reading="floats",
        gradients=(
            lambda g, r, x, y: _atan2(g, y, 1.0, x, y),
            lambda g, r, x, y: _atan2(g, x, -1.0, x, y),
        ),
        approximate=True,
        samples={"atan2": lambda s, q, k: torch.atan2(s, s * 0.5 + 3.0)},
    ),
    Operation(
        "neg",
        torch.neg,
        types=_NUMBERS,
        names=("negative",),
        sign="-",
        gradients=(lambda g, r, x: -g,),
        bounds=lambda a, b: (-b, -a),
        keeps_steps=1,
        samples={"neg": lambda s, q, k: -s * 2.0},
    ),
    Operation(
        "abs",
        torch.abs,
        types=_NUMBERS,
        names=("absolute",),
        method="abs",
        gradients=(lambda g, r, x: g * call("sign", x),),
        bounds=lambda a, b: (greater(greater(a, -b), 0), greater(b, -a)),
        keeps_steps=1,
        samples={"abs": lambda s, q, k: (s + 20.0).abs() + (s - 20.0).abs() * 0.5},
        index_samples={"abs_of_ints": lambda s, q, k: (q - k).abs() * 0.3},
    ),
)
