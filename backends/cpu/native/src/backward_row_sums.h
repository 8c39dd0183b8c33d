// Sums of the weights of rows with large scores.
//
// lse is a float. Where it is 1000 its rounding makes every weight exp(s - lse) of the row wrong by
// up to 3e-5, and so does a forward that summed its products in another order. Such rows' weights
// are summed before the pass begins, and dout and delta, which they multiply, divided by the sum.
// Products of bf16 don't see it: they round weights to 8 bits.
#pragma once
#include "backward_tile.h"

namespace AF_LEVEL {

// lse from outside may cover more keys than the call has, and then delta does too: their weights
// needn't sum to 1.
inline bool has_large_rows(const af_backward_args& args, const backward_plan& plan,
                           const q_tile& tile) {
    bool found = false;
    for (int64_t r = 0; r < q_tile_rows; ++r)
        found |= is_large(tile.lse[r]);
    return found && !plan.pairs && !args.delta;
}

// Adds the weights of a group's rows in columns [from, to), whose products are in `score`.
static void add_weights(const tile_place& at, const tile_buffers& t, int64_t first, int64_t from,
                        int64_t to, vf* sums) {
    const af_problem& p = at.args->problem;
    const float scale = static_cast<float>(p.scale);
    if (p.score) {
        scale_scores(t, to - from, scale, false);
        af_tile tile = program_tile(at, t, first, from, to);
        tile.score = t.score;
        run_program(p.score, tile);
    }
    const vf factor = splat(p.score ? log2_e : scale * log2_e);
    for (int64_t i = 0; i < group; ++i) {
        const vf lse = splat(at.operands.lse[first + i]);
        for (int64_t c = from; c < to; c += VL) {
            const vf w = exp2(madd(load(t.score + i * t.strip + c - from), factor, -lse));
            sums[i] += t.living.whole
                           ? w
                           : where(lanes(t.living.live + (first + i) * live_words, c), w, vf{});
        }
    }
}

// Divides dout and delta of `at`'s large rows by their sums of weights.
static void divide_large_rows(const tile_place& at, const vf* sums) {
    const q_tile& tile = at.operands;
    float* dout = reinterpret_cast<float*>(tile.dout);
    for (int64_t r = 0; r < q_tile_rows; ++r) {
        const float sum = sum_of(sums[r]);
        // A query that isn't finite is 0 in the operands, and its row NaN whatever is done here.
        if (!is_large(tile.lse[r]) || tile.bad_query[r] ||
            !(sum > 0) || sum - sum != 0)
            continue;
        tile.delta[r] /= sum;
        for (int64_t e = 0; e < at.plan->value_dim; ++e) dout[r * at.plan->value_dim + e] /= sum;
    }
}

// `at`: a packed q tile, of whose place rows, keys and kv are yet to be set.
static void normalise_large_rows(tile_place at, tile_buffers& t) {
    const af_problem& p = at.args->problem;
    const backward_plan& plan = *at.plan;
    const int64_t tile = at.q / q_tile_rows;
    at.rows = smaller(p.q_length - at.q, q_tile_rows);
    vf sums[q_tile_rows] = {};
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
        pack_transposed(matrix_of(p.key, p.dtype, at.b, at.h / plan.q_per_kv, at.kv), at.keys,
                        p.head_dim, plan.kv_rows, reinterpret_cast<float*>(t.kv.key_t));
        for (int64_t g = 0; g < ceil_div(at.rows, group); ++g)
            for (int64_t c = t.living.begin[g]; c < t.living.end[g]; c += t.strip) {
                const int64_t end = smaller(c + t.strip, t.living.end[g]);
                score_product<false>(at, t, g * group, c, end);
                add_weights(at, t, g * group, c, end, sums + g * group);
            }
    }
    divide_large_rows(at, sums);
}

}  // namespace AF_LEVEL
