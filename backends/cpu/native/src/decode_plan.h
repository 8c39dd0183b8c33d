// How a decoding problem is cut, and where everything lies in its workspace.
//
// A unit is the query heads of one (batch, kv head), or one query head where each has a row of
// runs of its own. Its keys are cut into splits, so that even one sequence occupies many threads;
// the number of splits depends on the problem alone.
//
// Memory: (4 + Ev rounded up to vectors) floats a row and split, and a tile's buffers a thread.
#pragma once
#include "pack.h"
#include "workspace.h"

namespace AF_LEVEL {
namespace {

// Keys of a tile. Each begins two streams from memory anew: with 256, decoding read a tenth less.
constexpr int64_t decode_columns = 512;
static_assert(decode_columns <= AF_TILE_COLUMNS, "programs take no more");
constexpr int64_t decode_ld = decode_columns + 32;  // products write past the last key
constexpr int64_t decode_live_ld = decode_columns / 16;  // words
constexpr int64_t wanted_jobs = 128;
constexpr int64_t least_split = 1024;  // keys

struct decode_plan {
    int64_t heads;  // of a unit
    int64_t units, units_a_batch;
    int64_t rows, rows_padded;
    int64_t splits, split_keys;
    bool panels;  // decode_panels.h makes the products
    int64_t query_width, value_width;
    int64_t record;  // floats of a row of a split: row_max, row_sum, nan, nothing, values
    bool pairs;      // the level multiplies bf16, and it is that
};

// `heads` of a unit: all of the group, or 1. The group's plan takes at least as much memory.
AF_INLINE decode_plan decode_plan_of(const af_problem& p, int64_t heads) {
    decode_plan d;
    d.heads = heads;
    d.units_a_batch = p.q_heads / d.heads;
    d.units = p.batch * d.units_a_batch;
    d.rows = d.heads * p.q_length;
    d.rows_padded = round_up(d.rows, VL);
    const int64_t keys = p.kv_length > 0 ? p.kv_length : 1;
    d.split_keys = round_up(ceil_div(keys, ceil_div(wanted_jobs, d.units)), decode_columns);
    if (d.split_keys < least_split) d.split_keys = least_split;
    d.splits = ceil_div(keys, d.split_keys);
    d.query_width = round_up(p.head_dim, 2 * VL);
    d.pairs = has_pairs && kv_dtype(p) == AF_BF16;
    const auto fits = [](int64_t dim) { return dim > 0 && dim <= widest_panel; };
    d.panels = !d.pairs && d.rows >= least_panel_rows && fits(p.head_dim) && fits(p.value_head_dim);
    d.value_width = round_up(p.value_head_dim, d.panels ? NR : VL);
    d.record = 4 + d.value_width;
    return d;
}

}  // namespace
}  // namespace AF_LEVEL
