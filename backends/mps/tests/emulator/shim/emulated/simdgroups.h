// Simdgroup functions: each is a rendezvous of the simdgroup's lanes.
#pragma once
#include "mathematics.h"

namespace emulated {

// The values of all lanes. Slots of missing lanes, in a simdgroup of fewer than 32, are NaN.
template <class T>
EMULATED_INLINE EMULATED_TOGETHER const EMULATED_OWN T* of_all_lanes(const T& x) {
    return (const EMULATED_OWN T*)emulated_exchange(&x, sizeof(T));
}

} // namespace emulated

namespace metal {

#define EMULATED_SHUFFLE(name, from)                                                              \
    template <class T> EMULATED_INLINE EMULATED_TOGETHER T name(T x, ushort i) {                  \
        const EMULATED_OWN T* all = emulated::of_all_lanes(x);                                    \
        const uint lane = emulated_current->lane;                                                 \
        (void)lane;                                                                               \
        return all[from];                                                                         \
    }
EMULATED_SHUFFLE(simd_shuffle, i & 31)
EMULATED_SHUFFLE(simd_broadcast, i & 31)
EMULATED_SHUFFLE(simd_shuffle_xor, (lane ^ i) & 31)
// Lanes past the end are undefined in Metal: they keep their own value here.
EMULATED_SHUFFLE(simd_shuffle_down, lane + i < 32 ? lane + i : lane)
EMULATED_SHUFFLE(simd_shuffle_up, lane >= i ? lane - i : lane)
EMULATED_SHUFFLE(simd_shuffle_rotate_down, (lane + i) & 31)
EMULATED_SHUFFLE(simd_shuffle_rotate_up, (lane - i) & 31)
#undef EMULATED_SHUFFLE

template <class T> EMULATED_INLINE EMULATED_TOGETHER T simd_broadcast_first(T x) {
    return emulated::of_all_lanes(x)[0];
}
// Sums by halves: an order that differs from a loop's.
template <class T> EMULATED_INLINE EMULATED_TOGETHER T simd_sum(T x) {
    const EMULATED_OWN T* all = emulated::of_all_lanes(x);
    T sums[32];
    for (uint i = 0; i < 32; i++) sums[i] = i < emulated_current->lanes ? all[i] : T(0);
    for (int step = 1; step < 32; step *= 2)
        for (int i = 0; i < 32; i += 2 * step) sums[i] = sums[i] + sums[i + step];
    return sums[0];
}
#define EMULATED_REDUCTION(name, T_, result)                                                      \
    EMULATED_INLINE EMULATED_TOGETHER T_ name(T_ x) {                                             \
        const EMULATED_OWN T_* all = emulated::of_all_lanes(x);                                   \
        T_ y = all[0];                                                                            \
        for (uint i = 1; i < emulated_current->lanes; i++) y = result;                            \
        return y;                                                                                 \
    }
template <class T> EMULATED_REDUCTION(simd_max, T, max(y, all[i]))
template <class T> EMULATED_REDUCTION(simd_min, T, min(y, all[i]))
template <class T> EMULATED_REDUCTION(simd_product, T, T(all[i] * y))
template <class T> EMULATED_REDUCTION(simd_and, T, T(all[i] & y))
template <class T> EMULATED_REDUCTION(simd_or, T, T(y | all[i]))
template <class T> EMULATED_REDUCTION(simd_xor, T, T(y ^ all[i]))
EMULATED_REDUCTION(simd_all, bool, all[i] && y)
EMULATED_REDUCTION(simd_any, bool, y || all[i])
#undef EMULATED_REDUCTION

} // namespace metal
