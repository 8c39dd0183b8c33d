"""Device functions that the text of mods calls: torch's operations in Metal.

Only what Metal defines exactly is taken from its library, and exp2, rsqrt, sin and cos: the rest
are own polynomials, so that an emulator executes the arithmetic of a GPU. A function's text
is emitted only where it is called (`functions_for`). Names begin with ``op_``, which no name of
Metal's library does.

float16 and bfloat16 are held as float32 and rounded after each operation; narrow integers are
computed as int and cast back. Accuracy in float32 is 1 to 4 ulp where Metal's own functions are
right to one; subnormal results may be 0.
Polynomials are weighted minimax fits (Lawson's iteration in double precision); each states the
relative error of the fit. Kernels forbid contraction, so each `fma` is spelled out.
"""

from __future__ import annotations

import re

__all__ = ["EXACT_WORDS", "FUNCTIONS", "functions_for"]

EXACT_WORDS = 5
"""Number of uint words that an element's exact sum takes: the sum's low and high half, the bits
of the largest addition, the low and high half of the number of additions."""

_FLOATS = """\
static inline float op_minimum(float x, float y) {
  return x != x || x < y ? x : y;
}

static inline float op_maximum(float x, float y) {
  return x != x || x > y ? x : y;
}

// A number outside of the type becomes its nearest one, NaN the least.
static inline int op_to_int(float x) {
  if (!(x > -2147483648.0f)) {
    return -2147483647 - 1;
  }
  return x < 2147483648.0f ? (int)x : 2147483647;
}

static inline long op_to_long(float x) {
  if (!(x > -9223372036854775808.0f)) {
    return -9223372036854775807L - 1L;
  }
  return x < 9223372036854775808.0f ? (long)x : 9223372036854775807L;
}

// size - by floor(size / by); neither is negative. The remainder of a correctly rounded quotient
// is representable. A quotient too large for a unit in its last place leaves a remainder of either
// sign, and the second step divides that.
static inline float op_rest_of(float size, float by) {
  float rest = fma(-floor(size / by), by, size);
  rest = fma(-floor(rest / by), by, rest);
  return rest < 0.0f ? rest + by : rest;
}

// The remainder of trunc(x / y). Exact up to quotients of 2^48, and for an infinite divisor.
static inline float op_fmod(float x, float y) {
  const float size = fabs(x);
  const float by = fabs(y);
  const float rest = size < by ? size : op_rest_of(size, by);
  return copysign(fabs(rest), x);
}

// The remainder with the divisor's sign.
static inline float op_remainder(float x, float y) {
  const float rest = op_fmod(x, y);
  return rest != 0.0f && (y < 0.0f) != (rest < 0.0f) ? rest + y : rest;
}

// The integer nearest to (x - remainder) / y: division alone may round up to the next one.
static inline float op_floor_divide(float x, float y) {
  const float rest = op_fmod(x, y);
  const float direct = x / y;
  float ratio = (x - rest) / y;
  ratio = rest != 0.0f && (y < 0.0f) != (rest < 0.0f) ? ratio - 1.0f : ratio;
  float whole = floor(ratio);
  whole = ratio - whole > 0.5f ? whole + 1.0f : whole;
  whole = ratio == 0.0f ? copysign(0.0f, direct) : whole;
  return y == 0.0f ? direct : whole;
}

// 2^w, corrected by the rounding error of w. The correction alone may be subnormal, and it is NaN
// where x or the power is infinite.
static inline float op_exp(float x) {
  const float w = x * 1.4426950216293335f;
  const float lost = fma(x, 1.925962991126617e-08f, fma(x, 1.4426950216293335f, -w));
  const float power = precise::exp2(w);
  const float corrected = fma(power, lost * 0.6931471805599453f, power);
  return corrected == corrected ? corrected : power;
}

static inline float op_expm1(float x) {
  const float y = x > 89.0f ? 89.0f : x < -20.0f ? -20.0f : x;
  const float n = floor(fma(y, 1.4426950408889634f, 0.5f));
  // ln(2) in two parts; n times the first is exact.
  const float r = fma(n, -3.1946184945309e-05f, fma(n, -0.693115234375f, y));
  // (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2: 1.4e-8 of e^r - 1.
  float p = fma(r, 0.0013882388593629003f, 0.008367186412215233f);
  p = fma(r, p, 0.04166722297668457f);
  p = fma(r, p, 0.16666539013385773f);
  p = fma(r, p, 0.4999999701976776f);
  const float core = fma(r * r, p, r);
  // 2^(n - 1), for n may be 128; NaN has no n.
  const int exponent = x == x ? (int)n : 0;
  const float half_power = as_type<float>((exponent + 126) << 23);
  const float total = fma(core, half_power, half_power - 0.5f);
  return fabs(x) < 1e-10f ? x : total + total;
}

// The first 12 bits.
static inline float op_leading(float x) {
  return as_type<float>(as_type<uint>(x) & 0xfffff000u);
}

// Two numbers whose sum is log2(x) to some 36 bits, for finite x > 0.
static inline float2 op_log2_in_two(float x) {
  const bool small = x < 1.1754943508222875e-38f;
  const uint bits = as_type<uint>(small ? x * 16777216.0f : x);
  const int shifted = (int)(bits - 0x3f3504f3u);  // sqrt(1/2)
  const float n = (float)(shifted >> 23) - (small ? 24.0f : 0.0f);
  const float m = as_type<float>((shifted & 0x007fffff) + 0x3f3504f3);
  // s = (m - 1) / (m + 1), in two parts; log(m) = 2 s + 2 s^3 / 3 + 2 s^5 / 5 + ...
  const float f = m - 1.0f;
  const float p = m + 1.0f;
  const float s = f / p;
  const float s_low = fma(-s, m - (p - 1.0f), fma(-s, p, f)) / p;
  const float z = s * s;
  float tail = fma(z, 0.18181818181818182f, 0.2222222222222222f);
  tail = fma(z, tail, 0.2857142857142857f);
  tail = fma(z, tail, 0.4f);
  tail = fma(z, tail, 0.6666666666666666f);
  tail = s * z * tail;
  const float u = s + s;
  const float head = op_leading(u * 1.4426950216293335f);
  float low = fma(u, 1.925962991126617e-08f, fma(u, 1.4426950216293335f, -head));
  low = fma(s_low + s_low + tail, 1.4426950408889634f, low);
  const float high = n + head;
  return float2(high, (head - (high - n)) + low);
}

// log2(x) times a number, which is given in two parts, for log2(x) in two parts: powers of 10 have
// integer logarithms.
static inline float op_scaled_log2(float x, float number, float lower) {
  const float2 parts = op_log2_in_two(x);
  const float head = op_leading(parts.x * number);
  const float rest = fma(parts.x, lower, fma(parts.x, number, -head));
  const float found = head + fma(parts.y, number, rest);
  return x > 0.0f && x < INFINITY ? found : precise::log2(x);
}

// Powers of two have integer logarithms, which Metal's own function may miss by some ulp.
static inline float op_log2(float x) {
  const float2 parts = op_log2_in_two(x);
  return x > 0.0f && x < INFINITY ? parts.x + parts.y : precise::log2(x);
}

static inline float op_log(float x) {
  return op_scaled_log2(x, 0.6931471824645996f, -1.904654323148236e-09f);
}

static inline float op_log10(float x) {
  return op_scaled_log2(x, 0.3010300099849701f, -1.4320988897563463e-08f);
}

// log(u) x / (u - 1) with u = 1 + x, whose rounding cancels (Kahan).
static inline float op_log1p(float x) {
  const float u = x + 1.0f;
  const float inner = op_log(u) * (x / (u - 1.0f));
  return u == 1.0f ? x : u == INFINITY ? u : inner;
}

static inline bool op_is_odd(float y) {
  return floor(y) == y && floor(y * 0.5f) * 2.0f != y;
}

// x ** y with the special cases of C's pow.
static inline float op_power(float x, float y) {
  const float size = fabs(x);
  const bool plain = size > 0.0f && size < INFINITY;
  const float2 parts = op_log2_in_two(size);
  // At 0 and infinity, and beyond 2^8, the result is 0, 1 or infinite.
  const float w = y * (plain ? parts.x : precise::log2(size));
  const bool near = plain && fabs(w) < 256.0f;
  const float head = op_leading(near ? w : 0.0f);
  const float rest = near ? fma(y, parts.y, fma(y, parts.x, -head)) : 0.0f;
  const float k = floor(head + 0.5f);
  // 2^k is two factors, because neither k nor the result need be in range.
  const float first = floor(k * 0.5f);
  const float fraction = precise::exp2((head - k) + rest);
  const float scaled = fraction * precise::exp2(first) * precise::exp2(k - first);
  float result = near ? scaled : precise::exp2(w);
  result = as_type<int>(x) < 0 && op_is_odd(y) ? -result : result;
  // Finite negative numbers have integer powers only; infinity counts as an integer.
  result = x < 0.0f && size < INFINITY && floor(y) != y ? NAN : result;
  const bool one = y == 0.0f || x == 1.0f || (x == -1.0f && fabs(y) == INFINITY);
  return one ? 1.0f : result;
}

// 1 - 2 / (e^(2 |x|) + 1), without a branch: a soft cap sends every score through it. A squared
// reciprocal square root is quicker than a division. An infinite power gives 1.
static inline float op_tanh(float x) {
  const float size = fabs(x);
  const float root = precise::rsqrt(precise::exp2(size * 2.8853900817779268f) + 1.0f);
  const float far = fma(root * root, -2.0f, 1.0f);
  // tanh(x) / x - 1 in x^2 for |x| <= 0.55: 3.8e-8. 1 - 2 / (...) loses digits there.
  const float z = x * x;
  float p = fma(z, 0.016458744183182716f, -0.05268413573503494f);
  p = fma(z, p, 0.13320942223072052f);
  p = fma(z, p, -0.33332958817481995f);
  return copysign(size < 0.55f ? fma(size, z * p, size) : far, x);
}

static inline float op_sigmoid(float x) {
  return 1.0f / (1.0f + op_exp(-x));
}

static inline float op_sinh(float x) {
  const float size = fabs(x);
  const float u = op_expm1(size);
  const float half_power = op_exp(size * 0.5f);
  // e^|x| may overflow where half of it doesn't.
  const float found =
      size > 80.0f ? half_power * 0.5f * half_power : (u + u / (u + 1.0f)) * 0.5f;
  return copysign(found, x);
}

static inline float op_cosh(float x) {
  const float half_power = op_exp(fabs(x) * 0.5f);
  return half_power * 0.5f * half_power + 0.5f / half_power / half_power;
}

static inline float op_asinh(float x) {
  const float size = fabs(x);
  const bool large = size > 1e15f;
  const float some = large ? 0.0f : size;
  const float square = some * some;
  const float found = op_log1p(some + square / (1.0f + precise::sqrt(square + 1.0f)));
  return copysign(large ? op_log(size) + 0.6931471805599453f : found, x);
}

static inline float op_acosh(float x) {
  const bool large = x > 1e15f;
  const float t = large ? 0.0f : x - 1.0f;
  const float found = op_log1p(t + precise::sqrt(t * (t + 2.0f)));
  return x < 1.0f ? NAN : large ? op_log(x) + 0.6931471805599453f : found;
}

// The sum in log1p's argument cancels nothing: 2 |x| / (1 - |x|).
static inline float op_atanh(float x) {
  const float size = fabs(x);
  return copysign(op_log1p((size + size) / (1.0f - size)) * 0.5f, x);
}

static inline float op_tan(float x) {
  return precise::sin(x) / precise::cos(x);
}

// atan(x) for 0 <= x <= 1; atan(x) / x - 1 in x^2: 1.9e-8.
static inline float op_atan_below_1(float x) {
  const float z = x * x;
  float p = fma(z, 0.002974543021991849f, -0.01658099703490734f);
  p = fma(z, p, 0.04355324059724808f);
  p = fma(z, p, -0.07580552995204926f);
  p = fma(z, p, 0.10678929090499878f);
  p = fma(z, p, -0.14214205741882324f);
  p = fma(z, p, 0.19994136691093445f);
  p = fma(z, p, -0.3333316743373871f);
  return fma(x, z * p, x);
}

static inline float op_atan(float x) {
  const float size = fabs(x);
  const bool steep = size > 1.0f;
  const float angle = op_atan_below_1(steep ? 1.0f / size : size);
  return copysign(steep ? 1.5707963267948966f - angle : angle, x);
}

static inline float op_atan2(float y, float x) {
  const float rise = fabs(y);
  const float run = fabs(x);
  const bool steep = rise > run;
  float ratio = (steep ? run : rise) / (steep ? rise : run);
  // The quotient is undefined for 0 / 0 and infinity / infinity.
  ratio = rise == 0.0f && run == 0.0f ? 0.0f : ratio;
  ratio = rise == INFINITY && run == INFINITY ? 1.0f : ratio;
  float angle = op_atan_below_1(ratio);
  angle = steep ? 1.5707963267948966f - angle : angle;
  angle = as_type<int>(x) < 0 ? 3.141592653589793f - angle : angle;
  return copysign(angle, y);
}

static inline float op_asin(float x) {
  return op_atan(x / precise::sqrt((1.0f - x) * (1.0f + x)));
}

static inline float op_acos(float x) {
  return 2.0f * op_atan(precise::sqrt((1.0f - x) / (1.0f + x)));
}

// erf(x) for |x| <= 0.85; erf(x) / x - 1 in x^2: 6.8e-9.
static inline float op_erf_near_0(float x) {
  const float z = x * x;
  float p = fma(z, -0.0006348518654704094f, 0.0050577037036418915f);
  p = fma(z, p, -0.026807287707924843f);
  p = fma(z, p, 0.11282864958047867f);
  p = fma(z, p, -0.37612590193748474f);
  p = fma(z, p, 0.12837916612625122f);
  return fma(x, p, x);
}

// exp(-x^2) R(t) / (1 + 2 |x|), t = (|x| - 2) / (|x| + 2), as Cody and Johnson do.
static inline float op_erfc(float x) {
  const float size = fabs(x) > 10.2f ? 10.2f : fabs(x);
  const float t = (size - 2.0f) / (size + 2.0f);
  // 3.5e-8
  float p = fma(t, -0.0003994496073573828f, -0.0012280023656785488f);
  p = fma(t, p, 0.001313309883698821f);
  p = fma(t, p, 0.008630097843706608f);
  p = fma(t, p, -0.008060143329203129f);
  p = fma(t, p, -0.054203882813453674f);
  p = fma(t, p, 0.16405542194843292f);
  p = fma(t, p, -0.16603146493434906f);
  p = fma(t, p, -0.0927639827132225f);
  p = fma(t, p, 1.2769783735275269f);
  // The square has two parts, and the first is exact.
  const float head = op_leading(size);
  const float bell = op_exp(-head * head) * op_exp((head - size) * (head + size));
  const float found = bell * p / fma(size, 2.0f, 1.0f);
  // NaN is in no range.
  return size < 0.47f ? 1.0f - op_erf_near_0(x) : x < 0.0f ? 2.0f - found : found;
}

// Beyond 0.85, 1 - erfc(|x|) loses no digits.
static inline float op_erf(float x) {
  const float size = fabs(x);
  return copysign(size < 0.85f ? op_erf_near_0(size) : 1.0f - op_erfc(size), x);
}
"""

_INTEGERS = """\
// x / y rounded down, for a divisor that is neither 0 nor -1.
static inline INT op_floor_divide_by_INT(INT x, INT y) {
  const INT found = x / y;
  const INT rest = x - found * y;
  return rest != 0 && (rest < 0) != (y < 0) ? found - 1 : found;
}

// x / y rounded down. Division by 0 gives any number; the minimum divided by -1 wraps.
static inline INT op_floor_divide_INT(INT x, INT y) {
  const INT tamed = y == 0 || y == -1 ? 1 : y;
  return y == -1 ? (INT)((UINT)0 - (UINT)x) : op_floor_divide_by_INT(x, tamed);
}

// The remainder with the divisor's sign, for a divisor that is neither 0 nor -1.
static inline INT op_mod_by_INT(INT x, INT y) {
  const INT rest = x % y;
  return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}

// The remainder with the divisor's sign. Division by 0 gives any number.
static inline INT op_mod_INT(INT x, INT y) {
  return op_mod_by_INT(x, y == 0 || y == -1 ? 1 : y);
}

// The remainder with the dividend's sign. Division by 0 gives any number.
static inline INT op_fmod_INT(INT x, INT y) {
  return x % (y == 0 || y == -1 ? 1 : y);
}

// x ** y, wrapping. A negative y gives 0, except for x of 1 and -1.
static inline INT op_power_INT(INT x, INT y) {
  if (y < 0 && x != 1 && x != -1) {
    return 0;
  }
  UINT result = 1;
  UINT square = (UINT)x;
  // A negative y is a larger number of the same parity, which decides the powers of 1 and -1.
  for (UINT rest = (UINT)y; rest != 0; rest >>= 1) {
    result = (rest & 1) != 0 ? result * square : result;
    square = square * square;
  }
  return (INT)result;
}

// x << y; an amount outside of the type's bits gives 0.
static inline INT op_shifted_left_INT(INT x, INT y, int bits) {
  return y >= 0 && y < bits ? (INT)((UINT)x << y) : 0;
}

// x >> y; an amount outside of the type's bits gives 0, or -1 for negative numbers.
static inline INT op_shifted_right_INT(INT x, INT y, int bits) {
  return y >= 0 && y < bits ? x >> y : x < 0 ? -1 : 0;
}

// The place of an index that is never negative. Dimensions from 2^31 on need a long index.
static inline INT op_place_up_INT(INT index, long size) {
  const INT last = (INT)(size < MOST ? size : MOST) - 1;
  return index < last ? index : last;
}

// -size..-1 wrap from the end, then the index is clamped. Where the size is 0, the result is any
// number.
static inline INT op_place_INT(INT index, long size) {
  const INT limit = (INT)(size < MOST ? size : MOST);
  const INT wrapped = index < 0 ? index + limit : index;
  return wrapped < 0 ? 0 : wrapped < limit ? wrapped : limit - 1;
}
"""

_SUMS = """\
// The sum over the rows of an 8x8 fragment, of which each lane holds an element of its column.
static inline float op_sum_of_rows(float x) {
  x += simd_shuffle_xor(x, (ushort)2);
  x += simd_shuffle_xor(x, (ushort)4);
  x += simd_shuffle_xor(x, (ushort)16);
  return x;
}

static inline void op_add_float(device atomic_float* total, float value) {
  // A zero adds nothing, and NaN is not 0.
  if (value != 0.0f) {
    atomic_fetch_add_explicit(total, value, memory_order_relaxed);
  }
}

// Adds to a number of 64 bits, low half first: exact in any order.
static inline void op_add_long(device atomic_uint* halves, ulong value) {
  const uint low = (uint)value;
  const uint before = atomic_fetch_add_explicit(halves, low, memory_order_relaxed);
  const uint carry = before + low < low ? 1u : 0u;
  const uint high = (uint)(value >> 32) + carry;
  if (high != 0u) {
    atomic_fetch_add_explicit(halves + 1, high, memory_order_relaxed);
  }
}

// The exponent of the least power of two above a number that isn't negative, at least -126.
static inline int op_exponent_above(float x) {
  return (as_type<int>(x) >> 23) - 126;
}

// The exponent of two that makes additions integers whose sum stays within 2^62.
static inline int op_integer_shift(uint largest, ulong count) {
  const int headroom = count != 0ul ? op_exponent_above((float)count) : 0;
  return 62 - headroom - op_exponent_above(as_type<float>(largest));
}

// x times a power of two, whose exponent may be from -252 to 254.
static inline float op_scaled(float x, int exponent) {
  const int first = exponent >> 1;
  const int second = exponent - first;
  return x * as_type<float>((first + 127) << 23) * as_type<float>((second + 127) << 23);
}

// Measures and counts an addition.
static inline void op_bound_addition(device atomic_uint* words, float value) {
  const uint bits = as_type<uint>(fabs(value));
  if (bits != 0u && fabs(value) < INFINITY) {
    atomic_fetch_max_explicit(words + 2, bits, memory_order_relaxed);
    op_add_long(words + 3, 1ul);
  }
}

// Adds an integer: a multiple of a power of two that is as small as the 63 bits of the element's
// sum allow. Non-finite additions are summed as floats: infinity and NaN are the same in any
// order.
static inline void op_add_exactly(
    device atomic_uint* words, device atomic_float* total, float value) {
  if (!(fabs(value) < INFINITY)) {
    atomic_fetch_add_explicit(total, value, memory_order_relaxed);
  } else if (value != 0.0f) {
    const uint largest = atomic_load_explicit(words + 2, memory_order_relaxed);
    const ulong low = (ulong)atomic_load_explicit(words + 3, memory_order_relaxed);
    const ulong high = (ulong)atomic_load_explicit(words + 4, memory_order_relaxed);
    const int shift = op_integer_shift(largest, high << 32 | low);
    op_add_long(words, (ulong)(long)rint(op_scaled(value, shift)));
  }
}

// The number that the words of an exact sum stand for.
static inline float op_exact_sum(device const uint* words) {
  const long whole = (long)((ulong)words[1] << 32 | (ulong)words[0]);
  const int shift = op_integer_shift(words[2], (ulong)words[4] << 32 | (ulong)words[3]);
  return op_scaled((float)whole, -shift);
}
"""

_CALLED = re.compile(r"\bop_\w+(?=\()")


def _of_width(integer: str, unsigned: str, most: str) -> str:
    """Return the integer functions for one width."""
    text = _INTEGERS.replace("UINT", unsigned).replace("MOST", most)
    return re.sub(r"(?<![A-Z])INT\b", integer, text)


def _named(text: str) -> dict[str, str]:
    """Return the text of each function, with its comment, by its name."""
    functions = re.findall(
        r"(?:^//[^\n]*\n)*^static inline .*?^}\n", text, re.MULTILINE | re.DOTALL
    )
    return {_CALLED.findall(function)[0]: function for function in functions}


FUNCTIONS: dict[str, str] = {
    **_named(_FLOATS),
    **_named(_of_width("int", "uint", "2147483647L")),
    **_named(_of_width("long", "ulong", "9223372036854775807L")),
    **_named(_SUMS),
}
"""Text of each function by its name; a function calls those before it alone."""


def functions_for(text: str) -> str:
    """Return the functions that `text` calls, and those that they call, each once, in order."""
    called: set[str] = set()
    rest = set(_CALLED.findall(text))
    while rest:
        name = rest.pop()
        called.add(name)
        rest |= set(_CALLED.findall(FUNCTIONS[name])) - called
    return "\n".join(function for name, function in FUNCTIONS.items() if name in called)
