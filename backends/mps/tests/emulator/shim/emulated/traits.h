// Type traits and limits. Templated kernels of others use them; ours have no templates.
#pragma once
#include "vectors.h"

namespace metal {

template <class T, T v> struct integral_constant {
    static constexpr T value = v;
    typedef T value_type;
    typedef integral_constant type;
    constexpr operator T() const { return v; }
    constexpr T operator()() const { return v; }
};
template <bool b> using bool_constant = integral_constant<bool, b>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <class T> struct remove_cv {
    typedef T type;
};
template <class T> struct remove_cv<const T> {
    typedef T type;
};
template <class T> struct remove_cv<volatile T> {
    typedef T type;
};
template <class T> struct remove_cv<const volatile T> {
    typedef T type;
};
template <class T> using remove_cv_t = typename remove_cv<T>::type;

template <class T> struct remove_reference {
    typedef T type;
};
template <class T> struct remove_reference<T&> {
    typedef T type;
};
template <class T> using remove_reference_t = typename remove_reference<T>::type;

template <bool b, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> {
    typedef T type;
};
template <bool b, class T = void> using enable_if_t = typename enable_if<b, T>::type;

template <bool b, class T, class F> struct conditional {
    typedef T type;
};
template <class T, class F> struct conditional<false, T, F> {
    typedef F type;
};
template <bool b, class T, class F> using conditional_t = typename conditional<b, T, F>::type;

template <class T> T&& declval();

template <class A, class B> inline constexpr bool is_same_v = false;
template <class A> inline constexpr bool is_same_v<A, A> = true;
template <class T>
inline constexpr bool is_floating_point_v =
    is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <class T> inline constexpr bool is_integral_v = __is_integral(T);
template <class T> inline constexpr bool is_signed_v = __is_signed(T);
template <class T> inline constexpr bool is_unsigned_v = __is_unsigned(T);
template <class T> inline constexpr bool is_scalar_v = is_integral_v<T> || is_floating_point_v<T>;
template <class A, class B> struct is_same : bool_constant<is_same_v<A, B>> {};
template <class T> struct is_integral : bool_constant<is_integral_v<T>> {};
template <class T> struct is_floating_point : bool_constant<is_floating_point_v<T>> {};

template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));

template <class T, size_t N> struct array {
    T at[N];
    constexpr T& operator[](size_t i) { return at[i]; }
    constexpr const T& operator[](size_t i) const { return at[i]; }
};

template <class T> struct numeric_limits;

#define EMULATED_FLOAT_LIMITS(T, largest)                                                         \
    template <> struct numeric_limits<T> {                                                        \
        static constexpr T infinity() { return (T)INFINITY; }                                     \
        static constexpr T quiet_NaN() { return (T)NAN; }                                         \
        static constexpr T max() { return (T)(largest); }                                         \
        static constexpr T lowest() { return (T)(-(largest)); }                                   \
    };
EMULATED_FLOAT_LIMITS(float, 3.40282347e38f)
EMULATED_FLOAT_LIMITS(half, 65504.0f)
EMULATED_FLOAT_LIMITS(bfloat, 3.38953139e38f)
#undef EMULATED_FLOAT_LIMITS

#define EMULATED_INTEGER_LIMITS(T, least, largest)                                                \
    template <> struct numeric_limits<T> {                                                        \
        static constexpr T max() { return largest; }                                              \
        static constexpr T min() { return least; }                                                \
        static constexpr T lowest() { return least; }                                             \
    };
EMULATED_INTEGER_LIMITS(char, -128, 127)
EMULATED_INTEGER_LIMITS(uchar, 0, 255)
EMULATED_INTEGER_LIMITS(short, -32768, 32767)
EMULATED_INTEGER_LIMITS(ushort, 0, 65535)
EMULATED_INTEGER_LIMITS(int, INT_MIN, INT_MAX)
EMULATED_INTEGER_LIMITS(uint, 0, UINT_MAX)
EMULATED_INTEGER_LIMITS(long, LONG_MIN, LONG_MAX)
EMULATED_INTEGER_LIMITS(ulong, 0, 18446744073709551615ul)
#undef EMULATED_INTEGER_LIMITS

} // namespace metal
