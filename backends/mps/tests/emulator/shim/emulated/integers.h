// Functions of integers and of bits.
#pragma once
#include "machine.h"

namespace metal {

template <class To, class From> EMULATED_INLINE constexpr To as_type(From from) {
    static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
    return __builtin_bit_cast(To, from);
}

// Results have the operand's type, as in Metal.
template <class T> EMULATED_INLINE T popcount(T x) {
    static_assert(is_integral_v<T>);
    return (T)__builtin_popcountl((ulong)x & (~0ul >> (64 - 8 * sizeof(T))));
}
template <class T> EMULATED_INLINE T clz(T x) {
    static_assert(is_integral_v<T>);
    const ulong bits = (ulong)x & (~0ul >> (64 - 8 * sizeof(T)));
    return (T)(bits ? __builtin_clzl(bits) - (64 - 8 * (int)sizeof(T)) : 8 * sizeof(T));
}
template <class T> EMULATED_INLINE T ctz(T x) {
    static_assert(is_integral_v<T>);
    return (T)(x ? __builtin_ctzl((ulong)x) : 8 * sizeof(T));
}
EMULATED_INLINE uint mulhi(uint x, uint y) { return (uint)(((ulong)x * y) >> 32); }
EMULATED_INLINE int mulhi(int x, int y) { return (int)(((long)x * y) >> 32); }
EMULATED_INLINE ulong mulhi(ulong x, ulong y) { return (ulong)(((unsigned __int128)x * y) >> 64); }
EMULATED_INLINE long mulhi(long x, long y) { return (long)(((__int128)x * y) >> 64); }

} // namespace metal

// A word of the language in Metal.
using metal::as_type;
