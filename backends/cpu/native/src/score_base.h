// What the weights of a row of scores are relative to.
//
// A weight is 2^(factor * (score - top)). One fused multiply-add gives its exponent where the
// product factor * top, as it is rounded, is the row's base: all weights of a row are off by one
// factor then, 2^(what rounding took), which the softmax divides out. For large scores that factor
// is no longer near 1, from 2^30 on no float holds it, and the product itself overflows for such
// scores as the lowest float, of which masks are made. Such a row is far: its top is subtracted from
// its scores before they are multiplied, which loses nothing that the scores themselves have.
//
// Where products are rounded before they are added, all rows subtract their tops: it costs no more.
#pragma once
#include "score_scale.h"
#include "simd.h"

namespace AF_LEVEL {

constexpr float infinity = __builtin_inff();
constexpr float far_away = 0x1p14f;

// `top` is finite and its product is far from 0.
AF_INLINE vi is_far(vf top, vf factor) {
    return (magnitude(top * factor) >= far_away) & (magnitude(top) < infinity);
}

// What is taken from a row's scores, or from their products: see `exponent`.
AF_INLINE vf base_of(vf top, vf factor) {
    if constexpr (!is_fused) return top == splat(-infinity) ? vf{} : top;
    const vi none = is_far(top, factor) | (top == splat(-infinity));
    return none ? vf{} : rounded(top * factor);
}

// Of a score, from which the top was taken already if its row is far.
AF_INLINE vf exponent(vf score, vf factor, vf base) {
    return is_fused ? madd(score, factor, -base) : (score - base) * factor;
}

// What rounding added to the base of a row that isn't far.
AF_INLINE vf excess_of(vf top, vf factor) {
    if constexpr (!is_fused) return vf{};
    const vf base = rounded(top * factor), taken = -madd(top, factor, -base);
    return magnitude(base) < far_away ? taken : vf{};
}

// 2^(base of `old` - base of `now`): sums relative to `old`, times this, are relative to `now`,
// which is not below `old`.
AF_INLINE vf share_of(vf old, vf now, vf factor) {
    const vf excess = excess_of(old, factor) - excess_of(now, factor);
    return old == now ? splat(1.0f) : exp2(madd(old - now, factor, excess));
}

// The logarithm of the sum of exp(score) of a row whose weights sum to `sum`, relative to `top`.
inline float log_of_sum(float top, float sum, const score_scale& scale) {
    constexpr double log_2 = 0.6931471805599453;
    const double excess = excess_of(splat(top), splat(scale.factor))[0];
    // The factor itself was rounded: weights are relative to the rounded one's product.
    return static_cast<float>(top * scale.natural + excess * log_2 + __builtin_log(sum));
}

}  // namespace AF_LEVEL
