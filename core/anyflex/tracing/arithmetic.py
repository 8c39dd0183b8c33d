"""Scalar operations as users call them: arithmetic, comparisons, logic, selection, rounding.

Each takes the tracer, then torch's operands: symbols, 0-d captured tensors or Python numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from anyflex.mod_graph.dtypes import DTYPES
from anyflex.mod_graph.operations.record import Reading
from anyflex.mod_graph.torch_derivatives import clamp_halves_at_tensors
from anyflex.tensors.symbolic_numbers import NUMBERS, fixed
from anyflex.tracing.symbol import CATEGORY, FLOAT, INT, Spellings, Symbol
from anyflex.tracing.trace_errors import refuse
from anyflex.tracing.tracer import Tracer

__all__ = ["OWN", "SPELLED", "is_infinite", "sharing", "spelled_by", "where_method"]

COMPARE_FIRST = "Compare first: `&`, `|`, `^` join conditions, and `~` negates one."


OWN = Spellings()
"""Operation -> its spelling, where more than its record tells how operands are read."""

SPELLED = Spellings()
"""Name in torch, Tensor, torch.special or torch.nn.functional -> composition of operations."""


def spelled_by(
    operation: str, operands: int | None, reading: Reading, sign: str
) -> Callable[..., Symbol]:
    """Return the spelling of an operation, as its record says how operands are read."""
    # Text, and no record, is closed over: Dynamo inlines the spellings.
    if operands == 1:

        def unary(t: Tracer, x: Any) -> Symbol:
            if reading == "floats":
                return t.floating(operation, x)
            x = t.symbol(x)
            if reading == "rounding" and CATEGORY[x.kind] == INT:
                return x
            if reading == "bits" and CATEGORY[x.kind] == FLOAT:
                refuse(f"`{sign}` on a float", sign, COMPARE_FIRST)
            return t.unary(operation, x)

        return unary

    def binary(t: Tracer, x: Any, y: Any) -> Symbol:
        x, y = t.operand(x), t.operand(y)
        if reading == "floats":
            return t.binary(operation, x, y, floating_kind(t, x, y))
        kind = t.common_kind(x, y)
        if reading == "comparison":
            return t.binary(operation, x, y, kind, "bool")
        if reading == "bits" and CATEGORY[kind] == FLOAT:
            refuse(f"`{sign}` on a float", sign, COMPARE_FIRST)
        if reading == "shift" and CATEGORY[kind] != INT:
            refuse(f"`{sign}` on a {kind}", sign, "Shifts take integers.")
        return t.binary(operation, x, y, kind)

    return binary


@OWN.named("add")
def add(t: Tracer, x: Any, y: Any, *, alpha: Any = 1) -> Symbol:
    if not (isinstance(alpha, int) and alpha == 1):
        y = multiply(t, y, alpha)
    x, y = t.operand(x), t.operand(y)
    kind = t.common_kind(x, y)
    return t.binary("or" if kind == "bool" else "add", x, y, kind)


@OWN.named("sub")
def subtract(t: Tracer, x: Any, y: Any, *, alpha: Any = 1) -> Symbol:
    if not (isinstance(alpha, int) and alpha == 1):
        y = multiply(t, y, alpha)
    x, y = t.operand(x), t.operand(y)
    kind = t.common_kind(x, y)
    if kind == "bool":
        refuse("bool minus bool", "-", "Use `^` or torch.logical_xor.")
    return t.binary("sub", x, y, kind)


@SPELLED.named("rsub")
def reversed_subtract(t: Tracer, x: Any, y: Any, *, alpha: Any = 1) -> Symbol:
    return subtract(t, y, x, alpha=alpha)


@OWN.named("mul")
def multiply(t: Tracer, x: Any, y: Any) -> Symbol:
    x, y = t.operand(x), t.operand(y)
    kind = t.common_kind(x, y)
    return t.binary("and" if kind == "bool" else "mul", x, y, kind)


def floating_kind(t: Tracer, x: Any, y: Any) -> str:
    kind = t.common_kind(x, y)
    return kind if CATEGORY[kind] == FLOAT else t.default_float


@OWN.named("truediv")
def divide(t: Tracer, x: Any, y: Any, *, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode == "floor":
        return OWN["floordiv"](t, x, y)
    x, y = t.operand(x), t.operand(y)
    if rounding_mode == "trunc":
        kind = integer_kind(t, x, y, "torch.div(rounding_mode='trunc')")
        if CATEGORY[kind] == FLOAT:
            return t.unary("trunc", t.binary("truediv", x, y, kind))
        # x - fmod(x, y) is a multiple of y, so rounding down is exact.
        remainder = t.binary("fmod", x, y, kind)
        return t.binary("floordiv", t.binary("sub", x, remainder, kind), y, kind)
    if rounding_mode is not None:
        refuse(f"rounding_mode={rounding_mode!r}", "torch.div", "Use None, 'floor' or 'trunc'.")
    return t.binary("truediv", x, y, floating_kind(t, x, y))


def integer_kind(t: Tracer, x: Any, y: Any, operation: str) -> str:
    """Kind of a division that keeps integers; an integer divided by the constant 0 is refused."""
    kind = t.common_kind(x, y)
    if kind == "bool":
        refuse(f"{operation} of bools", operation, "Convert with `.int()`.")
    if CATEGORY[kind] == INT and not isinstance(y, Symbol):
        if y == 0:
            refuse(f"{operation}: an integer divided by zero", operation, "Use a nonzero divisor.")
        if t.wraps_to_zero(kind, y):
            refuse(
                f"{operation}: {DTYPES[kind]} divided by {y}, which is 0 in that type",
                operation,
                "Convert to torch.int64 first: `x.long()`.",
            )
    return kind


def integer_division(operation: str, named: str) -> Callable[..., Symbol]:
    def spelled(t: Tracer, x: Any, y: Any) -> Symbol:
        x, y = t.operand(x), t.operand(y)
        return t.binary(operation, x, y, integer_kind(t, x, y, named))

    return spelled


for _operation, _named in (("floordiv", "//"), ("mod", "%"), ("fmod", "torch.fmod")):
    OWN[_operation] = integer_division(_operation, _named)


@OWN.named("pow")
def power(t: Tracer, x: Any, y: Any, modulus: Any = None) -> Symbol:
    if modulus is not None:
        refuse("pow() with three arguments", "pow()", "Use `x ** y % z`.")
    x, y = t.operand(x), t.operand(y)
    kind = t.common_kind(x, y)
    if CATEGORY[kind] == INT and not isinstance(y, Symbol) and y < 0:
        refuse("an integer to a negative power", "**", "Use `1.0 / x`.")
    if kind == "bool":
        kind = "i64"
    t.must_hold(kind, y, "**")
    return t.binary("pow", x, y, kind)


@SPELLED.named("float_power")
def float_power(t: Tracer, x: Any, y: Any) -> Symbol:
    return t.binary("pow", t.operand(x), t.operand(y), "f64")


@OWN.named("neg")
def negative(t: Tracer, x: Any) -> Symbol:
    x = t.symbol(x)
    if x.kind == "bool":
        refuse("minus on a bool", "-", "Use `~`.")
    return t.unary("neg", x)


@OWN.named("abs")
def absolute(t: Tracer, x: Any) -> Symbol:
    x = t.symbol(x)
    if x.kind == "bool":
        refuse("abs of a bool", "abs", "Convert with `.int()`.")
    return t.unary("abs", x)


@SPELLED.named("square")
def square(t: Tracer, x: Any) -> Symbol:
    return multiply(t, x, x)


def truth(t: Tracer, x: Any) -> Symbol:
    """Nonzero is True."""
    return t.as_kind(t.symbol(x), "bool")


def logical(operation: str) -> Callable[..., Symbol]:
    def spelled(t: Tracer, x: Any, y: Any) -> Symbol:
        return t.binary(operation, truth(t, x), truth(t, y), "bool")

    return spelled


for _operation in ("and", "or", "xor"):
    SPELLED[f"logical_{_operation}"] = logical(_operation)


@SPELLED.named("logical_not")
def logical_not(t: Tracer, x: Any) -> Symbol:
    return t.unary("not", truth(t, x))


@OWN.named("where")
def where(t: Tracer, condition: Any, x: Any = None, y: Any = None) -> Symbol:
    if x is None or y is None:
        refuse("torch.where with one argument", "torch.where", "Give both values.")
    condition = t.symbol(condition)
    if condition.kind != "bool":
        refuse(f"a {condition.kind} as torch.where's condition", "torch.where", "Use `x != 0`.")
    x, y = t.operand(x), t.operand(y)
    kind = t.common_kind(x, y)
    t.must_hold(kind, x, "torch.where")
    t.must_hold(kind, y, "torch.where")
    return t.where(condition, x, y, kind)


def where_method(t: Tracer, x: Any, condition: Any, y: Any) -> Symbol:
    return where(t, condition, x, y)


@SPELLED.named("masked_fill")
def masked_fill(t: Tracer, x: Any, mask: Any, value: Any) -> Symbol:
    x, mask = t.symbol(x), t.symbol(mask)
    if mask.kind != "bool":
        refuse(f"a {mask.kind} as masked_fill's mask", "masked_fill", "Use a condition.")
    value = t.operand(value)
    t.must_hold(x.kind, value, "masked_fill")
    return t.where(mask, value, x, x.kind)


@SPELLED.named("clamp", "clip")
def clamp(t: Tracer, x: Any, min: Any = None, max: Any = None) -> Symbol:
    if min is None and max is None:
        refuse("torch.clamp without bounds", "torch.clamp", "Give min, max or both.")
    x = t.symbol(x)
    kind = x.kind
    for bound in (min, max):
        if bound is not None:
            kind = t.common_kind(t.add("const", kind, "-", "0"), t.operand(bound))
    low, high = (None if bound is None else t.operand(bound) for bound in (min, max))
    tensors = [bound for bound in (low, high) if isinstance(bound, Symbol)]
    numbers = [bound for bound in (low, high) if isinstance(bound, NUMBERS)]
    if CATEGORY[kind] != FLOAT:
        return _clamp_integer(t, x, low, high, kind)
    if not tensors:
        if low is not None:
            x = t.binary("maximum", x, low, kind)
        return x if high is None else t.binary("minimum", x, high, kind)
    x = t.as_kind(x, kind)
    low, high = (None if bound is None else t.as_kind(bound, kind) for bound in (low, high))
    if not clamp_halves_at_tensors:
        return _clamp_passing(t, x, low, high)
    return (_clamp_stopping if numbers else _clamp_halving)(t, x, low, high)


def _clamp_integer(t: Tracer, x: Symbol, low: Any, high: Any, kind: str) -> Symbol:
    x = t.as_kind(x, kind)
    for operation, bound in (("maximum", low), ("minimum", high)):
        if bound is None or t.is_no_bound(kind, bound, operation):
            continue
        x = t.binary(operation, x, bound, kind)
    return x


def _clamp_passing(t: Tracer, x: Symbol, low: Symbol | None, high: Symbol | None) -> Symbol:
    """A clamp by tensors as torch differentiates it before 2.14: at a bound the whole gradient is
    x's, a NaN gets none, and bounds that meet get none of what lies below."""
    if low is not None and high is not None:
        low = t.where(low < high, low, t.unary("detach", low))
    if low is not None:
        x = t.where(x >= low, x, t.where(x < low, low, t.unary("detach", x + low)))
    if high is not None:
        x = t.where(x <= high, x, t.where(x > high, high, t.unary("detach", x + high)))
    return x


def _clamp_stopping(t: Tracer, x: Symbol, low: Symbol | None, high: Symbol | None) -> Symbol:
    """A clamp by a number and a tensor, which torch takes for a number, since 2.14: at a bound no
    gradient passes, nor at a NaN."""
    if low is not None:
        neither = t.unary("detach", t.binary("maximum", x, low, x.kind))
        x = t.where(x > low, x, t.where(x < low, low, neither))
    if high is not None:
        neither = t.unary("detach", t.binary("minimum", x, high, x.kind))
        x = t.where(x < high, x, t.where(x > high, high, neither))
    return x


def _clamp_halving(t: Tracer, x: Symbol, low: Symbol | None, high: Symbol | None) -> Symbol:
    """A clamp by tensors as torch differentiates it since 2.14: at a bound, x and the bound have
    half of the gradient each."""
    if high is None or low is None:
        if low is not None:
            return sharing(t, "maximum", x, low)
        assert high is not None
        return sharing(t, "minimum", x, high)
    apart, crossed = low < high, high < low
    ordered = low <= high
    # Neither holds where a bound is NaN: so is the result, and the gradient is x's.
    neither = t.unary("detach", low + high)
    inside = t.where(ordered, x, x + t.where(crossed, high, neither))
    inside = t.where((x == low) & apart, sharing(t, "maximum", x, low), inside)
    inside = t.where((x == high) & apart, sharing(t, "minimum", x, high), inside)
    below = t.where(ordered, low, t.where(crossed, high, neither))
    above = t.where(ordered | crossed, high, neither)
    return t.where(x < low, below, t.where(x > high, above, inside))


def sharing(t: Tracer, operation: str, x: Symbol, y: Symbol) -> Symbol:
    """A minimum or maximum whose operands have half of the gradient each at a tie. Against a
    number it would be a clamp."""
    x, y = (t.unary("detach", side) if t.is_number(side) else side for side in (x, y))
    return t.binary(operation, x, y, x.kind)


@SPELLED.named("clamp_min")
def clamp_min(t: Tracer, x: Any, min: Any) -> Symbol:
    return clamp(t, x, min)


@SPELLED.named("clamp_max")
def clamp_max(t: Tracer, x: Any, max: Any) -> Symbol:
    return clamp(t, x, None, max)


def extremum(operation: str, on_bools: str) -> Callable[..., Symbol]:
    def spelled(t: Tracer, x: Any, y: Any = None, *, dim: Any = None) -> Symbol:
        x = t.operand(x)
        if y is None or dim is not None:
            refuse(f"a reduction: torch.{operation} of one tensor", operation, "Give two.")
        y = t.operand(y)
        if not isinstance(x, Symbol) or not isinstance(y, Symbol):
            refuse(
                f"torch.{operation} of a Python number",
                f"torch.{operation}",
                "Use torch.clamp(x, min=...) or torch.clamp(x, max=...).",
            )
        kind = t.common_kind(x, y)
        if CATEGORY[kind] == FLOAT:
            return sharing(t, operation, t.as_kind(x, kind), t.as_kind(y, kind))
        return t.binary(on_bools if kind == "bool" else operation, x, y, kind)

    return spelled


OWN["maximum"] = extremum("maximum", "or")
OWN["minimum"] = extremum("minimum", "and")


@OWN.named("round")
def round_to(t: Tracer, x: Any, *, decimals: int = 0) -> Symbol:
    x = t.symbol(x)
    if CATEGORY[x.kind] != FLOAT:
        return x
    if isinstance(decimals, int) and decimals == 0:
        return t.unary("round", x)
    kind = x.kind
    x = t.as_kind(x, kind if kind == "f64" else "f32")  # torch rounds 16 bits in 32
    places = fixed(decimals)
    power_of_ten = t.constant(10 ** abs(places), x.kind)
    if places > 0:
        rounded = divide(t, t.unary("round", multiply(t, x, power_of_ten)), power_of_ten)
    else:
        rounded = multiply(t, t.unary("round", divide(t, x, power_of_ten)), power_of_ten)
    return t.as_kind(rounded, kind)


@OWN.named("sign")
def sign(t: Tracer, x: Any) -> Symbol:
    x = t.symbol(x)
    return x if x.kind == "bool" else t.unary("sign", x)


@SPELLED.named("isnan")
def is_nan(t: Tracer, x: Any) -> Symbol:
    x = t.symbol(x)
    return t.binary("ne", x, x, x.kind, "bool")


def equals_infinity(bound: float, sided: bool) -> Callable[..., Symbol]:
    def spelled(t: Tracer, x: Any) -> Symbol:
        x = t.symbol(x)
        if CATEGORY[x.kind] != FLOAT:
            return t.constant(False, "bool")
        value = x if sided else t.unary("abs", x)
        return t.binary("eq", value, t.constant(bound, x.kind), x.kind, "bool")

    return spelled


is_infinite = SPELLED["isinf"] = equals_infinity(math.inf, sided=False)
SPELLED["isposinf"] = equals_infinity(math.inf, sided=True)
SPELLED["isneginf"] = equals_infinity(-math.inf, sided=True)


@SPELLED.named("isfinite")
def is_finite(t: Tracer, x: Any) -> Symbol:
    x = t.symbol(x)
    if CATEGORY[x.kind] != FLOAT:
        return t.constant(True, "bool")
    return t.binary("lt", t.unary("abs", x), t.constant(float("inf"), x.kind), x.kind, "bool")


@SPELLED.named("isclose")
def is_close(
    t: Tracer, x: Any, y: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Symbol:
    x, y = t.symbol(x), t.symbol(y)
    difference = absolute(t, subtract(t, x, y))
    allowed = add(t, multiply(t, absolute(t, y), rtol), atol)
    near = ((difference <= allowed) & is_finite(t, y)) | (x == y)
    return near | (is_nan(t, x) & is_nan(t, y)) if equal_nan else near
