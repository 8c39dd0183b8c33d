"""Device functions that the text of mods calls: torch's operations in terms of ``tl``.

Only `triton.language` is used, elementwise, so that the same text serves NVIDIA, AMD and Intel,
any layout and the interpreter: libdevice has no tanh, pow or asin in the interpreter, and not the
same functions everywhere. Operands are tensors or scalars of one type, which broadcast. float16
and bfloat16 are held as float32 and rounded after each operation.

Accuracy in float32 is 1 to 4 ulp, in float64 that of the device's exp, log and sin; subnormal
results may be 0. Polynomials are weighted minimax fits (Lawson's iteration in double precision);
each states the relative error of the fit. Triton contracts ``a * b + c``: only `fused` relies on
it.

The interpreter computes with numpy: `fused` of float64 rounds twice there, and division, exp2 and
sqrt are exact where devices are a few ulp off.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "INTERPRETED",
    "accumulate",
    "accumulate_buckets",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bfloat16",
    "cosh",
    "erfc",
    "exp",
    "expm1",
    "float16",
    "floor_divide",
    "floor_divide_by",
    "fmod",
    "integer_floor_divide",
    "integer_fmod",
    "integer_mod",
    "integer_power",
    "log1p",
    "log10",
    "mod_by",
    "moved",
    "next_index",
    "place",
    "place_up",
    "power",
    "remainder",
    "round_to_even",
    "rsqrt",
    "shifted_left",
    "shifted_right",
    "sigmoid",
    "sign",
    "sinh",
    "spread",
    "tan",
    "tanh",
    "tanh_capped",
    "trunc",
    "truth",
]

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether numpy runs the functions."""


@triton.jit
def truth(x):
    """Return an int1 from a comparison of scalars. The interpreter still gives it the type that
    was compared, and makes a tile of that type of it; it also broadcasts two operands before it
    compares them."""
    if INTERPRETED:
        x = tl.where(x, tl.full((), True, tl.int1), tl.full((), False, tl.int1))
    return x


# Rounding


@triton.jit
def float16(x):
    """Round float32 to float16's values."""
    return tl.cast(tl.cast(x, tl.float16), tl.float32)


@triton.jit
def bfloat16(x):
    """Round float32 to bfloat16's values."""
    if INTERPRETED:
        # The interpreter's own conversion truncates.
        bits = tl.cast(x, tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        result = tl.where(x != x, x, tl.cast(rounded, tl.float32, bitcast=True))
    else:
        result = tl.cast(tl.cast(x, tl.bfloat16), tl.float32)
    return result


@triton.jit
def fused(x, y, z):
    """Return x * y + z, rounded once."""
    if INTERPRETED and x.dtype == tl.float32:
        wide = tl.cast(x, tl.float64) * tl.cast(y, tl.float64) + tl.cast(z, tl.float64)
        result = tl.cast(wide, tl.float32)
    else:
        result = tl.fma(x, y, z)
    return result


@triton.jit
def with_sign(size, x):
    """Return `size`, which is not negative, with the sign bit of `x`."""
    if x.dtype == tl.float64:
        bits = tl.cast(x, tl.int64, bitcast=True) & -0x8000000000000000
        result = tl.cast(tl.cast(size, tl.int64, bitcast=True) | bits, tl.float64, bitcast=True)
    else:
        bits = tl.cast(x, tl.int32, bitcast=True) & -0x80000000
        result = tl.cast(tl.cast(size, tl.int32, bitcast=True) | bits, tl.float32, bitcast=True)
    return result


@triton.jit
def trunc(x):
    return with_sign(tl.floor(tl.abs(x)), x)


@triton.jit
def round_to_even(x):
    size = tl.abs(x)
    # From 2^52 (2^23) on, the last bit counts ones, and the addition rounds halves to even.
    if x.dtype == tl.float64:
        rounded = tl.where(
            size < 4503599627370496.0, (size + 4503599627370496.0) - 4503599627370496.0, size
        )
    else:
        rounded = tl.where(size < 8388608.0, (size + 8388608.0) - 8388608.0, size)
    return with_sign(rounded, x)


@triton.jit
def sign(x):
    """Return -1, 0 or 1; 0 for NaN."""
    return tl.cast(x > 0, x.dtype) - tl.cast(x < 0, x.dtype)


# Division of floats


@triton.jit
def divided(x, y):
    """Return x / y, correctly rounded."""
    if x.dtype == tl.float64:
        result = x / y
    else:
        result = tl.div_rn(x, y)
    return result


@triton.jit
def fmod(x, y):
    """Return the remainder of trunc(x / y). Exact up to quotients of 2^48 (float64: 2^106)."""
    x, y = tl.broadcast(x, y)
    size, by = tl.abs(x), tl.abs(y)
    if INTERPRETED and x.dtype == tl.float64:
        rest = size % by
    else:
        rest = rest_of(size, by)
    # This also holds for an infinite divisor.
    rest = tl.where(size < by, size, rest)
    return with_sign(tl.abs(rest), x)


@triton.jit
def rest_of(size, by):
    """Return size - by floor(size / by); neither is negative."""
    # The remainder of a correctly rounded quotient is representable. A quotient too large for a
    # unit in its last place leaves a remainder of either sign, and the second step divides that.
    rest = fused(-tl.floor(divided(size, by)), by, size)
    rest = fused(-tl.floor(divided(rest, by)), by, rest)
    rest = tl.where(rest < 0.0, rest + by, rest)
    return tl.where(rest >= by, rest - by, rest)


@triton.jit
def remainder(x, y):
    """Return the remainder with the divisor's sign."""
    x, y = tl.broadcast(x, y)
    rest = fmod(x, y)
    return tl.where((rest != 0.0) & ((y < 0.0) != (rest < 0.0)), rest + y, rest)


@triton.jit
def floor_divide(x, y):
    """Return the integer nearest to (x - remainder) / y: division alone may round up to the next
    one."""
    x, y = tl.broadcast(x, y)
    rest = fmod(x, y)
    ratio = (x - rest) / y
    ratio = tl.where((rest != 0.0) & ((y < 0.0) != (rest < 0.0)), ratio - 1.0, ratio)
    whole = tl.floor(ratio)
    whole = tl.where(ratio - whole > 0.5, whole + 1.0, whole)
    direct = x / y
    whole = tl.where(ratio == 0.0, with_sign(tl.abs(ratio), direct), whole)
    return tl.where(y == 0.0, direct, whole)


# Integers


@triton.jit
def tamed(y):
    """Replace the divisors 0 and -1 by 1."""
    if y.dtype == tl.uint8:
        found = tl.where(y == 0, y * 0 + 1, y)
    else:
        found = tl.where((y == 0) | (y == -1), y * 0 + 1, y)
    return found


@triton.jit
def floor_divide_by(x, y):
    """Return x / y rounded down, for a divisor that is neither 0 nor -1."""
    found = x // y
    rest = x - found * y
    return found - tl.cast((rest != 0) & ((rest < 0) != (y < 0)), x.dtype)


@triton.jit
def integer_floor_divide(x, y):
    """Return x / y rounded down. Division by 0 gives any number; the minimum divided by -1
    wraps."""
    found = floor_divide_by(x, tamed(y))
    if y.dtype != tl.uint8:
        found = tl.where(y == -1, -x, found)
    return found


@triton.jit
def mod_by(x, y):
    """Return the remainder with the divisor's sign, for a divisor that is neither 0 nor -1."""
    rest = x % y
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


@triton.jit
def integer_mod(x, y):
    """Return the remainder with the divisor's sign. Division by 0 gives any number."""
    return mod_by(x, tamed(y))


@triton.jit
def integer_fmod(x, y):
    """Return the remainder with the dividend's sign. Division by 0 gives any number."""
    return x % tamed(y)


@triton.jit
def integer_power(x, y, DIGITS: tl.constexpr):
    """Return x ** y, wrapping; DIGITS is the number of bits of y without its sign. A negative y
    gives 0, except for x of 1 and -1."""
    result = x * 0 + 1
    square = x
    for bit in tl.static_range(DIGITS):
        result = tl.where(((y >> bit) & 1) != 0, result * square, result)
        square = square * square
    return tl.where((y < 0) & (x != 1) & (x + 1 != 0), result * 0, result)


@triton.jit
def shifted_left(x, y, BITS: tl.constexpr):
    """Return x << y; an amount outside the type's bits gives 0."""
    inside = (y >= 0) & (y < BITS)
    shifted = x << tl.where(inside, y, y * 0)
    return tl.where(inside, shifted, shifted * 0)


@triton.jit
def shifted_right(x, y, BITS: tl.constexpr):
    """Return x >> y; an amount outside the type's bits gives 0, or -1 for negative numbers."""
    inside = (y >= 0) & (y < BITS)
    shifted = x >> tl.where(inside, y, y * 0)
    return tl.where(inside, shifted, -tl.cast(x < 0, x.dtype))


# Exponentials and logarithms


@triton.jit
def exp(x):
    if x.dtype == tl.float64:
        result = tl.exp(x)
    else:
        # The result is 2^w, corrected by the rounding error of w.
        w = x * 1.4426950216293335
        lost = fused(x, 1.4426950216293335, -w) + x * 1.925962991126617e-08
        power_ = tl.exp2(w)
        change = power_ * (lost * 0.6931471805599453)
        result = tl.where(tl.abs(change) < float("inf"), power_ + change, power_)
    return result


@triton.jit
def expm1(x):
    if x.dtype == tl.float64:
        u = tl.exp(x)
        # Kahan's formula: the rounding error of u shows in its logarithm.
        inner = (u - 1.0) * (x / tl.log(u))
        result = tl.where(u == 1.0, x, tl.where((u > 1e300) | (u < 1e-17), u - 1.0, inner))
    else:
        y = tl.where(x > 89.0, 89.0, tl.where(x < -20.0, -20.0, x))
        n = tl.floor(y * 1.4426950408889634 + 0.5)
        # ln(2) in two parts; n times the first is exact.
        r = (y - n * 0.693115234375) - n * 3.1946184945309e-05
        # (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2: 1.4e-8 of e^r - 1.
        p = 0.008367186412215233 + r * 0.0013882388593629003
        p = 0.4999999701976776 + r * (0.16666539013385773 + r * (0.04166722297668457 + r * p))
        core = r + r * r * p
        # 2^(n - 1), for n may be 128; NaN has no n.
        exponent = tl.cast(tl.where(x == x, n, 0.0), tl.int32)
        half = tl.cast((exponent + 126) << 23, tl.float32, bitcast=True)
        total = core * half + (half - 0.5)
        result = tl.where(tl.abs(x) < 1e-10, x, total + total)
    return result


@triton.jit
def log1p(x):
    """Return log(u) x / (u - 1) with u = 1 + x, whose rounding cancels (Kahan)."""
    u = x + 1.0
    inner = tl.log(u) * (x / (u - 1.0))
    return tl.where(u == 1.0, x, tl.where(u == float("inf"), u, inner))


@triton.jit
def leading(x):
    """Return the first 12 bits (float64: 26). The expression for `x` is not contracted past
    this."""
    if x.dtype == tl.float64:
        bits = tl.cast(x, tl.int64, bitcast=True) & -0x8000000
        result = tl.cast(bits, tl.float64, bitcast=True)
    else:
        bits = tl.cast(x, tl.int32, bitcast=True) & -0x1000
        result = tl.cast(bits, tl.float32, bitcast=True)
    return result


@triton.jit
def log2_in_two(x):
    """Return (high, low), whose sum is log2(x) to some 36 bits, for finite float32 x > 0."""
    small = x < 1.1754943508222875e-38
    bits = tl.cast(tl.where(small, x * 16777216.0, x), tl.int32, bitcast=True)
    shifted = bits - 0x3F3504F3  # sqrt(1/2)
    n = tl.cast(shifted >> 23, tl.float32) - tl.where(small, 24.0, 0.0)
    m = tl.cast((shifted & 0x007FFFFF) + 0x3F3504F3, tl.float32, bitcast=True)
    # s = (m - 1) / (m + 1), in two parts; log(m) = 2 s + 2 s^3 / 3 + 2 s^5 / 5 + ...
    f = m - 1.0
    p = m + 1.0
    s = f / p
    s_low = (fused(-s, p, f) - s * (m - (p - 1.0))) / p
    z = s * s
    tail = 0.2857142857142857 + z * (0.2222222222222222 + z * 0.18181818181818182)
    tail = s * z * (0.6666666666666666 + z * (0.4 + z * tail))
    u = s + s
    head = leading(u * 1.4426950216293335)
    low = fused(u, 1.4426950216293335, -head) + u * 1.925962991126617e-08
    low = low + (s_low + s_low + tail) * 1.4426950408889634
    high = n + head
    return high, (head - (high - n)) + low


@triton.jit
def log10(x):
    if x.dtype == tl.float64:
        result = tl.log2(x) * 0.3010299956639812
    else:
        # The product has two parts, so that powers of 10 have integer logarithms.
        high, low = log2_in_two(x)
        head = leading(high * 0.3010300099849701)
        rest = fused(high, 0.3010300099849701, -head) - high * 1.4320988897563463e-08
        found = head + (rest + low * 0.3010299956639812)
        result = tl.where((x > 0.0) & (x < float("inf")), found, tl.log2(x))
    return result


@triton.jit
def rsqrt(x):
    if x.dtype == tl.float64:
        # The device's own function has few digits.
        result = 1.0 / tl.sqrt(x)
    else:
        result = tl.rsqrt(x)
    return result


@triton.jit
def is_negative(x):
    """Return the sign bit, a zero's included."""
    if x.dtype == tl.float64:
        bits = tl.cast(x, tl.int64, bitcast=True)
    else:
        bits = tl.cast(x, tl.int32, bitcast=True)
    return bits < 0


@triton.jit
def power(x, y):
    """Return x ** y with the special cases of C's pow. float64: |y log2(x)| times exp2's error."""
    x, y = tl.broadcast(x, y)
    size = tl.abs(x)
    if x.dtype == tl.float64:
        result = tl.exp2(y * tl.log2(size))
    else:
        high, low = log2_in_two(size)
        plain = (size > 0.0) & (size < float("inf"))
        # At 0 and infinity, and beyond 2^8, the result is 0, 1 or infinite.
        w = y * tl.where(plain, high, tl.log2(size))
        near = plain & (tl.abs(w) < 256.0)
        head = leading(tl.where(near, w, 0.0))
        rest = tl.where(near, fused(y, high, -head) + y * low, 0.0)
        k = tl.floor(head + 0.5)
        # 2^k is two factors, because neither k nor the result need be in range.
        half = tl.floor(k * 0.5)
        scaled = tl.exp2((head - k) + rest) * tl.exp2(half) * tl.exp2(k - half)
        result = tl.where(near, scaled, tl.exp2(w))
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) * 2.0 != y)
    result = tl.where(is_negative(x) & odd, result * -1.0, result)
    # Finite negative numbers have integer powers only; infinity counts as an integer.
    undefined = (x < 0.0) & (size < float("inf")) & (tl.floor(y) != y)
    result = tl.where(undefined, float("nan"), result)
    one = (y == 0.0) | (x == 1.0) | ((x == -1.0) & (tl.abs(y) == float("inf")))
    return tl.where(one, 1.0, result)


# Hyperbolic functions


@triton.jit
def tanh(x):
    """Return tanh(x) without a branch, by two slow instructions: a soft cap sends every score
    through it.

    A device's own instruction (`tanh.approx` is 2^-11 off) would be chosen here, by a constant.
    """
    size = tl.abs(x)
    if x.dtype == tl.float64:
        u = expm1(size * -2.0)
        found = (0.0 - u) / (u + 2.0)
    else:
        # 1 - 2 / (e^(2 |x|) + 1). A squared reciprocal square root is quicker than a division,
        # which checks its operands' ranges. An infinite power gives 1.
        root = tl.rsqrt(tl.exp2(size * 2.8853900817779268) + 1.0)
        far = 1.0 - 2.0 * (root * root)
        # tanh(x) / x - 1 in x^2 for |x| <= 0.55: 3.8e-8. 1 - 2 / (...) loses digits there.
        z = x * x
        p = 0.13320942223072052 + z * (-0.05268413573503494 + z * 0.016458744183182716)
        near = size + size * (z * (-0.33332958817481995 + z * p))
        found = tl.where(size < 0.55, near, far)
    return with_sign(found, x)


@triton.jit
def tanh_capped(x, number, cap, COARSE: tl.constexpr):
    """Return cap * tanh(number * x). Where COARSE the result is within 5e-7 * cap, which near 0 is
    fewer digits, for half the work: it has both numbers as factors anyway."""
    if COARSE:
        root = tl.rsqrt(tl.exp2(x * (number * 2.8853900817779268)) + 1.0)
        return cap - (2.0 * cap) * (root * root)
    else:
        return cap * tanh(number * x)


@triton.jit
def sigmoid(x):
    root = rsqrt(1.0 + exp(x * -1.0))
    return root * root


@triton.jit
def sinh(x):
    size = tl.abs(x)
    u = expm1(size)
    half = exp(size * 0.5)
    # e^|x| may overflow where half of it doesn't.
    found = tl.where(size > 80.0, half * 0.5 * half, (u + u / (u + 1.0)) * 0.5)
    return with_sign(found, x)


@triton.jit
def cosh(x):
    half = exp(tl.abs(x) * 0.5)
    return half * 0.5 * half + 0.5 / half / half


@triton.jit
def asinh(x):
    size = tl.abs(x)
    if x.dtype == tl.float64:
        large = size > 1e100
    else:
        large = size > 1e15
    small = tl.where(large, 0.0, size)
    square = small * small
    found = log1p(small + square / (1.0 + tl.sqrt(square + 1.0)))
    return with_sign(tl.where(large, tl.log(size) + 0.6931471805599453, found), x)


@triton.jit
def acosh(x):
    if x.dtype == tl.float64:
        large = x > 1e100
    else:
        large = x > 1e15
    t = tl.where(large, 0.0, x - 1.0)
    found = log1p(t + tl.sqrt(t * (t + 2.0)))
    found = tl.where(large, tl.log(x) + 0.6931471805599453, found)
    return tl.where(x < 1.0, float("nan"), found)


@triton.jit
def atanh(x):
    size = tl.abs(x)
    # The sum in log1p's argument cancels nothing: 2 |x| / (1 - |x|).
    return with_sign(log1p((size + size) / (1.0 - size)) * 0.5, x)


# Angles


@triton.jit
def tan(x):
    return tl.sin(x) / tl.cos(x)


@triton.jit
def atan_below_1(x):
    """Return atan(x) for 0 <= x <= 1."""
    if x.dtype == tl.float64:
        # The angle is halved twice, down to |x| < 0.2; then comes Taylor's series.
        x = x / (1.0 + tl.sqrt(1.0 + x * x))
        x = x / (1.0 + tl.sqrt(1.0 + x * x))
        z = x * x
        p = z * 0.0
        for k in tl.static_range(14):
            p = 1.0 / (27 - 2 * k) - z * p
        found = 4.0 * (x * p)
    else:
        # atan(x) / x - 1 in x^2: 1.9e-8.
        z = x * x
        p = 0.04355324059724808 + z * (-0.01658099703490734 + z * 0.002974543021991849)
        p = -0.14214205741882324 + z * (0.10678929090499878 + z * (-0.07580552995204926 + z * p))
        found = x + x * (z * (-0.3333316743373871 + z * (0.19994136691093445 + z * p)))
    return found


@triton.jit
def atan(x):
    size = tl.abs(x)
    steep = size > 1.0
    angle = atan_below_1(tl.where(steep, 1.0 / size, size))
    return with_sign(tl.where(steep, 1.5707963267948966 - angle, angle), x)


@triton.jit
def atan2(y, x):
    y, x = tl.broadcast(y, x)
    rise, run = tl.abs(y), tl.abs(x)
    steep = rise > run
    large = tl.where(steep, rise, run)
    ratio = tl.where(steep, run, rise) / large
    # The quotient is undefined for 0 / 0 and infinity / infinity.
    ratio = tl.where((rise == 0.0) & (run == 0.0), 0.0, ratio)
    ratio = tl.where((rise == float("inf")) & (run == float("inf")), 1.0, ratio)
    angle = atan_below_1(ratio)
    angle = tl.where(steep, 1.5707963267948966 - angle, angle)
    angle = tl.where(is_negative(x), 3.141592653589793 - angle, angle)
    return with_sign(angle, y)


@triton.jit
def asin(x):
    return atan(x / tl.sqrt((1.0 - x) * (1.0 + x)))


@triton.jit
def acos(x):
    return 2.0 * atan(tl.sqrt((1.0 - x) / (1.0 + x)))


# The error function's complement


@triton.jit
def erfc(x):
    """Return exp(-x^2) R(t) / (1 + 2 |x|), t = (|x| - 2) / (|x| + 2), as Cody and Johnson do."""
    size = tl.abs(x)
    if x.dtype == tl.float64:
        size = tl.where(size > 28.0, 28.0, size)
        t = (size - 2.0) / (size + 2.0)
        # 6.5e-16
        p = 1.2777066233549906e-07 + t * 3.915275365159061e-08
        p = -7.51304802524575e-07 + t * (-5.188682824519874e-08 + t * p)
        p = 1.3882214563498083e-06 + t * (-9.039938016727442e-07 + t * p)
        p = 3.7953024747336692e-06 + t * (5.354247264844784e-06 + t * p)
        p = -3.646092986300318e-05 + t * (-1.3546481255724777e-05 + t * p)
        p = 0.00015104965730469743 + t * (-1.4951570496272667e-06 + t * p)
        p = -0.00045434263504071646 + t * (0.0002063645335154812 + t * p)
        p = 0.0012713391466225917 + t * (-0.001456813627623531 + t * p)
        p = -0.008034015091737075 + t * (0.008722653851786824 + t * p)
        p = 0.16405128003363212 + t * (-0.05422000099101933 + t * p)
        p = -0.09276382658574671 + t * (-0.1660303976153083 + t * p)
        p = 1.2769783815525289 + t * p
    else:
        size = tl.where(size > 10.2, 10.2, size)
        t = (size - 2.0) / (size + 2.0)
        # 3.5e-8
        p = -0.0012280023656785488 + t * -0.0003994496073573828
        p = 0.008630097843706608 + t * (0.001313309883698821 + t * p)
        p = -0.054203882813453674 + t * (-0.008060143329203129 + t * p)
        p = -0.16603146493434906 + t * (0.16405542194843292 + t * p)
        p = 1.2769783735275269 + t * (-0.0927639827132225 + t * p)
    # The square has two parts, and the first is exact.
    head = leading(size)
    bell = exp(-head * head) * exp((head - size) * (head + size))
    found = bell * p / (1.0 + 2.0 * size)
    return tl.where(x < 0.0, 2.0 - found, found)


# Captured tensors


@triton.jit
def bound(size, index):
    """Return a size in the index's type. Dimensions from 2^31 on need an int64 index."""
    if index.dtype == tl.int32:
        size = tl.cast(tl.minimum(tl.cast(size, tl.int64), 0x7FFFFFFF), tl.int32)
    return size


@triton.jit
def index_bound(x):
    """Return x as int32. Beyond 2^29, which no index reaches, the result is any number beyond
    2^29."""
    return tl.cast(tl.minimum(tl.maximum(x, -(1 << 29)), 1 << 29), tl.int32)


@triton.jit
def place(index, size):
    """Wrap -size..-1 from the end, then clamp the index. Where the size is 0, the result is any
    number."""
    size = bound(size, index)
    index = tl.where(index < 0, index + size, index)
    return tl.maximum(tl.minimum(index, size - 1), 0)


@triton.jit
def place_up(index, size):
    """Return the `place` of an index that is never negative."""
    return tl.minimum(index, bound(size, index) - 1)


@triton.jit
def place_direct(index, size, WITHIN: tl.constexpr):
    """Return the `place_up` of one of the four indices: WITHIN, where all are inside, it is the
    index."""
    return index if WITHIN else place_up(index, size)


@triton.jit
def moved(pointer, place, stride):
    """Return the pointer moved by a place of one dimension."""
    return pointer + tl.cast(place, tl.int64) * tl.cast(stride, tl.int64)


@triton.jit
def moved_last(pointer, place, stride, WITHIN: tl.constexpr):
    """Return the pointer `moved` in the last dimension, whose stride is 1 WITHIN."""
    return pointer + place if WITHIN else moved(pointer, place, stride)


@triton.jit
def load_once(pointers, inside):
    """Load elements, 0 where not inside."""
    # Shapes are spelled out, because constexprs stop being constexpr when they get a name.
    if len(pointers.shape) == 1 and pointers.shape[0] < 256:
        return load_few(pointers, inside)
    elif len(pointers.shape) == 2 and pointers.shape[0] == 1 and pointers.shape[1] < 256:
        return load_few(tl.reshape(pointers, (pointers.shape[1],)), inside)[None, :]
    else:
        return tl.load(pointers, mask=inside, other=0)


@triton.jit
def load_few(pointers, inside):
    """Load [N] as `load_once` does, by copies: when elements are fewer than a program's threads,
    Triton makes each thread load all that its part of the scores needs, 16 of 64, one by one."""
    N: tl.constexpr = pointers.shape[0]
    copies = tl.broadcast_to(pointers[:, None], (N, 256 // N))
    found = tl.load(copies, mask=inside, other=0)
    # The copies are taken apart in registers: halves, then halves of those.
    for halved in tl.static_range(1, 8):
        if 256 // N >> halved > 1:
            found, _other = tl.split(tl.reshape(found, (N, 256 // N >> halved, 2)))
    found, _other = tl.split(found)
    return found


@triton.jit
def along(x, index):
    """Return values [R] of rows or columns in the shape of `index`, [R, 1] or [1, R]. Other
    values, like scalars, are returned unchanged."""
    if len(x.shape) != 1:
        return x
    elif index.shape[0] == 1:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def next_index(offset, size, place):
    """Return the offset in a contiguous tensor after one more dimension."""
    return offset * tl.cast(size, tl.int64) + tl.cast(place, tl.int64)


@triton.jit
def spread(x, score):
    """Return x as float32 in the shape of the score."""
    return tl.broadcast_to(tl.cast(x, tl.float32), score.shape)


@triton.jit
def power_of_2(exponent):
    """Return 2^exponent for an int32 from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scaled(x, exponent):
    """Return x times a power of two, whose exponent may be from -252 to 254."""
    half = exponent >> 1
    return x * power_of_2(half) * power_of_2(exponent - half)


@triton.jit
def exponent_above(x):
    """Return the exponent of the least power of two above a float32 that isn't negative, at least
    -126."""
    return (x.to(tl.int32, bitcast=True) >> 23) - 126


@triton.jit
def integer_shift(largest, count):
    """Return the exponent of two that makes additions integers whose sum stays within 2^62.

    Args:
        largest: bits of the largest addition.
        count: number of additions, int64.
    """
    headroom = tl.where(count > 0, exponent_above(count.to(tl.float32)), 0)
    return 62 - headroom - exponent_above(largest.to(tl.float32, bitcast=True))


@triton.jit
def accumulate(totals, LEARNED: tl.constexpr, offset, inside, value, live, SUMS: tl.constexpr):
    """Add value to totals[LEARNED][offset] where live, by atomic additions.

    Where offset is the same along an axis, the sum along that axis is added at once. `inside` is
    False where the tensor is empty.

    Args:
        totals: where SUMS is "floats", a pointer to float32 for each captured tensor that needs a
            gradient. Otherwise (`backward_call.total_launches`) pointers per such tensor follow:
            to integers, int64, to the bits of the largest addition, int32, and to the number of
            additions, int64, of each element.
        SUMS: "floats"; "bounds": finite additions are only measured and counted; "integers":
            finite additions are made to the integers.
    """
    value = tl.where(live, value, 0.0)
    if len(offset.shape) == 0:
        value = tl.sum(tl.sum(value, axis=1), axis=0)
    else:
        if offset.shape[0] == 1:
            value = tl.sum(value, axis=0, keep_dims=True)
        if offset.shape[1] == 1:
            value = tl.sum(value, axis=1, keep_dims=True)
    if SUMS == "floats":
        # A zero adds nothing, and NaN is not 0.
        kept = (value != 0.0) & inside
        tl.atomic_add(totals[LEARNED] + offset, value, mask=kept, sem="relaxed")
    else:
        COUNT: tl.constexpr = len(totals) // 4
        largest = totals[2 * COUNT + LEARNED] + offset
        counts = totals[3 * COUNT + LEARNED] + offset
        finite = tl.abs(value) < float("inf")
        known = tl.where(finite & inside, value, 0.0)
        if SUMS == "bounds":
            bits = tl.abs(known).to(tl.int32, bitcast=True)
            tl.atomic_max(largest, bits, mask=bits != 0, sem="relaxed")
            tl.atomic_add(counts, (bits != 0).to(tl.int64), mask=bits != 0, sem="relaxed")
        else:
            there = known != 0.0
            shift = integer_shift(
                tl.load(largest, mask=there, other=0), tl.load(counts, mask=there, other=0)
            )
            whole = round_to_even(scaled(known, shift)).to(tl.int64)
            integers = totals[COUNT + LEARNED] + offset
            tl.atomic_add(integers, whole, mask=whole != 0, sem="relaxed")
            nonfinite = ~finite & inside
            tl.atomic_add(totals[LEARNED] + offset, value, mask=nonfinite, sem="relaxed")


@triton.jit
def accumulate_buckets(
    totals, LEARNED: tl.constexpr, offset, inside, narrow, value, live, SUMS: tl.constexpr
):
    """Do what `accumulate` does, with one addition for each of the tile's first 32 offsets: many
    pairs have one offset, as in T5's table, and atomic additions to one element wait for each
    other.

    Args:
        narrow: whether int32 holds the offsets.
    """
    if SUMS == "floats":
        if narrow:
            done = 2147483647
            places = tl.where(live, tl.cast(offset, tl.int32), done)
            first = tl.min(tl.min(places, axis=1), axis=0)
            turn = 0
            while (first < done) & (turn < 32):
                here = places == first
                total = tl.sum(tl.sum(tl.where(here, value, 0.0), axis=1), axis=0)
                kept = (total != 0.0) & inside
                tl.atomic_add(totals[LEARNED] + first, total, mask=kept, sem="relaxed")
                places = tl.where(here, done, places)
                first = tl.min(tl.min(places, axis=1), axis=0)
                turn += 1
            if first < done:
                accumulate(totals, LEARNED, places, inside, value, places != done, SUMS)
        else:
            accumulate(totals, LEARNED, offset, inside, value, live, SUMS)
    else:
        accumulate(totals, LEARNED, offset, inside, value, live, SUMS)
