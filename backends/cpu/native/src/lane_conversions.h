// Rounding to whole numbers, and conversions from one type of lanes to another.
#pragma once
#include "lane_operations.h"

namespace AF_LEVEL {

// To nearest, halves to even; the sign of a zero stays.
struct round {
    AF_INLINE float of(float a) {
        const float whole = 8388608.0f;  // 2^23: from there on all floats are whole
        const float size = __builtin_fabsf(a);
        return size < whole ? __builtin_copysignf((size + whole) - whole, a) : a;
    }
    AF_INLINE double of(double a) {
        const double whole = 4503599627370496.0;  // 2^52
        const double size = __builtin_fabs(a);
        return size < whole ? __builtin_copysign((size + whole) - whole, a) : a;
    }
};
struct floor {
    template <class T>
    AF_INLINE T of(T a) {
        const T near = round::of(a);
        return near > a ? near - T(1) : near;
    }
};
struct ceil {
    template <class T>
    AF_INLINE T of(T a) {
        return -floor::of(-a);
    }
};
struct trunc {
    AF_INLINE float of(float a) { return __builtin_copysignf(floor::of(__builtin_fabsf(a)), a); }
    AF_INLINE double of(double a) { return __builtin_copysign(floor::of(__builtin_fabs(a)), a); }
};

// Conversions. A value outside of the type's range wraps from an integer; from a float it becomes
// the smallest value, as NaN does.
template <class D>
struct to {
    template <class A>
    AF_INLINE D of(A a) {
        return D(a);
    }
};
template <class D>
struct whole_of {
    template <class A>
    AF_INLINE D of(A a) {
        constexpr D LOWEST = D(wraps<D>(1) << (sizeof(D) * 8 - 1));
        const bool inside = a >= A(LOWEST) && a < -A(LOWEST);
        const D whole = D(inside ? a : A(0));
        return inside ? whole : LOWEST;
    }
};
template <class N>
struct wrap {
    AF_INLINE int32_t of(int32_t a) { return int32_t(N(a)); }
};

// To the nearest value of a narrower float, halves to even.
struct round_bf16 {
    AF_INLINE float of(float a) {
        uint32_t u;
        __builtin_memcpy(&u, &a, 4);
        u = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
        float r;
        __builtin_memcpy(&r, &u, 4);
        return a != a ? a : r;
    }
};
struct round_f16 {
    AF_INLINE float of(float a) {
        uint32_t u;
        __builtin_memcpy(&u, &a, 4);
        u = (u + 0xfffu + ((u >> 13) & 1u)) & 0xffffe000u;
        float normal;
        __builtin_memcpy(&normal, &u, 4);
        const float size = __builtin_fabsf(a);
        // The unit of the sum's last place is half's smallest subnormal.
        const float subnormal = __builtin_copysignf((size + 0.75f) - 0.75f, a);
        float r = size < 6.103515625e-5f ? subnormal : normal;
        r = size >= 65520.0f ? __builtin_copysignf(__builtin_inff(), a) : r;
        return a != a ? a : r;
    }
};

}  // namespace AF_LEVEL
