// Operations of bytecode.h on a lane: torch's meaning, without undefined behaviour.
//
// Integers wrap. Division by 0 gives an arbitrary value. A shift by less than 0, or by the width
// or more, gives 0, or the sign for shr. Minimum and maximum are NaN where an operand is.
#pragma once
#include "lane_blocks.h"

namespace AF_LEVEL {

template <class T>
struct wrapping {
    typedef T type;
};
template <>
struct wrapping<int32_t> {
    typedef uint32_t type;
};
template <>
struct wrapping<int64_t> {
    typedef uint64_t type;
};
template <class T>
using wraps = typename wrapping<T>::type;

template <class T>
constexpr bool is_float = T(0.5) != T(0);

// An operation on lanes of any type T, from its value for lanes a and b.
#define AF_UNARY_OPERATION(NAME, VALUE)                                                       \
    struct NAME {                                                                            \
        template <class T>                                                                   \
        AF_INLINE T of(T a) {                                                                \
            return VALUE;                                                                    \
        }                                                                                    \
    };
#define AF_BINARY_OPERATION(NAME, VALUE)                                                      \
    struct NAME {                                                                            \
        template <class T>                                                                   \
        AF_INLINE T of(T a, T b) {                                                           \
            return VALUE;                                                                    \
        }                                                                                    \
    };

AF_BINARY_OPERATION(add, T(wraps<T>(a) + wraps<T>(b)))
AF_BINARY_OPERATION(sub, T(wraps<T>(a) - wraps<T>(b)))
AF_BINARY_OPERATION(mul, T(wraps<T>(a) * wraps<T>(b)))
AF_BINARY_OPERATION(truediv, a / b)
// The same with operands exchanged, for a first operand that is one value.
template <class F>
struct exchanged {
    template <class T>
    AF_INLINE T of(T a, T b) {
        return F::of(b, a);
    }
};
AF_BINARY_OPERATION(minimum, a < b || a != a ? a : b)
AF_BINARY_OPERATION(maximum, a > b || a != a ? a : b)

// Integer division rounding to 0; by 0 as by 1. In doubles, which hold every quotient of int32.
AF_INLINE int32_t quotient(int32_t a, int32_t b) {
    const int32_t divisor = b == 0 || b == -1 ? 1 : b;
    const int32_t q = int32_t(double(a) / double(divisor));
    return b == -1 ? int32_t(0u - uint32_t(q)) : q;
}
AF_INLINE int64_t quotient(int64_t a, int64_t b) {
    if (b == -1) return int64_t(0ull - uint64_t(a));
    return a / (b == 0 ? 1 : b);
}
template <class T>
AF_INLINE T rest(T a, T b) {
    return sub::of(a, mul::of(quotient(a, b), b == 0 ? T(1) : b));
}

AF_INLINE float float_rest(float a, float b) { return __builtin_fmodf(a, b); }
AF_INLINE double float_rest(double a, double b) { return __builtin_fmod(a, b); }

// fmod of floats: small quotients in doubles, which hold the quotient and the product exactly.
constexpr double LARGEST_QUOTIENT = 268435456.0;  // 2^28
AF_INLINE float small_rest(float a, float b) {
    const double x = double(a), y = double(b);
    const double q = x / y;
    double r = x - __builtin_trunc(q) * y;
    // The quotient was rounded up to a whole number.
    const double size = __builtin_fabs(y);
    const bool beyond = r != 0 && (r < 0) != (x < 0);
    r = beyond ? r + (x < 0 ? -size : size) : r;
    return r == 0 ? __builtin_copysignf(0.0f, a) : float(r);
}

struct fmod {
    template <class T>
    AF_INLINE T from(T a, T b, T r) {
        (void)a;
        (void)b;
        return r;
    }
    template <class T>
    AF_INLINE T of(T a, T b) {
        if constexpr (is_float<T>)
            return float_rest(a, b);
        else
            return rest(a, b);
    }
};
struct mod {
    // r is fmod(a, b)
    template <class T>
    AF_INLINE T from(T a, T b, T r) {
        (void)a;
        return r != 0 && (b < 0) != (r < 0) ? add::of(r, b) : r;
    }
    template <class T>
    AF_INLINE T of(T a, T b) {
        return from(a, b, fmod::of(a, b));
    }
};
struct floordiv {
    // As torch and Python do: exact where the quotient is a whole number.
    template <class T>
    AF_INLINE T from(T a, T b, T r) {
        T q = (a - r) / b;
        q = r != 0 && (b < 0) != (r < 0) ? q - 1 : q;
        T whole = T(__builtin_floor(double(q)));
        whole = q - whole > T(0.5) ? whole + 1 : whole;
        whole = q == 0 ? T(__builtin_copysign(0.0, double(a / b))) : whole;
        return b == 0 ? a / b : whole;
    }
    template <class T>
    AF_INLINE T of(T a, T b) {
        if constexpr (is_float<T>) {
            return from(a, b, float_rest(a, b));
        } else {
            const T q = quotient(a, b), r = rest(a, b);
            return r != 0 && (b < 0) != (r < 0) ? sub::of(q, T(1)) : q;
        }
    }
};

// floordiv, mod and fmod of floats.
template <class F, bool ONE>
static void by_rest(const step& s, const lane_block& t) {
    float* d = lanes_of<float>(s.d);
    const float *a = lanes_of<float>(s.a), *b = lanes_of<float>(s.b);
    for (int i = 0; i < t.lanes; i += 16) {
        float x[16], y[16], r[16];
        int large = 0;
        for (int j = 0; j < 16; ++j) {
            x[j] = a[i + j];
            y[j] = b[ONE ? t.row : i + j];
            const double q = double(x[j]) / double(y[j]);
            // True for NaN and infinity too.
            large |= !(__builtin_fabs(q) < LARGEST_QUOTIENT && __builtin_fabsf(y[j]) < 3.4e38f);
            r[j] = small_rest(x[j], y[j]);
        }
        if (large)
            for (int j = 0; j < 16; ++j) r[j] = float_rest(x[j], y[j]);
        for (int j = 0; j < 16; ++j) d[i + j] = F::from(x[j], y[j], r[j]);
    }
}

template <class T>
AF_INLINE T whole_power(T base, T exponent) {
    typedef wraps<T> U;
    if (exponent < 0) {
        if (base == 1) return 1;
        if (base == -1) return exponent & 1 ? T(-1) : T(1);
        return 0;
    }
    U result = 1, square = U(base);
    for (U left = U(exponent); left != 0; left >>= 1, square *= square)
        if (left & 1) result *= square;
    return T(result);
}
struct pow {
    AF_INLINE float of(float a, float b) { return __builtin_powf(a, b); }
    AF_INLINE double of(double a, double b) { return __builtin_pow(a, b); }
    AF_INLINE int32_t of(int32_t a, int32_t b) { return whole_power(a, b); }
    AF_INLINE int64_t of(int64_t a, int64_t b) { return whole_power(a, b); }
};
AF_INLINE float root(float a) { return __builtin_sqrtf(a); }
AF_INLINE double root(double a) { return __builtin_sqrt(a); }

// A Python exponent: its simple values take torch's exact paths.
template <class T>
static void pow_number(const step& s, const lane_block& t) {
    T* d = lanes_of<T>(s.d);
    const T* a = lanes_of<T>(s.a);
    const T b = lanes_of<T>(s.b)[t.row];
    const int n = t.lanes & ~15;
    if (b == T(2))
        for (int i = 0; i < n; ++i) d[i] = a[i] * a[i];
    else if (b == T(3))
        for (int i = 0; i < n; ++i) d[i] = a[i] * a[i] * a[i];
    else if (b == T(0.5))
        for (int i = 0; i < n; ++i) d[i] = root(a[i]);
    else if (b == T(-0.5))
        for (int i = 0; i < n; ++i) d[i] = T(1) / root(a[i]);
    else if (b == T(-1))
        for (int i = 0; i < n; ++i) d[i] = T(1) / a[i];
    else if (b == T(-2))
        for (int i = 0; i < n; ++i) d[i] = T(1) / (a[i] * a[i]);
    else
        for (int i = 0; i < n; ++i) d[i] = pow::of(a[i], b);
}

struct atan2 {
    AF_INLINE float of(float a, float b) { return __builtin_atan2f(a, b); }
    AF_INLINE double of(double a, double b) { return __builtin_atan2(a, b); }
};

AF_BINARY_OPERATION(bit_and, a & b)
AF_BINARY_OPERATION(bit_or, a | b)
AF_BINARY_OPERATION(bit_xor, a ^ b)
AF_BINARY_OPERATION(bit_and_not, a & ~b)
AF_UNARY_OPERATION(bit_not, ~a)
struct shl {
    template <class T>
    AF_INLINE T of(T a, T b) {
        constexpr T WIDTH = T(sizeof(T) * 8);
        const bool inside = b >= 0 && b < WIDTH;
        const wraps<T> shifted = wraps<T>(a) << (inside ? b : T(0));
        return inside ? T(shifted) : T(0);
    }
};
struct shr {
    template <class T>
    AF_INLINE T of(T a, T b) {
        constexpr T WIDTH = T(sizeof(T) * 8);
        return a >> (b >= 0 && b < WIDTH ? b : WIDTH - 1);
    }
};

// The bits of a comparison's lanes. clang doesn't accept the comparison's vector type as vl.
template <class V>
AF_INLINE uint32_t bits_where(V holds) {
    if constexpr (sizeof(holds[0]) == 8)
        return bits_of(reinterpret_cast<vl>(holds));
    else
        return bits_of(reinterpret_cast<vi>(holds));
}

#define AF_COMPARISON(NAME, OPERATOR)                                                         \
    struct NAME {                                                                            \
        template <class V>                                                                   \
        AF_INLINE uint32_t bits(V a, V b) {                                                  \
            return bits_where(a OPERATOR b);                                                 \
        }                                                                                    \
    };
AF_COMPARISON(eq, ==)
AF_COMPARISON(ne, !=)
AF_COMPARISON(lt, <)
AF_COMPARISON(le, <=)
AF_COMPARISON(gt, >)
AF_COMPARISON(ge, >=)

AF_UNARY_OPERATION(neg, T(is_float<T> ? wraps<T>(-a) : wraps<T>(0) - wraps<T>(a)))
struct abs {
    AF_INLINE float of(float a) { return __builtin_fabsf(a); }
    AF_INLINE double of(double a) { return __builtin_fabs(a); }
    template <class T>
    AF_INLINE T of(T a) {
        return a < 0 ? sub::of(T(0), a) : a;
    }
};
AF_UNARY_OPERATION(sign, T(a > 0) - T(a < 0))

}  // namespace AF_LEVEL
