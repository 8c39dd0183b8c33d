// The online softmax of VL rows of a score tile (Milakov and Gimelshein, 2018).
//
// Scores are natural; weights are 2^(factor * score - base), so that one fused multiply-add
// precedes exp2, with a row's base near factor * maximum (score_base.h). A row's sum stays a
// vector of VL partial sums until the end: adding across lanes once a tile would cost as much as a
// vector of weights.
#pragma once
#include "score_base.h"
#include "gemm.h"
#include "pack.h"

namespace AF_LEVEL {

// Columns [begin, end) of a tile, multiples of 32, with some live pair.
struct stretch {
    int32_t begin, end;
};

// Running state of rows; arrays have rows up to a multiple of 32.
struct softmax_state {
    float* row_max;  // largest score so far
    float* row_sum;  // [row][VL]
    float* alpha;    // factor of earlier sums at the last tile
    uint8_t* nan;    // rows with a NaN score beside an infinite maximum; else NaN is in the sum
};

static void begin_rows(const softmax_state& state, int64_t rows) {
    memset(state.row_sum, 0, rows * VL * 4);
    memset(state.nan, 0, rows);
    for (int64_t r = 0; r < rows; ++r) state.row_max[r] = -infinity;
}

AF_INLINE vf pick(vf a, vf b, bool add) { return add ? a + b : larger(a, b); }

// Lane i of the result: the sum or maximum of all lanes of r[i].
template <bool ADD>
AF_INLINE vf across(const vf (&r)[VL]) {
#if defined(__AVX512F__)
    __m512 t[8], u[4];
    AF_UNROLL
    for (int i = 0; i < 8; ++i)
        t[i] = pick(_mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]),
                    _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]), ADD);
    AF_UNROLL
    for (int i = 0; i < 4; ++i) {
        const __m512d a = _mm512_castps_pd(t[2 * i]), b = _mm512_castps_pd(t[2 * i + 1]);
        u[i] = pick(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)), ADD);
    }
    const __m512 v0 = pick(_mm512_shuffle_f32x4(u[0], u[1], 0x88),
                           _mm512_shuffle_f32x4(u[0], u[1], 0xdd), ADD);
    const __m512 v1 = pick(_mm512_shuffle_f32x4(u[2], u[3], 0x88),
                           _mm512_shuffle_f32x4(u[2], u[3], 0xdd), ADD);
    return pick(_mm512_shuffle_f32x4(v0, v1, 0x88), _mm512_shuffle_f32x4(v0, v1, 0xdd), ADD);
#elif defined(__AVX2__)
    __m256 t[4], u[2];
    AF_UNROLL
    for (int i = 0; i < 4; ++i)
        t[i] = pick(_mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]),
                    _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]), ADD);
    AF_UNROLL
    for (int i = 0; i < 2; ++i) {
        const __m256d a = _mm256_castps_pd(t[2 * i]), b = _mm256_castps_pd(t[2 * i + 1]);
        u[i] = pick(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),
                    _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)), ADD);
    }
    return pick(_mm256_permute2f128_ps(u[0], u[1], 0x20),
                _mm256_permute2f128_ps(u[0], u[1], 0x31), ADD);
#else
    vu words[VL];
    for (int i = 0; i < VL; ++i) words[i] = as_uint(r[i]);
    transpose(words);
    for (int n = VL / 2; n > 0; n /= 2)
        for (int i = 0; i < n; ++i)
            words[i] = as_uint(pick(as_float(words[i]), as_float(words[i + n]), ADD));
    return as_float(words[0]);
#endif
}

// Up to VL rows of a tile.
struct softmax_tile {
    float* score;  // natural scores; float weights replace them
    int64_t ld;
    uint16_t* weight;  // bf16 weights: apart from score, or each row where its scores begin
    int64_t weight_ld;
    const uint16_t* live;  // read if masked
    int64_t live_ld;
    const stretch* part;
    int parts;
    uint32_t whole_steps;  // bit c / 32: no row has a dead pair in these columns; read if masked
};

// Notes the rows whose maximum is +inf: they are NaN, and max_scores tells them from rows with a
// NaN score.
template <bool MASKED>
static AF_NOINLINE void note_nan(int rows, const softmax_tile& t, const softmax_state& state) {
    for (int r = 0; r < rows; ++r) {
        if (state.row_max[r] != infinity) continue;
        bool found = false;
        const float* row_sum = state.row_sum + r * VL;
        for (int l = 0; l < VL; ++l) found |= row_sum[l] != row_sum[l];
        // Earlier tiles with this maximum made the sum NaN themselves.
        found &= state.alpha[r] != 1.0f;
        for (int i = 0; i < t.parts; ++i)
            for (int c = t.part[i].begin; c < t.part[i].end; ++c) {
                const bool live =
                    !MASKED || (t.live[r * t.live_ld + c / 16] >> (c % 16) & 1) != 0;
                const float s = t.score[r * t.ld + c];
                found |= live && s != s;
            }
        state.nan[r] |= found;
    }
}

// Whether live bits must be looked up for columns from c on.
template <bool MASKED>
AF_INLINE bool has_dead(const softmax_tile& t, int64_t c) {
    return MASKED && !(t.whole_steps >> (c / 32) & 1);
}

// Subtracts the maximum of each far row from its scores.
static AF_NOINLINE void subtract_row_max(int rows, const softmax_tile& t,
                                         const softmax_state& state, vi far) {
    for (int r = 0; r < rows; ++r) {
        if (!far[r]) continue;
        const vf row_max = splat(state.row_max[r]);
        float* s = t.score + r * t.ld;
        for (int i = 0; i < t.parts; ++i)
            for (int64_t c = t.part[i].begin; c < t.part[i].end; c += VL)
                store(s + c, load(s + c) - row_max);
    }
}

// Row maxima: updates row_max, sets alpha and bases of VL rows, of which `rows` are computed.
template <bool MASKED>
static AF_NOINLINE void update_row_max(int rows, float factor, const softmax_tile& t,
                                       const softmax_state& state, float* bases) {
    vf row_max[VL];
    for (int r = 0; r < VL; ++r) {
        vf a = splat(-infinity), b = a;
        if (r < rows) {
            const float* s = t.score + r * t.ld;
            const uint16_t* live = t.live + r * t.live_ld;
            for (int i = 0; i < t.parts; ++i)
                for (int64_t c = t.part[i].begin; c < t.part[i].end; c += 2 * VL) {
                    vf s0 = load(s + c), s1 = load(s + c + VL);
                    if (has_dead<MASKED>(t, c)) {
                        s0 = where(lanes(live, c), s0, splat(-infinity));
                        s1 = where(lanes(live, c + VL), s1, splat(-infinity));
                    }
                    a = larger(a, s0);
                    b = larger(b, s1);
                }
        }
        row_max[r] = larger(a, b);
    }
    const vf old = load(state.row_max);
    // A NaN maximum is dropped here: the weight of its score makes the sum NaN.
    const vf now = larger(across<false>(row_max), old);
    store(state.alpha, share_of(old, now, splat(factor)));
    store(state.row_max, now);
    store(bases, base_of(now, splat(factor)));
    const vi far = is_far(now, splat(factor));
    if (is_fused && __builtin_expect(any_bit(reinterpret_cast<vu>(far)), 0))
        subtract_row_max(rows, t, state, far);
    if (__builtin_expect(any_bit(reinterpret_cast<vu>(now == splat(infinity))), 0))
        note_nan<MASKED>(rows, t, state);
}

// Weights of row r.
template <bool MASKED, bool PAIRS>
AF_INLINE void softmax_row(int r, vf factor, const softmax_tile& t, const softmax_state& state,
                           const float* bases) {
    constexpr int degree = PAIRS ? 4 : 6;
    float* s = t.score + r * t.ld;
    [[maybe_unused]] uint16_t* weight = t.weight + r * t.weight_ld;
    const uint16_t* live = t.live + r * t.live_ld;
    const vf base = splat(bases[r]);
    vf sum0 = vf{}, sum1 = vf{};
    for (int i = 0; i < t.parts; ++i)
        for (int64_t c = t.part[i].begin; c < t.part[i].end; c += 2 * VL) {
            vf w0 = exp2<degree>(exponent(load(s + c), factor, base));
            vf w1 = exp2<degree>(exponent(load(s + c + VL), factor, base));
            if (has_dead<MASKED>(t, c)) {
                w0 = where(lanes(live, c), w0, vf{});
                w1 = where(lanes(live, c + VL), w1, vf{});
            }
            sum0 += w0;
            sum1 += w1;
            if constexpr (PAIRS) {
#if defined(__AVX512BF16__)
                _mm512_storeu_si512(weight + c,
                                    reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(w1, w0)));
#endif
            } else {
                store(s + c, w0);
                store(s + c + VL, w1);
            }
        }
    float* row_sum = state.row_sum + r * VL;
    store(row_sum, load(row_sum) * splat(state.alpha[r]) + (sum0 + sum1));
}

template <bool MASKED, bool PAIRS>
static AF_NOINLINE void softmax_rows(int rows, float factor, const softmax_tile& t,
                                     const softmax_state& state) {
    alignas(64) float bases[VL];
    update_row_max<MASKED>(rows, factor, t, state, bases);
    for (int r = 0; r < rows; ++r)
        softmax_row<MASKED, PAIRS>(r, splat(factor), t, state, bases);
}

}  // namespace AF_LEVEL
