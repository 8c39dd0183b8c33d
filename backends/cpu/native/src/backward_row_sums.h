// Row maxima and row sums of rows with large scores, computed again.
//
// lse is a float. At 16 its rounding makes every weight exp(s - lse) of the row wrong by up to
// 1e-6, at 1000 by 3e-5; a forward that summed its products in another order does the same. At
// 10^8 the log of the row sum is lost, and at 3 * 10^38 the product overflows. Before the pass
// begins such rows get a row maximum of their own, from the very scores that the pass will see,
// and an lse relative to it. lse from outside may cover more keys than the call has: its rows keep
// the maximum that lse itself gives.
#pragma once
#include "backward_tile.h"

namespace AF_LEVEL {

// Row maxima and row sums of a q tile's large rows. A maximum is stored times the sign of the
// factor, so that it is the largest for a negative factor too.
struct large_row_sums {
    float row_max[q_tile_rows];
    vf row_sum[q_tile_rows];
};

inline float sign_of_factor(const af_problem& p) { return p.score || p.scale > 0 ? 1.0f : -1.0f; }

// Adds the weights of a group's large rows in columns [from, to), whose products are in `score`.
static void add_weights(const tile_place& at, const tile_buffers& t, int64_t first, int64_t from,
                        int64_t to, large_row_sums& rows) {
    const af_problem& p = at.args->problem;
    if (p.score) {
        scale_scores(t, to - from, static_cast<float>(p.scale), false);
        af_tile tile = program_tile(at, t, first, from, to);
        tile.score = t.score;
        run_program(p.score, tile);
    }
    const float factor = factor_of(p);
    const vf sign = splat(sign_of_factor(p)), size = splat(factor) * sign;
    for (int64_t i = 0; i < group; ++i) {
        const int64_t r = first + i;
        if (!at.operands.large[r]) continue;
        const float* score = t.score + i * t.strip - from;
        const uint16_t* live = t.living.live + r * live_words;
        const auto score_at = [&](int64_t c) AF_FLAT {
            const vf s = load(score + c) * sign;
            return t.living.whole ? s : where(lanes(live, c), s, splat(-infinity));
        };
        vf most = splat(rows.row_max[r]);
        for (int64_t c = from; c < to; c += VL) most = larger(score_at(c), most);
        const float row_max = largest_of(most);
        if (row_max == -infinity) continue;
        vf row_sum = rows.row_sum[r] * exp2((splat(rows.row_max[r]) - row_max) * size);
        for (int64_t c = from; c < to; c += VL) row_sum += exp2((score_at(c) - row_max) * size);
        rows.row_max[r] = row_max;
        rows.row_sum[r] = row_sum;
    }
}

// Stores the maxima and sums of large rows. A non-finite query is 0 in the operands, so its row
// keeps its maximum and its sum.
static void keep_row_max(const tile_place& at, const large_row_sums& rows) {
    const q_tile& tile = at.operands;
    const af_problem& p = at.args->problem;
    const float sign = sign_of_factor(p);
    for (int64_t r = 0; r < q_tile_rows; ++r) {
        if (!tile.large[r] || tile.nonfinite_query[r] || rows.row_max[r] == -infinity) continue;
        tile.row_max[r] = rows.row_max[r] * sign;
        double whole = sum_of(rows.row_sum[r]);
        if (p.sinks)
            whole += __builtin_exp(p.sinks[at.h] - tile.row_max[r] * (p.score ? 1.0 : p.scale));
        tile.lse[r] = static_cast<float>(__builtin_log2(whole));
    }
}

// `at` is a packed q tile; rows, keys and kv of its place are set here.
template <bool PAIRS> static void sum_large_rows(tile_place at, tile_buffers& t) {
    const af_problem& p = at.args->problem;
    const backward_plan& plan = *at.plan;
    const int64_t tile = at.q / q_tile_rows;
    at.rows = smaller(p.q_length - at.q, q_tile_rows);
    large_row_sums rows;
    for (int64_t r = 0; r < q_tile_rows; ++r) {
        rows.row_max[r] = -infinity;
        rows.row_sum[r] = vf{};
    }
    if constexpr (PAIRS) pairs_begin();
    for (at.kv = 0; at.kv < p.kv_length; at.kv += plan.kv_rows) {
        at.keys = smaller(p.kv_length - at.kv, plan.kv_rows);
        q_tile_walk walk;
        walk.rows = t.block_rows;
        walk.start(p, at.b, at.h, at.kv, at.keys);
        walk.at = tile;
        int64_t found;
        if (!walk.next(&found) || found != tile) continue;
        t.found.find(walk, tile, mask_tile(p, t, at.b, at.h));
        t.living = t.found.without_dead_rows(at.operands, at.keys, t.living_bits);
        if (!t.living.any) continue;
        pack_keys_transposed(p, plan, matrix_of(p.key, p.dtype, at.b, at.h / plan.q_per_kv, at.kv),
                             at.keys, t.kv);
        for (int64_t g = 0; g < ceil_div(at.rows, group); ++g)
            for (int64_t c = t.living.begin[g]; c < t.living.end[g]; c += t.strip) {
                const int64_t end = smaller(c + t.strip, t.living.end[g]);
                score_product<PAIRS>(at, t, g * group, c, end);
                add_weights(at, t, g * group, c, end, rows);
            }
    }
    if constexpr (PAIRS) pairs_end();
    keep_row_max(at, rows);
}

}  // namespace AF_LEVEL
