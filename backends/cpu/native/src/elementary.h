// Elementary functions of vf, within 2.4 units in the last place, subnormals, infinities and
// NaN included. Polynomials are own minimax fits (in relative error) on the reduced ranges.
//
// Sums a * b + c are fused where the level can: the error bounds hold either way.
#pragma once
#include "simd.h"

namespace AF_LEVEL {
namespace elementary {

constexpr float INF = __builtin_inff();
constexpr float NOT_A_NUMBER = __builtin_nanf("");

AF_INLINE vf with_sign(vf x, vf sign) {
    return as_float((as_int(x) & 0x7fffffff) | (as_int(sign) & int32_t(0x80000000)));
}

// Rounds halves to even, for |x| < 2^22.
AF_INLINE vf nearest(vf x) {
    const vf shift = splat(12582912.0f);  // 1.5 * 2^23
    return (x + shift) - shift;
}

// p * 2^n for a whole n in -300..300; rounds once, if the result is subnormal.
AF_INLINE vf scaled(vf p, vf n) {
#if defined(__AVX512F__)
    return _mm512_scalef_ps(p, n);
#else
    const vi whole = __builtin_convertvector(n, vi);
    const vi half = whole >> 1;
    const vf first = as_float(reinterpret_cast<vu>(half + 127) << 23);
    const vf second = as_float(reinterpret_cast<vu>(whole - half + 127) << 23);
    return p * first * second;
#endif
}

AF_INLINE vf polynomial(vf x, vf sum) {
    (void)x;
    return sum;
}
template <class... Rest>
AF_INLINE vf polynomial(vf x, vf sum, float next, Rest... rest) {
    return polynomial(x, madd(sum, x, splat(next)), rest...);
}

// x = n ln 2 + r, |r| <= ln 2 / 2, and (e^r - 1 - r) / r^2.
struct exp_parts {
    vf n, r, tail;
};
AF_INLINE vf exp_tail(vf r) {
    return polynomial(r, splat(1.38142193e-3f), 8.36889911e-3f, 4.16684076e-2f, 1.66665196e-1f,
                      4.9999994e-1f);
}
// The same, exact enough where e^r - 1 matters.
AF_INLINE vf expm1_tail(vf r) {
    return polynomial(r, splat(1.98458976e-4f), 1.39408931e-3f, 8.33338965e-3f, 4.16663587e-2f,
                      1.66666657e-1f, 0.5f);
}
template <bool LESS_ONE = false>
AF_INLINE exp_parts exp_reduced(vf x) {
    const vf n = nearest(x * 1.44269504f);
    // The upper part of ln 2 has 9 zeros at its end: n times it is exact.
    vf r = madd(n, splat(-0.693359375f), x);
    r = madd(n, splat(2.12194440e-4f), r);
    return {n, r, LESS_ONE ? expm1_tail(r) : exp_tail(r)};
}

AF_INLINE vf clamped(vf x, float low, float high) {
    x = x < low ? splat(low) : x;
    return x > high ? splat(high) : x;  // NaN stays
}

AF_INLINE vf exp(vf x) {
    const exp_parts e = exp_reduced(clamped(x, -105.0f, 90.0f));
    return scaled(madd(e.tail, e.r * e.r, e.r) + 1.0f, e.n);
}

AF_INLINE vf exp2(vf x) {
    x = clamped(x, -151.0f, 129.0f);
    const vf n = nearest(x);
    const vf r = (x - n) * 0.693147181f;
    return scaled(madd(exp_tail(r), r * r, r) + 1.0f, n);
}

AF_INLINE vf expm1(vf x) {
    const exp_parts e = exp_reduced<true>(clamped(x, -30.0f, 88.9f));
    const vf p = madd(e.tail, e.r * e.r, e.r);
    // 2^n would overflow one step before the result does.
    const vf half = scaled(splat(0.5f), e.n);
    const vf y = 2.0f * (madd(half, p, half - 0.5f));
    return e.n == 0.0f ? with_sign(p, x) : y;
}

AF_INLINE vf sigmoid(vf x) {
    const vf e = exp(-magnitude(x));
    return (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

// 1 / x for 1 <= x < 2^60, within one unit in the last place.
AF_INLINE vf reciprocal(vf x) {
#if defined(__AVX512F__)
    const vf y = _mm512_rcp14_ps(x);
    return madd(y, 1.0f - x * y, y);
#else
    return 1.0f / x;
#endif
}

AF_INLINE vf tanh(vf x) {
    const vf a = magnitude(x);
    const vf z = x * x;
    const vf small = madd(polynomial(z, splat(-5.70497848e-3f), 2.06390787e-2f, -5.37397116e-2f,
                                     1.33314416e-1f, -3.33332807e-1f) *
                              z,
                          a, a);
    // From 0.625 on 1 - 2 / (e^2a + 1), which hides a third of an error of e^2a and more.
    vf power = a * 2.88539008f;
    power = power > 40.0f ? splat(40.0f) : power;  // NaN stays
    const vf n = nearest(power);
    const vf f = power - n;
    const vf e = scaled(polynomial(f, splat(1.3264697e-3f), 9.67153441e-3f, 5.55073395e-2f,
                                   2.40222424e-1f, 6.93147004e-1f, 1.0f),
                        n);
    const vf large = madd(reciprocal(e + 1.0f), splat(-2.0f), splat(1.0f));
    return with_sign(a < 0.625f ? small : large, x);
}

// x = 2^n (1 + f), sqrt(1/2) <= 1 + f < sqrt(2), and log(1 + f) - f.
struct log_parts {
    vf n, f, tail;
};
AF_INLINE log_parts log_reduced(vf x) {
    const vi subnormal = x < 1.17549435e-38f;
    x = subnormal ? x * 33554432.0f : x;
    const vu bits = as_uint(x) - 0x3f3504f3u;
    const vi n = (reinterpret_cast<vi>(bits) >> 23) - (subnormal & 25);
    const vf f = as_float((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
    vf p = polynomial(f, splat(6.74660131e-2f), -1.16756409e-1f, 1.18881747e-1f, -1.24055915e-1f,
                      1.42195508e-1f, -1.66679963e-1f, 2.00021192e-1f, -2.50000089e-1f,
                      3.33333135e-1f);
    const vf square = f * f;
    p = madd(p * f, square, -0.5f * square);
    return {__builtin_convertvector(n, vf), f, p};
}
AF_INLINE vf log_edges(vf x, vf y) {
    y = x == 0.0f ? splat(-INF) : y;
    y = x == INF ? x : y;
    return x < 0.0f || x != x ? splat(NOT_A_NUMBER) : y;
}

AF_INLINE vf log(vf x) {
    const log_parts l = log_reduced(x);
    const vf y = madd(l.n, splat(-2.12194440e-4f), l.tail);
    return log_edges(x, madd(l.n, splat(0.693359375f), l.f + y));
}

AF_INLINE vf log2(vf x) {
    const log_parts l = log_reduced(x);
    // (f + tail) / ln 2, with 1 / ln 2 = 1 + 0.4427: the large parts come last.
    vf y = l.tail * 0.442695041f;
    y = madd(l.f, splat(0.442695041f), y);
    y = ((y + l.tail) + l.f) + l.n;
    return log_edges(x, y);
}

AF_INLINE vf log10(vf x) {
    const log_parts l = log_reduced(x);
    // log10(e) = 0.43359375 + 7.00731903e-4, log10(2) = 0.30078125 + 2.48745664e-4.
    vf y = l.tail * 7.00731903e-4f;
    y = madd(l.f, splat(7.00731903e-4f), y);
    y = madd(l.n, splat(2.48745664e-4f), y);
    y = madd(l.tail, splat(0.43359375f), y);
    y = madd(l.f, splat(0.43359375f), y);
    return log_edges(x, madd(l.n, splat(0.30078125f), y));
}

AF_INLINE vf log1p(vf x) {
    const vf sum = 1.0f + x;
    const vf lost = x - (sum - 1.0f);
    const vf y = log(sum) + lost / sum;
    return x == -1.0f || x == INF ? log(sum) : x == 0.0f ? x : y;
}

AF_INLINE vf sqrt(vf x) {
#if defined(__AVX512F__)
    return _mm512_sqrt_ps(x);
#else
    vf y;
    for (int i = 0; i < VL; ++i) y[i] = __builtin_sqrtf(x[i]);
    return y;
#endif
}
AF_INLINE vf rsqrt(vf x) { return 1.0f / sqrt(x); }

// Largest |x|: beyond it, the reduction below loses digits.
constexpr float LARGEST_ANGLE = 8192.0f;

// x = n pi / 2 + r, |r| <= pi / 4; sin and cos of r.
struct circle {
    vi n;
    vf sine, cosine;
};
AF_INLINE circle on_circle(vf x) {
    const vf n = nearest(x * 0.636619772f);
    // pi / 2 in four parts, of which three have zeros enough at their ends for exact products.
    vf r = madd(n, splat(-1.5703125f), x);
    r = madd(n, splat(-4.83751297e-4f), r);
    r = madd(n, splat(-7.54953362e-8f), r);
    r = madd(n, splat(-2.56334407e-12f), r);
    const vf z = r * r;
    const vf s = polynomial(z, splat(2.71804629e-6f), -1.98393042e-4f, 8.33332911e-3f,
                            -1.66666672e-1f);
    const vf c = polynomial(z, splat(2.4432411e-5f), -1.38873095e-3f, 4.16666456e-2f);
    return {__builtin_convertvector(n, vi), madd(s * z, r, r), madd(c * z, z, 1.0f - 0.5f * z)};
}
AF_INLINE vf sin(vf x) {
    const circle c = on_circle(x);
    const vf y = (c.n & 1) != 0 ? c.cosine : c.sine;
    return x == 0.0f ? x : as_float(as_uint(y) ^ ((reinterpret_cast<vu>(c.n) & 2u) << 30));
}
AF_INLINE vf cos(vf x) {
    const circle c = on_circle(x);
    const vf y = (c.n & 1) != 0 ? c.sine : c.cosine;
    return as_float(as_uint(y) ^ (((reinterpret_cast<vu>(c.n) + 1u) & 2u) << 30));
}

AF_INLINE vf erf(vf x) {
    const vf a = magnitude(x);
    const vf z = x * x;
    const vf small =
        madd(polynomial(z, splat(7.85385419e-5f), -8.01019138e-4f, 5.18832728e-3f, -2.6853811e-2f,
                        1.12835854e-1f, -3.7612627e-1f, 1.28379166e-1f),
             x, x);
    // -log(1 - erf) on [0.9, 4]; beyond, erf is 1.
    const vf t = a > 4.0f ? splat(4.0f) : a;
    const vf power =
        polynomial(t, splat(2.08286183e-5f), -4.31393564e-4f, 4.1562547e-3f, -2.50806157e-2f,
                   1.08220384e-1f, 6.33400857e-1f, 1.12948835f, -1.69205116e-4f);
    const exp_parts e = exp_reduced(-power);
    const vf whole = as_float((__builtin_convertvector(e.n, vi) + 127) << 23);
    const vf large = 1.0f - madd(madd(e.tail, e.r * e.r, e.r), whole, whole);
    return with_sign(x != x ? x : a < 0.95f ? small : large, x);
}

}  // namespace elementary
}  // namespace AF_LEVEL
