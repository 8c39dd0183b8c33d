"""Functions that are compositions of graph operations: activations, special functions.

Each keeps torch's value and torch's gradient: where a branch of a formula overflows, its operand
is made harmless first, since a `where` alone would still multiply an infinite derivative by zero.
Formulas are those of torch's documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from anyflex.mod_graph.torch_derivatives import fmax_halves_at_ties
from anyflex.tracing.arithmetic import is_infinite, sharing
from anyflex.tracing.symbol import CATEGORY, FLOAT, Spellings, Symbol
from anyflex.tracing.trace_errors import refuse
from anyflex.tracing.tracer import Tracer

__all__ = ["SPELLED"]

SPELLED = Spellings()
"""Name in torch, Tensor, torch.special or torch.nn.functional -> composition."""


def _float(t: Tracer, x: Any) -> Symbol:
    """Return `x` as a floating symbol."""
    x = t.symbol(x)
    return x if CATEGORY[x.kind] == FLOAT else t.as_kind(x, t.default_float)


def _floats(t: Tracer, x: Any, y: Any) -> tuple[Symbol, Symbol]:
    """Return both as floating symbols of their common type."""
    x, y = _float(t, x), _float(t, y)
    kind = t.common_kind(x, y)
    return t.as_kind(x, kind), t.as_kind(y, kind)


def _const(t: Tracer, x: Symbol, value: float) -> Symbol:
    return t.constant(value, x.kind)


@SPELLED.named("relu")
def relu(t: Tracer, x: Any, inplace: bool = False) -> Symbol:
    x = t.symbol(x)
    zero = t.constant(0, x.kind)
    return t.where(x <= zero, zero, x)


@SPELLED.named("hardtanh")
def hardtanh(
    t: Tracer, x: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False
) -> Symbol:
    x = _float(t, x)
    low, high = t.as_kind(t.operand(min_val), x.kind), t.as_kind(t.operand(max_val), x.kind)
    return t.where(x <= low, low, t.where(x >= high, high, x))


@SPELLED.named("relu6")
def relu6(t: Tracer, x: Any, inplace: bool = False) -> Symbol:
    x = _float(t, x)
    zero, six = _const(t, x, 0.0), _const(t, x, 6.0)
    return t.where(x <= zero, zero, t.where(x >= six, six, x))


@SPELLED.named("leaky_relu")
def leaky_relu(t: Tracer, x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Symbol:
    x = _float(t, x)
    return t.where(x > _const(t, x, 0.0), x, x * negative_slope)


def _expm1_below_zero(t: Tracer, x: Symbol) -> Symbol:
    zero = _const(t, x, 0.0)
    return t.floating("expm1", t.where(x > zero, zero, x))


@SPELLED.named("elu")
def elu(t: Tracer, x: Any, alpha: float = 1.0, inplace: bool = False) -> Symbol:
    x = _float(t, x)
    return t.where(x > _const(t, x, 0.0), x, _expm1_below_zero(t, x) * alpha)


@SPELLED.named("selu")
def selu(t: Tracer, x: Any, inplace: bool = False) -> Symbol:
    x = _float(t, x)
    alpha, scale = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
    low = _expm1_below_zero(t, x) * _const(t, x, alpha)
    return t.where(x > _const(t, x, 0.0), x, low) * _const(t, x, scale)


@SPELLED.named("celu")
def celu(t: Tracer, x: Any, alpha: float = 1.0, inplace: bool = False) -> Symbol:
    x = _float(t, x)
    zero = _const(t, x, 0.0)
    below = t.where(x > zero, zero, x)  # where x / alpha is positive if alpha isn't
    return t.where(x > zero, x, t.floating("expm1", below / alpha) * alpha)


@SPELLED.named("gelu")
def gelu(t: Tracer, x: Any, approximate: str = "none") -> Symbol:
    x = _float(t, x)
    if approximate == "tanh":
        inner = x + _const(t, x, 0.044715) * x * x * x
        return (
            _const(t, x, 0.5)
            * x
            * (
                _const(t, x, 1.0)
                + t.floating("tanh", inner * _const(t, x, math.sqrt(2.0 / math.pi)))
            )
        )
    if approximate != "none":
        refuse(f"gelu(approximate={approximate!r})", "gelu", "Use 'none' or 'tanh'.")
    return (
        _const(t, x, 0.5)
        * x
        * (_const(t, x, 1.0) + t.floating("erf", x * _const(t, x, math.sqrt(0.5))))
    )


@SPELLED.named("silu")
def silu(t: Tracer, x: Any, inplace: bool = False) -> Symbol:
    x = _float(t, x)
    return x * t.floating("sigmoid", x)


@SPELLED.named("softplus")
def softplus(t: Tracer, x: Any, beta: float = 1.0, threshold: float = 20.0) -> Symbol:
    x = _float(t, x)
    scaled = x * beta
    linear = scaled > threshold
    inside = t.where(linear, _const(t, x, 0.0), scaled)
    return t.where(linear, x, t.floating("log1p", t.floating("exp", inside)) / beta)


@SPELLED.named("mish")
def mish(t: Tracer, x: Any, inplace: bool = False) -> Symbol:
    x = _float(t, x)
    return x * t.floating("tanh", softplus(t, x))


@SPELLED.named("logsigmoid")
def log_sigmoid(t: Tracer, x: Any) -> Symbol:
    x = _float(t, x)
    zero = _const(t, x, 0.0)
    negative = x < zero
    decayed = t.floating("exp", t.where(negative, x, -x))
    return t.where(negative, x, zero) - t.floating("log1p", decayed)


@SPELLED.named("softsign")
def softsign(t: Tracer, x: Any) -> Symbol:
    x = _float(t, x)
    return x / (_const(t, x, 1.0) + t.unary("abs", x))


@SPELLED.named("tanhshrink")
def tanhshrink(t: Tracer, x: Any) -> Symbol:
    x = _float(t, x)
    return x - t.floating("tanh", x)


@SPELLED.named("hardsigmoid")
def hardsigmoid(t: Tracer, x: Any, inplace: bool = False) -> Symbol:
    x = _float(t, x)
    zero, one, three = (_const(t, x, value) for value in (0.0, 1.0, 3.0))
    middle = t.where(x >= three, one, (x + three) / _const(t, x, 6.0))
    return t.where(x <= _const(t, x, -3.0), zero, middle)


@SPELLED.named("hardswish")
def hardswish(t: Tracer, x: Any, inplace: bool = False) -> Symbol:
    x = _float(t, x)
    three, zero = _const(t, x, 3.0), _const(t, x, 0.0)
    below = x < three
    inside = t.where(below, x, zero)
    middle = inside * (inside + three) / _const(t, x, 6.0)
    # Not the constant 0: torch multiplies, so that -inf gives NaN.
    at_most = x <= _const(t, x, -3.0)
    return t.where(at_most, t.unary("detach", x) * zero, t.where(below, middle, x))


@SPELLED.named("softshrink")
def softshrink(t: Tracer, x: Any, lambd: float = 0.5) -> Symbol:
    x = _float(t, x)
    nothing = t.unary("detach", x) * _const(t, x, 0.0)  # NaN stays NaN
    inside = t.where(x < -_as(t, x, lambd), x + lambd, nothing)
    return t.where(x > lambd, x - lambd, inside)


def _as(t: Tracer, x: Symbol, value: Any) -> Symbol:
    return t.as_kind(t.operand(value), x.kind)


@SPELLED.named("threshold")
def threshold(t: Tracer, x: Any, threshold: float, value: float, inplace: bool = False) -> Symbol:
    x = t.symbol(x)
    return t.where(x <= _as(t, x, threshold), _as(t, x, value), x)


@SPELLED.named("reciprocal")
def reciprocal(t: Tracer, x: Any) -> Symbol:
    x = _float(t, x)
    return _const(t, x, 1.0) / x


def number_wins(comparison: str, on_bools: str) -> Callable[..., Symbol]:
    def spelled(t: Tracer, x: Any, y: Any) -> Symbol:
        x, y = t.symbol(x), t.symbol(y)
        kind = t.common_kind(x, y)
        x, y = t.as_kind(x, kind), t.as_kind(y, kind)
        if kind == "bool":
            return t.binary(on_bools, x, y, kind)
        chosen = t.binary(comparison, x, y, kind, "bool")
        if CATEGORY[kind] != FLOAT:
            return t.where(chosen, x, y)
        result = t.where(t.binary("or", chosen, y != y, "bool"), x, y)
        if fmax_halves_at_ties:
            result = t.where(x == y, sharing(t, "maximum", x, y), result)
        return result

    return spelled


SPELLED["fmax"] = number_wins("ge", "or")
SPELLED["fmin"] = number_wins("le", "and")


@SPELLED.named("nan_to_num")
def nan_to_num(
    t: Tracer, x: Any, nan: Any = 0.0, posinf: Any = None, neginf: Any = None
) -> Symbol:
    import torch

    x = t.symbol(x)
    if CATEGORY[x.kind] != FLOAT:
        return x
    largest = torch.finfo(x.dtype).max
    high = _const(t, x, largest) if posinf is None else _as(t, x, posinf)
    low = _const(t, x, -largest) if neginf is None else _as(t, x, neginf)
    infinite = _const(t, x, math.inf)
    number = t.where(x == infinite, high, t.where(x == -infinite, low, x))
    return t.where(x != x, _as(t, x, 0.0 if nan is None else nan), number)


@SPELLED.named("lerp")
def lerp(t: Tracer, x: Any, y: Any, weight: Any) -> Symbol:
    x, y = _float(t, x), t.symbol(y)
    weight = t.as_kind(t.operand(weight), x.kind)
    # From the nearer end, as torch: what is infinite at the other one may be its product with 0.
    near = t.unary("abs", weight) < _const(t, x, 0.5)
    end = t.where(near, x, y)
    part = t.where(near, weight, weight - _const(t, x, 1.0))
    return end + part * (y - x)


@SPELLED.named("heaviside")
def heaviside(t: Tracer, x: Any, values: Any) -> Symbol:
    x = t.symbol(x)
    zero, one = t.constant(0, x.kind), t.constant(1, x.kind)
    inside = t.where(x > zero, one, zero)
    return t.unary("detach", t.where(x == zero, t.as_kind(t.operand(values), x.kind), inside))


@SPELLED.named("signbit")
def sign_bit(t: Tracer, x: Any) -> Symbol:
    x = t.symbol(x)
    if CATEGORY[x.kind] != FLOAT:
        return t.binary("lt", x, t.constant(0, x.kind), x.kind, "bool")
    # atan2(-0.0, -1) is -pi and atan2(0.0, -1) is pi: the one operation that sees a zero's sign.
    angle = t.binary("atan2", x, _const(t, x, -1.0), x.kind)
    return t.binary("lt", angle, _const(t, x, 0.0), x.kind, "bool")


@SPELLED.named("copysign")
def copy_sign(t: Tracer, x: Any, y: Any) -> Symbol:
    x, y = t.symbol(x), t.symbol(y)
    kind = t.common_kind(x, y)
    x = _float(t, t.as_kind(x, kind))
    size = t.unary("abs", x)
    return t.where(sign_bit(t, y), t.unary("neg", size), size)


@SPELLED.named("frac")
def fraction(t: Tracer, x: Any) -> Symbol:
    x = _float(t, x)
    return x - t.unary("trunc", x)


def log_add(power: str, per_log: float) -> Callable[..., Symbol]:
    def spelled(t: Tracer, x: Any, y: Any) -> Symbol:
        x, y = _floats(t, x, y)
        high = t.where(x >= y, x, y)
        low = t.where(x >= y, y, x)
        equal_infinities = t.binary("and", x == y, is_infinite(t, x), "bool")
        zero = _const(t, x, 0.0)
        gap = t.where(equal_infinities, zero, low - high)
        rest = t.floating("log1p", t.floating(power, gap)) * _const(t, x, per_log)
        total = t.where(equal_infinities, x, high + rest)
        return t.where(t.binary("or", x != x, y != y, "bool"), x + y, total)

    return spelled


SPELLED["logaddexp"] = log_add("exp", 1.0)
SPELLED["logaddexp2"] = log_add("exp2", 1.0 / math.log(2.0))


@SPELLED.named("xlogy")
def x_log_y(t: Tracer, x: Any, y: Any) -> Symbol:
    x, y = _floats(t, x, y)
    zero, one = _const(t, x, 0.0), _const(t, x, 1.0)
    nothing = x == zero
    outside = t.binary("or", y <= zero, y == _const(t, x, math.inf), "bool")
    product = x * t.floating("log", t.where(t.binary("and", nothing, outside, "bool"), one, y))
    # 0 times a negative logarithm is -0.0, torch's 0 is positive.
    product = t.where(nothing, product + zero, product)
    # At 0, 0 the value is 0 and the second operand's slope NaN: 0 times that of a root.
    origin = t.binary("and", nothing, y == zero, "bool")
    return t.where(origin, x * t.floating("sqrt", t.where(origin, y, one)), product)


@SPELLED.named("hypot")
def hypot(t: Tracer, x: Any, y: Any) -> Symbol:
    x, y = (t.unary("abs", side) for side in _floats(t, x, y))
    zero, one, infinite = (_const(t, x, value) for value in (0.0, 1.0, math.inf))
    # An infinite side wins over a NaN, and its own slopes would be NaN.
    either = t.binary("or", x == infinite, y == infinite, "bool")
    x, y = t.where(either, zero, x), t.where(either, zero, y)
    high = t.where(x >= y, x, y)
    low = t.where(x >= y, y, x)
    ratio = low / t.where(high == zero, one, high)
    return t.where(either, infinite, high * t.floating("sqrt", one + ratio * ratio))


@SPELLED.named("ldexp")
def ldexp(t: Tracer, x: Any, y: Any) -> Symbol:
    x, y = _float(t, x), t.symbol(y)
    if CATEGORY[y.kind] == FLOAT:
        return x * t.floating("exp2", y)
    # An integer leaves the type as it is: two to its power is computed in float32 at least.
    wide = x.kind if x.kind == "f64" else "f32"
    return t.as_kind(t.as_kind(x, wide) * t.floating("exp2", t.as_kind(y, wide)), x.kind)


@SPELLED.named("sinc")
def sinc(t: Tracer, x: Any) -> Symbol:
    x = _float(t, x)
    zero, one = _const(t, x, 0.0), _const(t, x, 1.0)
    at_zero = x == zero
    angle = t.where(at_zero, one, x) * _const(t, x, math.pi)
    return t.where(at_zero, one, t.floating("sin", angle) / angle)


def converted(factor: float) -> Callable[..., Symbol]:
    def spelled(t: Tracer, x: Any) -> Symbol:
        x = _float(t, x)
        return x * _const(t, x, factor)

    return spelled


SPELLED["deg2rad"] = converted(math.pi / 180.0)
SPELLED["rad2deg"] = converted(180.0 / math.pi)


@SPELLED.named("logit")
def logit(t: Tracer, x: Any, eps: float | None = None) -> Symbol:
    x = _float(t, x)
    if eps is not None:
        low = _as(t, x, eps)
        high = _const(t, x, 1.0) - low
        x = t.where(x < low, low, t.where(x > high, high, x))
    # Not the logarithm of a quotient: its slope at 0 would be NaN.
    return t.floating("log", x) - t.floating("log1p", -x)


@SPELLED.named("ndtr")
def normal_distribution(t: Tracer, x: Any) -> Symbol:
    x = _float(t, x)
    return _const(t, x, 0.5) * t.floating("erfc", x * _const(t, x, -math.sqrt(0.5)))


@SPELLED.named("entr")
def entropy(t: Tracer, x: Any) -> Symbol:
    x = _float(t, x)
    zero, one = _const(t, x, 0.0), _const(t, x, 1.0)
    at_zero = x == zero
    product = -x * t.floating("log", t.where(at_zero, one, x))
    value = t.where(x < zero, _const(t, x, -math.inf), product)
    # At 0 the value is 0 and the slope infinite, as a root's.
    return t.where(at_zero, t.floating("sqrt", t.where(at_zero, x, one)), value)
