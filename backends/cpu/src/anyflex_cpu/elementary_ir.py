"""Elementary functions of 16 floats as inlined arithmetic, a few ulp from exact.

Argument reduction by Cody and Waite (Software Manual for the Elementary Functions, 1980).
Polynomials are weighted minimax fits (Lawson's iteration on Chebyshev points in double
precision); each states the relative error of the fit. Nothing here branches, and NaN, infinities
and zeros of both signs come out as torch's functions give them.
"""

from __future__ import annotations

import math

from anyflex_cpu.llvm_text import Emitter, Value

__all__ = [
    "copy_sign",
    "cosine",
    "error_function",
    "exponential",
    "exponential_base_2",
    "exponential_less_1",
    "hyperbolic_tangent",
    "logarithm",
    "logarithm_of_1_plus",
    "sigmoid",
    "sine",
]

# (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2: 1.4e-8 of e^r - 1.
_EXP = (
    0.4999999701976776,
    0.16666539013385773,
    0.04166722297668457,
    0.008367186412215233,
    0.0013882388593629003,
)
# (log(1 + f) - f + f^2 / 2) / f^3 for sqrt(1/2) <= 1 + f <= sqrt(2): 5.8e-9 of log(1 + f).
_LOG = (
    0.3333333134651184,
    -0.250008225440979,
    0.20001220703125,
    -0.16623327136039734,
    0.14201882481575012,
    -0.1316063553094864,
    0.1276085525751114,
    -0.07632271945476532,
)
# (sin(x) - x) / x^3 and (cos(x) - 1 + x^2 / 2) / x^4 in x^2 for |x| <= pi / 4: 3.8e-9, 1.2e-10.
_SIN = (-0.16666655242443085, 0.008332155644893646, -0.0001951463200384751)
_COS = (0.04166664555668831, -0.0013887309469282627, 2.443241282890085e-05)
# erf(x) / x - 1 in x^2 for |x| <= 0.92: 1.5e-8; log(erfc(x)) for 0.92 <= x <= 3.95: 1.5e-9 of erf.
_ERF = (
    0.12837915122509003,
    -0.3761249780654907,
    0.11281846463680267,
    -0.026767726987600327,
    0.0049948375672101974,
    -0.0005999437416903675,
)
_LOG_ERFC = (
    -0.00019567106210161,
    -1.1276756525039673,
    -0.6371822357177734,
    -0.10393162816762924,
    0.022226937115192413,
    -0.0030432220082730055,
    0.00019593775505200028,
)

# ln(2) in two floats; the first has 12 zero bits at the end, so that its product with a whole
# number up to 4096 is exact even where multiply-add rounds twice.
_LN2_HIGH = 0.693115234375
_LN2_LOW = math.log(2) - _LN2_HIGH
# Adding it leaves a whole number below 2^22, plus 127, in the low bits.
_MAGIC = 1.5 * 2**23 + 127


def copy_sign(e: Emitter, magnitude: Value, sign: Value) -> Value:
    return e.intrinsic("copysign", magnitude, sign)


def _clamped(e: Emitter, x: Value, low: float, high: float) -> Value:
    """Clamp x to low..high; NaN stays."""
    bottom, top = e.constant("float", low), e.constant("float", high)
    x = e.select(e.compare("olt", x, bottom), bottom, x)
    return e.select(e.compare("ogt", x, top), top, x)


def _to_whole(e: Emitter, x: Value, unit: float) -> tuple[Value, Value]:
    """(n, a pattern for `_power_of_2`): n is the whole number nearest to x unit, as a float."""
    magic = e.constant("float", _MAGIC)
    if e.fused:
        shifted = e.fma(x, e.constant("float", unit), magic)
    else:
        shifted = e.add(e.mul(x, e.constant("float", unit)), magic)
    return e.sub(shifted, magic), e.convert("bitcast", shifted, "i32")


def _power_of_2(e: Emitter, pattern: Value) -> Value:
    """2^n for -127 < n < 128."""
    exponent = e.op("shl", pattern, e.constant("i32", 23))
    return e.convert("bitcast", exponent, "float")


def _reduced(e: Emitter, x: Value) -> tuple[Value, Value, Value]:
    """(n, its pattern, r) with x = n ln(2) + r."""
    n, pattern = _to_whole(e, x, 1 / math.log(2))
    r = e.fma(n, e.constant("float", -_LN2_HIGH), x)
    return n, pattern, e.fma(n, e.constant("float", -_LN2_LOW), r)


def _core(e: Emitter, r: Value) -> Value:
    """e^r - 1 for |r| <= ln(2) / 2."""
    return e.fma(e.mul(r, r), e.polynomial(r, _EXP), r)


def _scaled(e: Emitter, p: Value, n: Value, pattern: Value) -> Value:
    """p 2^n, in two steps where the processor needs them, because 2^n may overflow or be
    denormal."""
    if "avx512f" in e.module.features:
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        vector = e.full("float")
        e.module.declare(name, vector, [vector, vector, vector, "i16", "i32"])
        return e.put(f"call {vector} @{name}({p}, {n}, {p}, i16 -1, i32 4)", "float")
    bias = e.constant("i32", 127)
    whole = e.sub(pattern, e.constant("i32", 0x4B400000 + 127))
    half = e.op("ashr", whole, e.constant("i32", 1))
    rest = e.sub(whole, half)
    p = e.mul(p, _power_of_2(e, e.add(half, bias)))
    return e.mul(p, _power_of_2(e, e.add(rest, bias)))


def exponential(e: Emitter, x: Value) -> Value:
    n, pattern, r = _reduced(e, _clamped(e, x, -104.5, 89.0))
    return _scaled(e, e.add(_core(e, r), e.constant("float", 1.0)), n, pattern)


def exponential_base_2(e: Emitter, x: Value) -> Value:
    x = _clamped(e, x, -151.0, 129.0)
    n, pattern = _to_whole(e, x, 1.0)
    r = e.mul(e.sub(x, n), e.constant("float", math.log(2)))
    return _scaled(e, e.add(_core(e, r), e.constant("float", 1.0)), n, pattern)


def exponential_less_1(e: Emitter, x: Value) -> Value:
    one = e.constant("float", 1.0)
    clamped = _clamped(e, x, -20.0, 89.0)
    _, pattern, r = _reduced(e, clamped)
    # 2^(n - 1), because n may be 128: e^x - 1 = 2 (2^(n-1) (e^r - 1) + (2^(n-1) - 1/2)).
    half = _power_of_2(e, e.sub(pattern, e.constant("i32", 1)))
    total = e.fma(_core(e, r), half, e.sub(half, e.constant("float", 0.5)))
    result = e.add(total, total)
    # Keeps -0.0 and the denormals as they are.
    tiny = e.compare("olt", e.intrinsic("fabs", x), e.constant("float", 1e-10))
    over = e.compare("ogt", x, e.constant("float", 88.8))
    result = e.select(over, e.add(x, e.constant("float", math.inf)), result)
    return e.select(tiny, x, e.select(e.compare("uno", x, x), e.add(x, one), result))


def hyperbolic_tangent(e: Emitter, x: Value) -> Value:
    """t / (t + 1) with t = (e^(2 |x|) - 1) / 2: 2 ulp."""
    size = e.intrinsic("fabs", x)
    # Beyond it the result rounds to 1. NaN stays.
    top = e.constant("float", 9.02)
    size = e.select(e.compare("ogt", size, top), top, size)
    n, pattern = _to_whole(e, size, 2 / math.log(2))
    # One step is enough: n is small, or the error doesn't reach the result.
    r = e.fma(n, e.constant("float", -math.log(2) / 2), size)
    # (e^(2 r) - 1) / 2
    core = [2.0 * 2.0**k * coefficient for k, coefficient in enumerate(_EXP)]
    near = e.fma(e.mul(r, r), e.polynomial(r, core), r)
    power = _power_of_2(e, pattern)
    half = e.constant("float", 0.5)
    t = e.fma(near, power, e.fma(power, half, e.constant("float", -0.5)))
    return copy_sign(e, e.div(t, e.add(t, e.constant("float", 1.0))), x)


def sigmoid(e: Emitter, x: Value) -> Value:
    one = e.constant("float", 1.0)
    return e.div(one, e.add(one, exponential(e, e.negate(x))))


def _split(e: Emitter, x: Value) -> tuple[Value, Value]:
    """(n, f) with x = 2^n (1 + f), sqrt(1/2) <= 1 + f < sqrt(2); for normal positive x."""
    bits = e.convert("bitcast", x, "i32")
    origin = e.constant("i32", 0x3F3504F3)  # sqrt(1/2)
    shifted = e.sub(bits, origin)
    exponent = e.op("ashr", shifted, e.constant("i32", 23))
    mantissa = e.add(e.op("and", shifted, e.constant("i32", 0x007FFFFF)), origin)
    f = e.sub(e.convert("bitcast", mantissa, "float"), e.constant("float", 1.0))
    return e.convert("sitofp", exponent, "float"), f


def _log_core(e: Emitter, f: Value, n: Value, units: tuple[float, float, float]) -> Value:
    """(log(1 + f) + n ln(2)) units[0]; units[1] + units[2] are ln(2) units[0]."""
    square = e.mul(f, f)
    tail = e.mul(e.mul(square, f), e.polynomial(f, _LOG))
    tail = e.fma(square, e.constant("float", -0.5), tail)
    unit, high, low = units
    if unit == 1.0:
        tail = e.add(tail, e.mul(n, e.constant("float", low)))
        return e.fma(n, e.constant("float", high), e.add(f, tail))
    # Takes f unit and its rounding error apart, or log10(1 + f) loses digits.
    unit_high = e.constant("float", unit)
    head = e.mul(f, unit_high)
    lost = e.fma(f, unit_high, e.negate(head)) if e.fused else e.constant("float", 0.0)
    tail = e.fma(tail, unit_high, e.add(lost, e.mul(n, e.constant("float", low))))
    return e.add(e.fma(n, e.constant("float", high), head), tail)


_UNITS = {
    "log": (1.0, _LN2_HIGH, _LN2_LOW),
    "log2": (1 / math.log(2), 1.0, 0.0),
    "log10": (1 / math.log(10), 0.301025390625, math.log10(2) - 0.301025390625),
}


def _edges(e: Emitter, x: Value, result: Value) -> Value:
    """The logarithm of 0, infinity, negative numbers and NaN."""
    zero = e.constant("float", 0.0)
    infinity = e.constant("float", math.inf)
    result = e.select(e.compare("oeq", x, infinity), x, result)
    result = e.select(e.compare("oeq", x, zero), e.negate(infinity), result)
    return e.select(e.compare("ult", x, zero), e.constant("float", math.nan), result)


def logarithm(e: Emitter, x: Value, kind: str) -> Value:
    """`kind` is log, log2 or log10."""
    # Scales denormals up by 2^24.
    small = e.compare("olt", x, e.constant("float", 2.0**-126))
    raised = e.select(small, e.mul(x, e.constant("float", 2.0**24)), x)
    n, f = _split(e, raised)
    n = e.sub(n, e.select(small, e.constant("float", 24.0), e.constant("float", 0.0)))
    return _edges(e, x, _log_core(e, f, n, _UNITS[kind]))


def logarithm_of_1_plus(e: Emitter, x: Value) -> Value:
    one = e.constant("float", 1.0)
    u = e.add(one, x)
    n, f = _split(e, u)
    # Residual of 1 + x, over 1 + x: log(1 + x) = log(u) + lost / u.
    difference = e.sub(u, x)
    lost = e.add(e.sub(x, e.sub(u, difference)), e.sub(one, difference))
    result = e.add(_log_core(e, f, n, _UNITS["log"]), e.div(lost, u))
    result = _edges(e, u, result)
    tiny = e.compare("olt", e.intrinsic("fabs", x), e.constant("float", 2.0**-25))
    return e.select(tiny, x, result)


def _turned(e: Emitter, x: Value, quarters: int) -> Value:
    """sin(x + quarters pi / 2) for |x| < 2^28; the reduction is done in double."""
    wide = e.convert("fpext", x, "double")
    n = e.intrinsic("rint", e.mul(wide, e.constant("double", 2 / math.pi)))
    r = e.fma(n, e.constant("double", -math.pi / 2), wide)
    r = e.fma(n, e.constant("double", -6.123233995736766e-17), r)
    y = e.convert("fptrunc", r, "float")
    turns = e.add(e.to_integer(n, "i32"), e.constant("i32", quarters))
    square = e.mul(y, y)
    sine_ = e.fma(e.mul(square, y), e.polynomial(square, _SIN), y)
    half = e.fma(square, e.constant("float", -0.5), e.constant("float", 1.0))
    cosine_ = e.fma(e.mul(square, square), e.polynomial(square, _COS), half)
    odd = e.compare("ne", e.op("and", turns, e.constant("i32", 1)), e.constant("i32", 0))
    value = e.convert("bitcast", e.select(odd, cosine_, sine_), "i32")
    sign = e.op("shl", e.op("and", turns, e.constant("i32", 2)), e.constant("i32", 30))
    return e.convert("bitcast", e.op("xor", value, sign), "float")


LARGEST_ANGLE = 2.0**28
"""Largest |x| for which sine and cosine hold."""


def sine(e: Emitter, x: Value) -> Value:
    zero = e.compare("oeq", x, e.constant("float", 0.0))
    return e.select(zero, x, _turned(e, x, 0))


def cosine(e: Emitter, x: Value) -> Value:
    return _turned(e, x, 1)


def error_function(e: Emitter, x: Value) -> Value:
    size = e.intrinsic("fabs", x)
    square = e.mul(x, x)
    near = e.fma(x, e.polynomial(square, _ERF), x)
    top = e.constant("float", 3.95)
    capped = e.select(e.compare("ogt", size, top), top, size)
    # At most 0, so that 1 - e^y needs the lower clamp alone.
    y = e.polynomial(capped, _LOG_ERFC)
    _, pattern, r = _reduced(e, y)
    power = _power_of_2(e, pattern)
    less = e.fma(_core(e, r), power, e.sub(power, e.constant("float", 1.0)))
    far = copy_sign(e, e.negate(less), x)
    return e.select(e.compare("olt", size, e.constant("float", 0.92)), near, far)
