// Bases of score rows, which softmax weights are relative to.
//
// A weight is 2^(factor * (score - row_max)). One fused multiply-add gives its exponent where the
// rounded product factor * row_max is the row's base: all weights of a row are then off by one
// factor, 2^(rounding residual), which the softmax divides out. For large scores that factor is no
// longer near 1, from 2^30 on no float holds it, and the product itself overflows for scores near
// the lowest float, which masks are made of. Such a row is far: its maximum is subtracted from its
// scores before they are multiplied, which loses nothing that the scores themselves have.
//
// Without fused multiply-add all rows subtract their maxima: it costs no more.
#pragma once
#include "score_scale.h"
#include "simd.h"

namespace AF_LEVEL {

constexpr float infinity = __builtin_inff();
constexpr float far_away = 0x1p14f;

// Whether `row_max` is finite and its product is far from 0.
AF_INLINE vi is_far(vf row_max, vf factor) {
    return (magnitude(row_max * factor) >= far_away) & (magnitude(row_max) < infinity);
}

// The base that is subtracted from a row's products, or from its scores where nothing is fused:
// see `exponent`.
AF_INLINE vf base_of(vf row_max, vf factor) {
    if constexpr (!is_fused) return row_max == splat(-infinity) ? vf{} : row_max;
    const vi none = is_far(row_max, factor) | (row_max == splat(-infinity));
    return none ? vf{} : rounded(row_max * factor);
}

// The exponent of a score's weight. A far row's score comes with its maximum already subtracted.
AF_INLINE vf exponent(vf score, vf factor, vf base) {
    return is_fused ? madd(score, factor, -base) : (score - base) * factor;
}

// Rounding residual of the base of a row that isn't far.
AF_INLINE vf excess_of(vf row_max, vf factor) {
    if constexpr (!is_fused) return vf{};
    const vf base = rounded(row_max * factor), taken = -madd(row_max, factor, -base);
    return magnitude(base) < far_away ? taken : vf{};
}

// Returns 2^(base of `old` - base of `now`): sums relative to `old`, times this, are relative to
// `now`, which is not below `old`.
AF_INLINE vf share_of(vf old, vf now, vf factor) {
    const vf excess = excess_of(old, factor) - excess_of(now, factor);
    return old == now ? splat(1.0f) : exp2(madd(old - now, factor, excess));
}

// The score whose weight relative to `row_max` is 1.
inline double natural_base(float row_max, const score_scale& scale) {
    constexpr double log_2 = 0.6931471805599453;
    const double excess = excess_of(splat(row_max), splat(scale.factor))[0];
    // The factor itself was rounded: weights are relative to the rounded one's product.
    return row_max * scale.natural + excess * log_2;
}

// The logarithm of the sum of exp(score) of a row whose weights sum to `row_sum`, relative to
// `row_max`.
inline float log_of_sum(float row_max, float row_sum, const score_scale& scale) {
    return static_cast<float>(natural_base(row_max, scale) + __builtin_log(row_sum));
}

}  // namespace AF_LEVEL
