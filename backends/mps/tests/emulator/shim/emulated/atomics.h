// Atomics of relaxed order. All threads are fibers of one CPU thread, so an operation that doesn't
// yield is atomic. Floats add on device memory only, as on Apple's GPUs.
#pragma once
#include "mathematics.h"

namespace metal {

enum memory_order { memory_order_relaxed };

template <class T> struct atomic {
    T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;

} // namespace metal

namespace emulated {

template <class T> EMULATED_INLINE T wrapping_sum(T x, T y) {
    if constexpr (metal::is_same_v<T, float>)
        return x + y;
    else
        return (T)((ulong)x + (ulong)y);
}

template <class T> EMULATED_INLINE T wrapping_difference(T x, T y) {
    if constexpr (metal::is_same_v<T, float>)
        return x - y;
    else
        return (T)((ulong)x - (ulong)y);
}

template <class P> using atomic_value = decltype(P()->value);

template <class P> constexpr bool on_device = false;
#ifdef EMULATED_RACES
template <class A> constexpr bool on_device<A*> = true;
#endif
template <class A> constexpr bool on_device<EMULATED_DEVICE A*> = true;
template <class A> constexpr bool on_device<EMULATED_THREADGROUP A*> = false;

// The race build's check of an operation, at the operation's line.
template <class P> EMULATED_INLINE void touch_atomically(P p) {
#ifdef EMULATED_RACES
    emulated_atomic((void*)p, sizeof(atomic_value<P>));
#endif
}
template <class P, class F>
EMULATED_UNCHECKED atomic_value<P> replace(P p, atomic_value<P> x, F combine) {
    const atomic_value<P> before = p->value;
    p->value = combine(before, x);
    return before;
}
template <class P>
EMULATED_UNCHECKED bool replace_equal(P p, atomic_value<P>* expected, atomic_value<P> desired) {
    // Bits are compared, as in C++: a NaN equals itself.
    atomic_value<P> now = p->value;
    if (!__builtin_memcmp(&now, expected, sizeof now) && !emulated_spurious()) {
        p->value = desired;
        return true;
    }
    *expected = now;
    return false;
}

} // namespace emulated

namespace metal {

template <class P>
EMULATED_INLINE emulated::atomic_value<P> atomic_load_explicit(P p, memory_order) {
    typedef emulated::atomic_value<P> T;
    emulated::touch_atomically(p);
    return emulated::replace(p, T(), [](T x, T) { return x; });
}
template <class P>
EMULATED_INLINE void atomic_store_explicit(P p, emulated::atomic_value<P> x, memory_order) {
    typedef emulated::atomic_value<P> T;
    emulated::touch_atomically(p);
    emulated::replace(p, x, [](T, T y) { return y; });
}
template <class P>
EMULATED_INLINE bool
atomic_compare_exchange_weak_explicit(P p, thread emulated::atomic_value<P>* expected,
                                      emulated::atomic_value<P> desired, memory_order,
                                      memory_order) {
    emulated::touch_atomically(p);
    return emulated::replace_equal(p, expected, desired);
}

#define EMULATED_ATOMIC(name, floats, result)                                                     \
    template <class P>                                                                            \
    EMULATED_INLINE emulated::atomic_value<P> name(P p, emulated::atomic_value<P> operand,        \
                                                   memory_order) {                                \
        typedef emulated::atomic_value<P> T;                                                      \
        static_assert(!is_same_v<T, float> || (floats && emulated::on_device<P>),                 \
                      #name " of floats: exchange, add and sub, on device memory only");          \
        emulated::touch_atomically(p);                                                            \
        return emulated::replace(p, operand, [](T x, T y) -> T { return result; });               \
    }
EMULATED_ATOMIC(atomic_exchange_explicit, true, y)
// Signed sums wrap around.
EMULATED_ATOMIC(atomic_fetch_add_explicit, true, emulated::wrapping_sum(x, y))
EMULATED_ATOMIC(atomic_fetch_sub_explicit, true, emulated::wrapping_difference(x, y))
EMULATED_ATOMIC(atomic_fetch_max_explicit, false, max(x, y))
EMULATED_ATOMIC(atomic_fetch_min_explicit, false, min(x, y))
EMULATED_ATOMIC(atomic_fetch_and_explicit, false, T(ulong(x) & ulong(y)))
EMULATED_ATOMIC(atomic_fetch_or_explicit, false, T(ulong(x) | ulong(y)))
EMULATED_ATOMIC(atomic_fetch_xor_explicit, false, T(ulong(x) ^ ulong(y)))
#undef EMULATED_ATOMIC

} // namespace metal
