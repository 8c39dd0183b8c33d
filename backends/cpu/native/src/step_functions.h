// The function of each operation of bytecode.h, under the operation's name, and their table.
#pragma once
#include "captured_scatter.h"
#include "elementary.h"
#include "lane_conversions.h"
#include "lane_operations.h"

namespace AF_LEVEL {
namespace {

#define AF_KERNEL constexpr step_function

// Functions of a float and of a double under one name: the library's, and those whose floats go
// through elementary.h.
#define AF_LIBRARY_FUNCTION(NAME)                                                            \
    struct NAME##_lanes {                                                                    \
        AF_INLINE float of(float x) { return __builtin_##NAME##f(x); }                       \
        AF_INLINE double of(double x) { return __builtin_##NAME(x); }                        \
    };                                                                                       \
    AF_KERNEL run_##NAME##_f = unary<NAME##_lanes, float, float>,                            \
              run_##NAME##_d = unary<NAME##_lanes, double, double>;
#define AF_VECTOR_FUNCTION(NAME, OF_DOUBLE)                                                  \
    struct NAME##_lanes {                                                                    \
        AF_INLINE vf of(vf x) { return elementary::NAME(x); }                                \
        AF_INLINE double of(double x) { return OF_DOUBLE; }                                  \
    };                                                                                       \
    AF_KERNEL run_##NAME##_f = vectors<NAME##_lanes>,                                        \
              run_##NAME##_d = unary<NAME##_lanes, double, double>;
AF_VECTOR_FUNCTION(exp, __builtin_exp(x))
AF_VECTOR_FUNCTION(exp2, __builtin_exp2(x))
AF_VECTOR_FUNCTION(expm1, __builtin_expm1(x))
AF_VECTOR_FUNCTION(log, __builtin_log(x))
AF_VECTOR_FUNCTION(log2, __builtin_log2(x))
AF_VECTOR_FUNCTION(log10, __builtin_log10(x))
AF_VECTOR_FUNCTION(log1p, __builtin_log1p(x))
AF_VECTOR_FUNCTION(tanh, __builtin_tanh(x))
AF_VECTOR_FUNCTION(erf, __builtin_erf(x))
AF_VECTOR_FUNCTION(sigmoid, 1 / (1 + __builtin_exp(-x)))
AF_VECTOR_FUNCTION(sqrt, __builtin_sqrt(x))
AF_VECTOR_FUNCTION(rsqrt, 1 / __builtin_sqrt(x))
AF_LIBRARY_FUNCTION(tan)
AF_LIBRARY_FUNCTION(asin)
AF_LIBRARY_FUNCTION(acos)
AF_LIBRARY_FUNCTION(atan)
AF_LIBRARY_FUNCTION(sinh)
AF_LIBRARY_FUNCTION(cosh)
AF_LIBRARY_FUNCTION(asinh)
AF_LIBRARY_FUNCTION(acosh)
AF_LIBRARY_FUNCTION(atanh)
AF_LIBRARY_FUNCTION(erfc)

struct sin_lanes {
    AF_INLINE vf of(vf x) { return elementary::sin(x); }
    AF_INLINE float far(float x) { return __builtin_sinf(x); }
    AF_INLINE double of(double x) { return __builtin_sin(x); }
};
struct cos_lanes {
    AF_INLINE vf of(vf x) { return elementary::cos(x); }
    AF_INLINE float far(float x) { return __builtin_cosf(x); }
    AF_INLINE double of(double x) { return __builtin_cos(x); }
};
template <class F>
void angles(const step& s, const lane_block& t) {
    float* d = lanes_of<float>(s.d);
    const float* a = lanes_of<float>(s.a);
    for (int i = 0; i < t.lanes; i += VL) {
        const vf x = load(a + i);
        if (bits_of(magnitude(x) > elementary::LARGEST_ANGLE) == 0)
            store(d + i, F::of(x));
        else
            for (int j = i; j < i + VL; ++j) d[j] = F::far(a[j]);
    }
}

void bits_spread(const step& s, const lane_block& t) {
    fill_bits(s.d, lanes_of<uint16_t>(s.a)[t.row / 16] >> (t.row % 16) & 1, t.lanes);
}
template <class T>
void spread(const step& s, const lane_block& t) {
    fill(s.d, lanes_of<T>(s.a)[t.row], t.lanes);
}
// 1 or 0 for a bit.
template <class T>
void bits_to(const step& s, const lane_block& t) {
    T* d = lanes_of<T>(s.d);
    const uint16_t* a = lanes_of<uint16_t>(s.a);
    for (int i = 0; i < t.lanes; i += 16) {
        const uint32_t word = a[i / 16];
        for (int j = 0; j < 16; ++j) d[i + j] = T(word >> j & 1);
    }
}

// Constants are 8 bytes each: the value's own, in the first of them.
template <class T>
void constant(const step& s, const lane_block& t) {
    fill(s.d, *lanes_of<T>(s.b), t.lanes);
}
void constant_bits(const step& s, const lane_block& t) { fill_bits(s.d, *s.b != 0, t.lanes); }
void int_number(const step& s, const lane_block& t) {
    fill(s.d, t.tile->inputs->ints[s.code->immediate], t.lanes);
}
void float_number(const step& s, const lane_block& t) {
    fill(s.d, t.tile->inputs->floats[s.code->immediate], t.lanes);
}
template <class T, int WHICH>
void index_input(const step& s, const lane_block& t) {
    const af_tile& tile = *t.tile;
    const int64_t begin[4] = {tile.b, tile.h, tile.q + t.first_row, tile.kv + t.first_column};
    const wraps<T> first = wraps<T>(begin[WHICH] + tile.inputs->offset[WHICH]);
    T* d = lanes_of<T>(s.d);
    const int n = t.lanes & ~15;
    if (WHICH < 2)
        for (int i = 0; i < n; ++i) d[i] = T(first);
    else
        for (int i = 0; i < n; ++i) d[i] = T(first + wraps<T>(i));
}

// The function of each operation, under its name in bytecode.h.
#define AF_BINARY_KERNELS(NAME, F, T, K)                                                     \
    AF_KERNEL run_##NAME##_##K = binary<F, T>, run_##NAME##_##K##S = binary_one<F, T>;
#define AF_INTEGER_KERNELS(NAME, F)                                                          \
    AF_BINARY_KERNELS(NAME, F, int32_t, i) AF_BINARY_KERNELS(NAME, F, int64_t, l)
#define AF_FLOAT_KERNELS(NAME, F)                                                            \
    AF_BINARY_KERNELS(NAME, F, float, f) AF_BINARY_KERNELS(NAME, F, double, d)
#define AF_NUMBER_KERNELS(NAME, F) AF_INTEGER_KERNELS(NAME, F) AF_FLOAT_KERNELS(NAME, F)
#define AF_REST_KERNELS(NAME)                                                                \
    AF_INTEGER_KERNELS(NAME, NAME) AF_BINARY_KERNELS(NAME, NAME, double, d)                  \
    AF_KERNEL run_##NAME##_f = by_rest<NAME, false>, run_##NAME##_fS = by_rest<NAME, true>;
#define AF_TEST_KERNEL(NAME, T, K)                                                           \
    AF_KERNEL run_##NAME##_##K = comparison<NAME, T, false>,                                 \
              run_##NAME##_##K##S = comparison<NAME, T, true>;
#define AF_TEST_KERNELS(NAME)                                                                \
    AF_TEST_KERNEL(NAME, int32_t, i) AF_TEST_KERNEL(NAME, int64_t, l)                        \
    AF_TEST_KERNEL(NAME, float, f) AF_TEST_KERNEL(NAME, double, d)
#define AF_UNARY_KERNELS(NAME)                                                               \
    AF_KERNEL run_##NAME##_i = unary<NAME, int32_t, int32_t>,                                \
              run_##NAME##_l = unary<NAME, int64_t, int64_t>;                                \
    AF_ROUNDING_KERNELS(NAME)
#define AF_ROUNDING_KERNELS(NAME)                                                            \
    AF_KERNEL run_##NAME##_f = unary<NAME, float, float>,                                    \
              run_##NAME##_d = unary<NAME, double, double>;
#define AF_ANGLE_KERNELS(NAME)                                                               \
    AF_KERNEL run_##NAME##_f = angles<NAME##_lanes>,                                         \
              run_##NAME##_d = unary<NAME##_lanes, double, double>;
#define AF_SELECT_KERNELS(T, K)                                                              \
    AF_KERNEL run_where_##K = selection<T, false, false>,                                    \
              run_where_##K##S = selection<T, false, true>,                                  \
              run_where_S##K = selection<T, true, false>,                                    \
              run_where_S##K##S = selection<T, true, true>;
#define AF_TYPE_KERNELS(T, K)                                                                \
    AF_SELECT_KERNELS(T, K)                                                                  \
    AF_KERNEL run_spread_##K = spread<T>, run_const_##K = constant<T>,                       \
              run_load_##K = load_lanes<#K[0]>;
#define AF_INPUT_KERNELS(NAME, WHICH)                                                        \
    AF_KERNEL run_##NAME##_i = index_input<int32_t, WHICH>,                                  \
              run_##NAME##_l = index_input<int64_t, WHICH>;

AF_NUMBER_KERNELS(add, add)
AF_NUMBER_KERNELS(sub, sub)
AF_NUMBER_KERNELS(rsub, exchanged<sub>)
AF_NUMBER_KERNELS(mul, mul)
AF_NUMBER_KERNELS(minimum, minimum)
AF_NUMBER_KERNELS(maximum, maximum)
AF_FLOAT_KERNELS(truediv, truediv)
AF_FLOAT_KERNELS(rtruediv, exchanged<truediv>)
AF_REST_KERNELS(floordiv)
AF_REST_KERNELS(mod)
AF_REST_KERNELS(fmod)
AF_NUMBER_KERNELS(pow, pow)
AF_KERNEL run_pow_number_f = pow_number<float>, run_pow_number_fS = pow_number<float>,
          run_pow_number_d = pow_number<double>, run_pow_number_dS = pow_number<double>;
AF_FLOAT_KERNELS(atan2, atan2)
AF_INTEGER_KERNELS(and, bit_and)
AF_INTEGER_KERNELS(or, bit_or)
AF_INTEGER_KERNELS(xor, bit_xor)
AF_INTEGER_KERNELS(shl, shl)
AF_INTEGER_KERNELS(shr, shr)
AF_TEST_KERNELS(eq)
AF_TEST_KERNELS(ne)
AF_TEST_KERNELS(lt)
AF_TEST_KERNELS(le)
AF_TEST_KERNELS(gt)
AF_TEST_KERNELS(ge)
AF_UNARY_KERNELS(neg)
AF_UNARY_KERNELS(abs)
AF_UNARY_KERNELS(sign)
AF_KERNEL run_not_i = unary<bit_not, int32_t, int32_t>,
          run_not_l = unary<bit_not, int64_t, int64_t>,
          run_not_p = unary<bit_not, uint16_t, uint16_t, 16>;
AF_KERNEL run_and_p = bitwise<bit_and>, run_or_p = bitwise<bit_or>, run_xor_p = bitwise<bit_xor>,
          run_and_not_p = bitwise<bit_and_not>;
AF_ROUNDING_KERNELS(floor)
AF_ROUNDING_KERNELS(ceil)
AF_ROUNDING_KERNELS(round)
AF_ROUNDING_KERNELS(trunc)
AF_ANGLE_KERNELS(sin)
AF_ANGLE_KERNELS(cos)
AF_TYPE_KERNELS(int32_t, i)
AF_TYPE_KERNELS(int64_t, l)
AF_TYPE_KERNELS(float, f)
AF_TYPE_KERNELS(double, d)
AF_KERNEL run_spread_p = bits_spread, run_const_p = constant_bits, run_load_p = load_lanes<'p'>;
AF_KERNEL run_copy_p = unary<to<uint16_t>, uint16_t, uint16_t, 16>,
          run_copy_f = unary<to<float>, float, float>;
AF_KERNEL run_wrap_u8 = unary<wrap<uint8_t>, int32_t, int32_t>,
          run_wrap_i8 = unary<wrap<int8_t>, int32_t, int32_t>,
          run_wrap_i16 = unary<wrap<int16_t>, int32_t, int32_t>,
          run_round_f16 = unary<round_f16, float, float>,
          run_round_bf16 = unary<round_bf16, float, float>;
AF_KERNEL run_i_to_l = unary<to<int64_t>, int64_t, int32_t>,
          run_l_to_i = unary<to<int32_t>, int32_t, int64_t>,
          run_i_to_f = unary<to<float>, float, int32_t>,
          run_i_to_d = unary<to<double>, double, int32_t>,
          run_l_to_f = unary<to<float>, float, int64_t>,
          run_l_to_d = unary<to<double>, double, int64_t>,
          run_f_to_i = unary<whole_of<int32_t>, int32_t, float>,
          run_f_to_l = unary<whole_of<int64_t>, int64_t, float>,
          run_f_to_d = unary<to<double>, double, float>,
          run_d_to_i = unary<whole_of<int32_t>, int32_t, double>,
          run_d_to_l = unary<whole_of<int64_t>, int64_t, double>,
          run_d_to_f = unary<to<float>, float, double>;
AF_KERNEL run_p_to_i = bits_to<int32_t>, run_p_to_f = bits_to<float>;
AF_KERNEL run_int_l = int_number, run_float_d = float_number;
AF_INPUT_KERNELS(b, 0)
AF_INPUT_KERNELS(h, 1)
AF_INPUT_KERNELS(q, 2)
AF_INPUT_KERNELS(kv, 3)
AF_KERNEL run_scatter_f = scatter_lanes<float, false>, run_scatter_fS = scatter_lanes<float, true>,
          run_scatter_d = scatter_lanes<double, false>,
          run_scatter_dS = scatter_lanes<double, true>;

#define AF_RUN(NAME, SIGNATURE) run_##NAME,
constexpr step_function FUNCTIONS[] = {AF_OPERATIONS(AF_RUN)};
#undef AF_RUN

}  // namespace
}  // namespace AF_LEVEL
