// What the weights of a row of scores are relative to.
//
// A weight is 2^(factor * (score - top)). One fused multiply-add gives its exponent where the
// product factor * top, as it is rounded, is the row's base: all weights of a row are off by one
// factor then, 2^(what rounding took), which the softmax divides out. For large scores that factor
// is no longer near 1, from 2^30 on no float holds it, and the product itself overflows for such
// scores as the lowest float, of which masks are made. Such a row is far: its top is subtracted from
// its scores before they are multiplied, which loses nothing that the scores themselves have.
#pragma once
#include "simd.h"

namespace AF_LEVEL {

constexpr float infinity = __builtin_inff();
constexpr float far_away = 0x1p14f;

// `top` is finite and its product is far from 0.
AF_INLINE vi is_far(vf top, vf factor) {
    return (magnitude(top * factor) >= far_away) & (magnitude(top) < infinity);
}

// 2^(base of `old` - base of `now`): sums relative to `old`, times this, are relative to `now`,
// which is not below `old`.
AF_INLINE vf share_of(vf old, vf now, vf factor) {
    // What rounding added to a base that isn't far.
    const auto excess = [&](vf top) AF_FLAT {
        const vf base = rounded(top * factor);
        const vf taken = -madd(top, factor, -base);
        return magnitude(base) < far_away ? taken : vf{};
    };
    const vf exponent = madd(old - now, factor, excess(old) - excess(now));
    return old == now ? splat(1.0f) : exp2(exponent);
}

}  // namespace AF_LEVEL
