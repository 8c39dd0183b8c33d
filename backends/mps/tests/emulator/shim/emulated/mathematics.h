// Functions of floats. Those of half and bfloat go through float and round once. Overloads take
// exact types only: a mixed call is ambiguous in Metal and a compile error here.
#pragma once
#include "machine.h"

extern "C" {
float expf(float);
float exp2f(float);
float logf(float);
float log2f(float);
float log10f(float);
float sqrtf(float);
float sinf(float);
float cosf(float);
float tanf(float);
float sinhf(float);
float coshf(float);
float tanhf(float);
float asinf(float);
float acosf(float);
float atanf(float);
float asinhf(float);
float acoshf(float);
float atanhf(float);
float floorf(float);
float ceilf(float);
float truncf(float);
float rintf(float);
float roundf(float);
float fabsf(float);
float powf(float, float);
float atan2f(float, float);
float fmodf(float, float);
float fmaf(float, float, float);
float copysignf(float, float);
}

namespace emulated {

// The result with the error that a numeric variant asks for.
EMULATED_INLINE float specified_by_ulps(float y) {
    return __builtin_expect(emulated_ulps != 0, 0) ? emulated_inexact(y) : y;
}
// Powers of two are exact on every GPU.
EMULATED_INLINE float exp2_of(float x) {
    const float y = exp2f(x);
    return __builtin_expect(emulated_ulps != 0 && floorf(x) != x, 0) ? emulated_inexact(y) : y;
}

} // namespace emulated

namespace metal {

#define EMULATED_FUNCTION(name, expression)                                                       \
    EMULATED_INLINE float name(float x) { return expression; }                                    \
    EMULATED_INLINE half name(half h) {                                                           \
        float x = h;                                                                              \
        return (half)(expression);                                                                \
    }                                                                                             \
    EMULATED_INLINE bfloat name(bfloat h) {                                                       \
        float x = h;                                                                              \
        return (bfloat)(expression);                                                              \
    }
#define EMULATED_MATHEMATICS                                                                      \
    EMULATED_FUNCTION(exp, emulated::specified_by_ulps(expf(x)))                                  \
    EMULATED_FUNCTION(exp2, emulated::exp2_of(x))                                                 \
    EMULATED_FUNCTION(log, emulated::specified_by_ulps(logf(x)))                                  \
    EMULATED_FUNCTION(log2, emulated::specified_by_ulps(log2f(x)))                                \
    EMULATED_FUNCTION(log10, emulated::specified_by_ulps(log10f(x)))                              \
    EMULATED_FUNCTION(sqrt, sqrtf(x))                                                             \
    EMULATED_FUNCTION(rsqrt, emulated::specified_by_ulps(1.0f / sqrtf(x)))                        \
    EMULATED_FUNCTION(sin, emulated::specified_by_ulps(sinf(x)))                                  \
    EMULATED_FUNCTION(cos, emulated::specified_by_ulps(cosf(x)))                                  \
    EMULATED_FUNCTION(tan, emulated::specified_by_ulps(tanf(x)))                                  \
    EMULATED_FUNCTION(sinh, emulated::specified_by_ulps(sinhf(x)))                                \
    EMULATED_FUNCTION(cosh, emulated::specified_by_ulps(coshf(x)))                                \
    EMULATED_FUNCTION(tanh, emulated::specified_by_ulps(tanhf(x)))                                \
    EMULATED_FUNCTION(asin, emulated::specified_by_ulps(asinf(x)))                                \
    EMULATED_FUNCTION(acos, emulated::specified_by_ulps(acosf(x)))                                \
    EMULATED_FUNCTION(atan, emulated::specified_by_ulps(atanf(x)))                                \
    EMULATED_FUNCTION(asinh, emulated::specified_by_ulps(asinhf(x)))                              \
    EMULATED_FUNCTION(acosh, emulated::specified_by_ulps(acoshf(x)))                              \
    EMULATED_FUNCTION(atanh, emulated::specified_by_ulps(atanhf(x)))                              \
    EMULATED_FUNCTION(floor, floorf(x))                                                           \
    EMULATED_FUNCTION(ceil, ceilf(x))                                                             \
    EMULATED_FUNCTION(trunc, truncf(x))                                                           \
    EMULATED_FUNCTION(rint, rintf(x))                                                             \
    EMULATED_FUNCTION(round, roundf(x))                                                           \
    EMULATED_FUNCTION(fabs, fabsf(x))                                                             \
    EMULATED_INLINE float pow(float x, float y) {                                                 \
        return emulated::specified_by_ulps(powf(x, y));                                           \
    }                                                                                             \
    EMULATED_INLINE float powr(float x, float y) {                                                \
        return emulated::specified_by_ulps(powf(x, y));                                           \
    }                                                                                             \
    EMULATED_INLINE float atan2(float y, float x) {                                               \
        return emulated::specified_by_ulps(atan2f(y, x));                                         \
    }                                                                                             \
    EMULATED_INLINE float divide(float x, float y) { return x / y; }                              \
    EMULATED_INLINE float fmod(float x, float y) { return fmodf(x, y); }                          \
    EMULATED_INLINE float fma(float x, float y, float z) { return fmaf(x, y, z); }

EMULATED_MATHEMATICS
namespace fast {
EMULATED_MATHEMATICS
}
namespace precise {
EMULATED_MATHEMATICS
}
#undef EMULATED_MATHEMATICS
#undef EMULATED_FUNCTION

EMULATED_INLINE float copysign(float x, float y) { return copysignf(x, y); }
EMULATED_INLINE bool isnan(float x) { return x != x; }
EMULATED_INLINE bool isinf(float x) { return fabsf(x) == INFINITY; }
EMULATED_INLINE bool isfinite(float x) { return fabsf(x) < INFINITY; }
EMULATED_INLINE bool isunordered(float x, float y) { return x != x || y != y; }
EMULATED_INLINE bool signbit(float x) { return __builtin_signbitf(x); }

template <class T> constexpr T abs(T x) { return x < T(0) ? T(-x) : x; }
// Floats: the operand that isn't NaN.
template <class T> constexpr T max(T x, T y) {
    if constexpr (is_floating_point_v<T>) {
        if (x != x) return y;
        if (y != y) return x;
    }
    return x < y ? y : x;
}
template <class T> constexpr T min(T x, T y) {
    if constexpr (is_floating_point_v<T>) {
        if (x != x) return y;
        if (y != y) return x;
    }
    return y < x ? y : x;
}
template <class T> EMULATED_INLINE T fmax(T x, T y) {
    static_assert(is_floating_point_v<T>);
    return max(x, y);
}
template <class T> EMULATED_INLINE T fmin(T x, T y) {
    static_assert(is_floating_point_v<T>);
    return min(x, y);
}
template <class T> constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <class T> constexpr T select(T x, T y, bool second) { return second ? y : x; }
template <class V> EMULATED_INLINE typename emulated::element<V>::type dot(V x, V y) {
    static_assert(emulated::element<V>::count > 1, "vectors only");
    typename emulated::element<V>::type sum = 0;
    for (int i = 0; i < emulated::element<V>::count; i++) sum += x[i] * y[i];
    return sum;
}
template <class V> EMULATED_INLINE bool any(V mask) {
    for (int i = 0; i < emulated::element<V>::count; i++)
        if (mask[i]) return true;
    return false;
}
template <class V> EMULATED_INLINE bool all(V mask) {
    for (int i = 0; i < emulated::element<V>::count; i++)
        if (!mask[i]) return false;
    return true;
}

} // namespace metal
