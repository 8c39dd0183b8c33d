// One tile of the backward pass: P and dS of 128 queries and 128 keys, and the five products.
//
// Groups of 32 query rows pass through scores, mods, P, dP, dS and dQ while they are in the first
// cache; P and dS of all rows are kept as right sides for dV^T += dout^T P and dK^T += q^T dS.
// With bf16 products a word of P or dS is a pair of query rows: no transpose is ever needed.
#pragma once
#include "backward_operands.h"
#include "backward_visits.h"
#include "dropout.h"

namespace AF_LEVEL {

// Buffers of one thread.
struct tile_buffers {
    float* score;     // [group][strip]
    float* plain;     // [group][strip]: scores before score_mod, for its derivative
    float* grad;      // [group][strip]: dP, then dS
    int64_t strip;    // columns that pass at a time
    int64_t kv_rows;  // of a kv tile
    uint16_t* grad_rows;  // pairs: [group][kv_rows]: dS, left side of dQ
    uint32_t* prob;   // [kv_rows / NR][q_tile_rows / word][NR]: right side of dV^T
    uint32_t* dscore;  // the same of dS: right side of dK^T
    float* dk;        // [head_dim][kv_rows]: dK^T of the kv tile
    float* dv;        // [value_dim][kv_rows]
    float* spare;     // [16][larger of the dimensions]
    block_row* block_rows;  // [kv_rows]
    void* scratch;    // of the programs
    kv_operands kv;
    tile_liveness found;    // by the mask
    tile_liveness living;   // without dead rows of one query head; may share found's bits
    uint16_t* living_bits;  // [q_tile_rows][live_words]: bits of its own
    uint16_t* kept;  // [group][live_words]: with dropout, bits of kept pairs; in found.spare
    af_error* error;
};

inline tile_buffers take_buffers(arena& memory, const backward_plan& plan, const af_problem& p) {
    tile_buffers t;
    const int64_t rows = q_tile_rows / plan.word;
    // Narrow strips stay in L1. Wide ones call a program less often, and dQ's product in float
    // reads them.
    t.strip = plan.pairs && !p.score ? 64 : 128;
    t.kv_rows = plan.kv_rows;
    t.score = memory.take<float>(group * t.strip);
    t.plain = memory.take<float>(p.score_backward ? group * t.strip : 0);
    t.grad = memory.take<float>(group * t.strip);
    t.grad_rows = memory.take<uint16_t>(plan.pairs ? group * plan.kv_rows : 0);
    t.prob = memory.take<uint32_t>(rows * plan.kv_rows);
    t.dscore = memory.take<uint32_t>(rows * plan.kv_rows);
    t.dk = memory.take<float>(plan.head_dim * plan.kv_rows);
    t.dv = memory.take<float>(plan.value_dim * plan.kv_rows);
    t.spare = memory.take<float>(16 * larger(plan.head_dim, plan.value_dim));
    t.block_rows = memory.take<block_row>(plan.kv_rows);
    t.scratch = memory.take<char>(scratch_bytes(p, true));
    t.kv = take_kv_operands(memory, plan);
    t.found.live = memory.take<uint16_t>(q_tile_rows * live_words);
    t.found.spare = memory.take<uint16_t>(q_tile_rows * (live_words + 1));
    t.living_bits = memory.take<uint16_t>(q_tile_rows * live_words);
    t.kept = t.found.spare;  // which is free once the live bits are found
    t.error = memory.take<af_error>(1);
    return t;
}

// A tile of one query head.
struct tile_place {
    const af_backward_args* args;
    const backward_plan* plan;
    int64_t b, h, q, kv;  // of the first pair
    int64_t rows, keys;
    q_tile operands;
    float* dq;  // [q_tile_rows][head_dim], added to; null: unwanted
    bool dq_is_new;  // overwritten
    double* const* captured_grad;
    bool wants_dscore;
};

// Maximum number of products in one sum of dK and dV, and of dQ but for its first tile. Under a
// causal mask the first queries of a tile weigh most, and each product after theirs rounds a large
// sum: with half of forward's length dV's error is 0.86 of its error with forward's (333 and 512
// rows, head dim 64, on a Zen 3).
constexpr int64_t longest_sum_of_gradients = 64;

// Left sides of float products may have any strides; those of pairs are rows.
template <bool PAIRS, into HOW, class AHEAD = panel_ahead>
static void multiply_rows(int64_t rows, int64_t panels, int64_t k, const uint32_t* a,
                          int64_t a_row, int64_t a_k, const uint32_t* b, int64_t b_panel,
                          float* c, int64_t ldc, AHEAD&& ahead = AHEAD()) {
    multiply_words<PAIRS, HOW>(rows, panels, k, a, a_row, a_k, b, b_panel, c, ldc, 1.0f, nullptr,
                               longest_sum_of_gradients, ahead);
}

// Prefetches what is read after a product, and has left L2 since another tile of keys read it: one
// line each time that the product takes another row of its panel. Prefetches issued at once would
// fill all places for lines in flight.
struct pieces_ahead {
    const char* at;
    int64_t lines;  // left from `at`; 0: none in any piece
    struct {
        const char* at;
        int64_t lines;
    } later[2];

    pieces_ahead() { memset(this, 0, sizeof *this); }
    // Adds one of at most three pieces; they are prefetched in this order.
    void add(const void* piece, int64_t bytes) {
        if (bytes == 0) return;
        const char* from = static_cast<const char*>(piece);
        if (lines == 0) {
            at = from;
            lines = bytes / 64;
            return;
        }
        later[later[0].lines > 0] = {from, bytes / 64};
    }
    AF_INLINE_MEMBER void line() {
        if (lines == 0) return;
        __builtin_prefetch(at, 0, 2);
        at += 64;
        if (--lines > 0) return;
        at = later[0].at;
        lines = later[0].lines;
        later[0] = later[1];
        later[1].lines = 0;
    }
    AF_INLINE_MEMBER void operator()(const void* row) {
        prefetch_panel(row);
        line();
    }
    // Prefetches the lines that are left.
    void rest() {
        while (lines > 0) line();
    }
};

// bf16 of two rows: as words of both, row r in the low half, and as rows.
AF_INLINE void store_pair(vf low, vf high, uint32_t* words, uint16_t* low_row,
                          uint16_t* high_row) {
#if defined(__AVX512BF16__)
    const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
        19, 3, 18, 2, 17, 1, 16, 0);
    store(words, reinterpret_cast<vu>(_mm512_permutexvar_epi16(order, both)));
    if (!low_row) return;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low_row), _mm512_castsi512_si256(both));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high_row),
                        _mm512_extracti64x4_epi64(both, 1));
#else
    const vh l = bf16_of_float(low), h = bf16_of_float(high);
    store(words, __builtin_convertvector(l, vu) | (__builtin_convertvector(h, vu) << 16));
    if (!low_row) return;
    store(low_row, l);
    store(high_row, h);
#endif
}

// Returns the place of column c of row r (a multiple of 2 for pairs) in `prob` and `dscore`.
template <bool PAIRS> AF_INLINE uint32_t* panel_at(uint32_t* panels, int64_t r, int64_t c) {
    constexpr int64_t rows = PAIRS ? q_tile_rows / 2 : q_tile_rows;
    return panels + c / NR * rows * NR + (PAIRS ? r / 2 : r) * NR + c % NR;
}

// P and dP - delta times P, of VL pairs.
template <bool PAIRS, bool MASKED> struct probability {
    static constexpr int DEGREE = PAIRS ? 3 : 6;  // bf16 keeps 8 bits of P
    vf p, ds;

    AF_INLINE probability of(const float* score, const float* dp, vf factor, vf lse, vf delta,
                             const uint16_t* live, int64_t c) {
        probability x;
        x.p = exp2<DEGREE>(madd(load(score), factor, -lse));
        x.ds = x.p * (load(dp) - delta);
        if constexpr (MASKED) {
            const vm m = lanes(live, c);
            x.p = where(m, x.p, vf{});
            x.ds = where(m, x.ds, vf{});
        }
        return x;
    }
};

// Operands of dV, dK and dQ from `score` and `grad` (dP) of a group of rows; columns [from, to).
// score, as `subtract_row_max` left it -> exp2(score * factor - lse) = P; grad -> P (dP - delta),
// which also goes to `grad` where products are float. MASKED: with live bits. KEEP_GRAD: only to
// `grad`, a program follows.
template <bool PAIRS, bool MASKED, bool KEEP_GRAD>
static void gradients_of_scores(const tile_place& at, const tile_buffers& t, int64_t first,
                                int64_t from, int64_t to, float factor) {
    constexpr int step = PAIRS ? 2 : 1;
    constexpr int64_t panel = q_tile_rows / step * NR;
    typedef probability<PAIRS, MASKED> probability;
    const vf f = splat(factor);
    const int64_t ld = t.strip;
    for (int64_t i = 0; i < group; i += step) {
        const int64_t r = first + i;
        vf lse[step], delta[step];
        for (int k = 0; k < step; ++k) {
            lse[k] = splat(at.operands.lse[r + k]);
            delta[k] = splat(at.operands.delta[r + k]);
        }
        const float* score = t.score + i * ld;
        float* grad = t.grad + i * ld;
        uint32_t* prob = panel_at<PAIRS>(t.prob, r, from);
        uint32_t* dscore = panel_at<PAIRS>(t.dscore, r, from);
        uint16_t* rows = PAIRS ? t.grad_rows + i * t.kv_rows + from : nullptr;
        const uint16_t* live = t.living.live + r * live_words;
        for (int64_t c = from; c < to; c += NR) {
            AF_UNROLL
            for (int j = 0; j < NR; j += VL) {
                probability x[step];
                AF_UNROLL
                for (int k = 0; k < step; ++k) {
                    x[k] = probability::of(score + k * ld + j, grad + k * ld + j, f, lse[k],
                                           delta[k], live + k * live_words, c + j);
                    if (!PAIRS || KEEP_GRAD) store(grad + k * ld + j, x[k].ds);
                }
                if constexpr (PAIRS) {
                    store_pair(x[0].p, x[1].p, prob + j, nullptr, nullptr);
                    if constexpr (!KEEP_GRAD)
                        store_pair(x[0].ds, x[1].ds, dscore + j, rows + j,
                                   rows + t.kv_rows + j);
                } else {
                    store(prob + j, as_uint(x[0].p));
                    if constexpr (!KEEP_GRAD) store(dscore + j, as_uint(x[0].ds));
                }
            }
            score += NR;
            grad += NR;
            prob += panel;
            dscore += panel;
            rows += PAIRS ? NR : 0;
        }
    }
}

// Operands of dK and dQ from `grad`, dS that a program has left there.
template <bool PAIRS>
static void operands_of_gradients(const tile_buffers& t, int64_t first, int64_t from, int64_t to) {
    constexpr int step = PAIRS ? 2 : 1;
    for (int64_t i = 0; i < group; i += step)
        for (int64_t c = from; c < to; c += VL) {
            vf ds[step];
            for (int k = 0; k < step; ++k) {
                float* grad = t.grad + (i + k) * t.strip + c - from;
                ds[k] = load(grad);
                if (!t.living.whole)
                    ds[k] = where(lanes(t.living.live + (first + i + k) * live_words, c), ds[k],
                                  vf{});
                if constexpr (!PAIRS) store(grad, ds[k]);
            }
            uint32_t* dscore = panel_at<PAIRS>(t.dscore, first + i, c);
            uint16_t* rows = t.grad_rows + i * t.kv_rows + c;
            if constexpr (PAIRS)
                store_pair(ds[0], ds[1], dscore, rows, rows + t.kv_rows);
            else
                store(dscore, as_uint(ds[0]));
        }
}

// Zeros in `prob` and `dscore` for columns [from, to) of a group of rows.
template <bool PAIRS>
static void clear_operands(const tile_buffers& t, int64_t first, int64_t from, int64_t to) {
    for (int64_t i = 0; i < group; i += PAIRS ? 2 : 1)
        for (int64_t c = from; c < to; c += VL) {
            store(panel_at<PAIRS>(t.prob, first + i, c), vu{});
            store(panel_at<PAIRS>(t.dscore, first + i, c), vu{});
        }
}

// Non-finite rows are 0 in the operands; these functions add what live pairs with them contribute.
struct nonfinite_rows {
    matrix query, key, value, dout;

    nonfinite_rows(const tile_place& at) {
        const af_problem& p = at.args->problem;
        const int64_t kv_head = at.h / at.plan->q_per_kv;
        query = matrix_of(p.query, p.dtype, at.b, at.h, at.q);
        key = matrix_of(p.key, p.dtype, at.b, kv_head, at.kv);
        value = matrix_of(p.value, p.dtype, at.b, kv_head, at.kv);
        dout = matrix_of(at.args->dout, p.dtype, at.b, at.h, at.q);
    }

    // Scores (unscaled) and dP of a group of rows.
    void products(const tile_place& at, const tile_buffers& t, int64_t first, int64_t from,
                  int64_t end) const {
        const af_problem& p = at.args->problem;
        for (int64_t r = first; r < smaller(first + group, at.rows); ++r)
            for (int64_t c = from; c < smaller(end, at.keys); ++c) {
                if (!t.living.is_live(r, c)) continue;
                const int64_t to = (r - first) * t.strip + c - from;
                if (at.operands.nonfinite_query[r])
                    t.score[to] = row_product(query, r, key, c, p.head_dim);
                if (at.operands.nonfinite_dout[r])
                    t.grad[to] = row_product(dout, r, value, c, p.value_head_dim);
            }
    }

    // dQ, dK and dV, from the P and dS that the products have taken.
    template <bool PAIRS>
    void sums(const tile_place& at, const tile_buffers& t, int64_t first) const {
        const af_problem& p = at.args->problem;
        for (int64_t r = first; r < smaller(first + group, at.rows); ++r)
            for (int64_t c = 0; c < at.keys; ++c) {
                if (!t.living.is_live(r, c)) continue;
                const uint32_t word = *panel_at<PAIRS>(t.prob, r, c);
                const uint32_t bits = !PAIRS ? word : r % 2 ? word & 0xffff0000u : word << 16;
                const float prob = as_float(splat(bits))[0];
                const int64_t i = r - first;
                const uint32_t rounded =
                    PAIRS ? uint32_t(t.grad_rows[i * t.kv_rows + c]) << 16 : 0;
                const float ds = PAIRS ? as_float(splat(rounded))[0]
                                       : t.grad[i * t.strip + c - t.living.begin[first / group]];
                if (at.dq && t.kv.nonfinite_key[c])
                    for (int64_t e = 0; e < p.head_dim; ++e)
                        at.dq[r * at.plan->head_dim + e] += ds * element(key, c, e);
                if (at.plan->wants_dk && at.operands.nonfinite_query[r])
                    for (int64_t e = 0; e < p.head_dim; ++e)
                        t.dk[e * t.kv_rows + c] += ds * element(query, r, e);
                if (has_dropout(p) && !(t.kept[i * live_words + c / 16] >> (c % 16) & 1)) continue;
                if (at.plan->wants_dv && at.operands.nonfinite_dout[r])
                    for (int64_t e = 0; e < p.value_head_dim; ++e)
                        t.dv[e * t.kv_rows + c] += prob * element(dout, r, e);
            }
    }
};

// Returns the rectangle of a group's columns [from, to) as programs see it.
inline af_tile program_tile(const tile_place& at, const tile_buffers& t, int64_t first,
                            int64_t from, int64_t to) {
    af_tile tile = tile_of(at.args->problem, at.b, at.h, at.q + first, at.kv + from,
                           smaller(group, at.rows - first), smaller(to, at.keys) - from,
                           t.scratch, t.error);
    tile.live = t.living.whole ? nullptr : t.living.live + first * live_words + from / 16;
    tile.ld = t.strip;
    tile.live_ld = live_words;
    tile.captured_grad = at.captured_grad;
    return tile;
}

// Returns the part of a mask program's tile that is fixed; the walk sets rows and columns.
inline af_tile mask_tile(const af_problem& p, const tile_buffers& t, int64_t b, int64_t h) {
    return tile_of(p, b, h, 0, 0, 0, 0, t.scratch, t.error);
}

// Scales a group's products of queries and keys for the score program; copies them to `plain`.
static void scale_scores(const tile_buffers& t, int64_t columns, float scale, bool copy) {
    for (int64_t i = 0; i < group; ++i)
        for (int64_t c = 0; c < columns; c += VL) {
            const int64_t n = i * t.strip + c;
            const vf x = load(t.score + n) * splat(scale);
            store(t.score + n, x);
            if (copy) store(t.plain + n, x);
        }
}

// The factor that products, or modified scores, are multiplied with before exp2.
inline float factor_of(const af_problem& p) {
    return p.score ? log2_e : static_cast<float>(p.scale * 1.4426950408889634);
}

// Subtracts the row maxima of a group's large rows.
static void subtract_row_max(const tile_place& at, const tile_buffers& t, int64_t first,
                          int64_t columns) {
    if (*at.operands.large_rows == 0) return;
    for (int64_t i = 0; i < group; ++i) {
        if (!at.operands.large[first + i]) continue;
        const vf row_max = splat(at.operands.row_max[first + i]);
        float* score = t.score + i * t.strip;
        for (int64_t c = 0; c < columns; c += VL) store(score + c, load(score + c) - row_max);
    }
}

// Finds the pairs of a group that dropout keeps, and turns dP into the gradient of the weights
// before dropout.
static void drop_gradients(const tile_place& at, const tile_buffers& t, int64_t first,
                           int64_t from, int64_t to) {
    const af_problem& p = at.args->problem;
    if (!has_dropout(p)) return;
    for (int64_t i = 0; i < group; ++i) {
        const row_keys row = keys_of_row(p, at.b, at.h, at.q + first + i);
        uint16_t* kept = t.kept + i * live_words;
        float* grad = t.grad + i * t.strip - from;
        for (int64_t c = from; c < to; c += 16) kept[c / 16] = kept_bits(p, row, at.kv + c);
        for (int64_t c = from; c < to; c += VL)
            store(grad + c, where(lanes(kept, c), load(grad + c) * p.dropout_scale, vf{}));
    }
}

// Clears the dropped P of a group, which dV must not see. Where dV is written it is scaled.
template <bool PAIRS>
static void drop_probabilities(const tile_place& at, const tile_buffers& t, int64_t first,
                               int64_t from, int64_t to) {
    if (!has_dropout(at.args->problem)) return;
    for (int64_t i = 0; i < group; i += PAIRS ? 2 : 1) {
        const uint16_t* kept = t.kept + i * live_words;
        for (int64_t c = from; c < to; c += VL) {
            uint32_t* prob = panel_at<PAIRS>(t.prob, first + i, c);
            const auto bits_of = [&](const uint16_t* row, uint32_t bits) AF_FLAT {
                return as_uint(where(lanes(row, c), as_float(splat(bits)), vf{}));
            };
            vu mask = bits_of(kept, PAIRS ? 0xffffu : 0xffffffffu);
            if (PAIRS) mask |= bits_of(kept + live_words, 0xffff0000u);
            store(prob, load(prob) & mask);
        }
    }
}

// Turns scores into P, and dP into dS by the mods; leaves `prob`, `dscore` and the left side of
// dQ.
template <bool PAIRS>
static void apply_mods(const tile_place& at, const tile_buffers& t, int64_t first, int64_t from,
                       int64_t to) {
    const af_problem& p = at.args->problem;
    const bool whole = t.living.whole;
    const bool derivative = p.score && p.score_backward && at.wants_dscore;
    const float factor = factor_of(p);
    af_tile tile = program_tile(at, t, first, from, to);
    if (p.score) {
        scale_scores(t, to - from, static_cast<float>(p.scale), derivative);
        tile.score = t.score;
        run_program(p.score, tile);
    }
    subtract_row_max(at, t, first, to - from);
    drop_gradients(at, t, first, from, to);
    if (!derivative) {
        if (whole)
            gradients_of_scores<PAIRS, false, false>(at, t, first, from, to, factor);
        else
            gradients_of_scores<PAIRS, true, false>(at, t, first, from, to, factor);
        drop_probabilities<PAIRS>(at, t, first, from, to);
        return;
    }
    if (whole)
        gradients_of_scores<PAIRS, false, true>(at, t, first, from, to, factor);
    else
        gradients_of_scores<PAIRS, true, true>(at, t, first, from, to, factor);
    drop_probabilities<PAIRS>(at, t, first, from, to);
    tile.score = t.plain;
    tile.grad = t.grad;
    run_program(p.score_backward, tile);
    operands_of_gradients<PAIRS>(t, first, from, to);
}

// Products of a group's queries with keys [from, to), to `score`.
template <bool PAIRS, class AHEAD = panel_ahead>
static void score_product(const tile_place& at, const tile_buffers& t, int64_t first, int64_t from,
                          int64_t to, AHEAD&& ahead = AHEAD()) {
    const backward_plan& plan = *at.plan;
    constexpr int64_t word = PAIRS ? 2 : 1;
    const int64_t k = PAIRS ? plan.head_dim : at.args->problem.head_dim;
    multiply_rows<PAIRS, into::store>(group, (to - from) / NR, k,
                                      at.operands.query + first * plan.head_dim / word,
                                      plan.head_dim / word, 1, t.kv.key_t + from * (k / word),
                                      k / word * NR, t.score, t.strip, ahead);
}

}  // namespace AF_LEVEL
