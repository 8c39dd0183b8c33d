// How a decoding problem is cut, and where everything lies in its workspace.
//
// A unit is the query heads of one (batch, kv head), or one query head where each has a row of
// runs of its own. Its keys are cut into splits, so that even one sequence occupies many threads;
// the number of splits depends on the problem alone.
//
// Memory: (4 + Ev rounded up to vectors) floats a row and split, and a tile's buffers a thread.
#pragma once
#include "pack.h"
#include "tiles.h"

namespace AF_LEVEL {
namespace {

// Keys of a tile. Each begins two streams from memory anew: with 256, decoding read a tenth less.
constexpr int64_t decode_columns = 512;
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
    int64_t score_bytes, live_bytes, spare_bytes, query_bytes, pair_bytes, tile_bytes, panel_bytes,
        out_bytes, row_bytes, scratch_bytes, thread_bytes;
    int64_t record_bytes, total;
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
    const bool pairs = has_pairs && p.dtype == AF_BF16;
    const auto fits = [](int64_t dim) { return dim > 0 && dim <= widest_panel; };
    d.panels = !pairs && d.rows >= least_panel_rows && fits(p.head_dim) && fits(p.value_head_dim);
    d.value_width = round_up(p.value_head_dim, d.panels ? NR : VL);
    d.record = 4 + d.value_width;
    d.score_bytes = d.rows_padded * decode_ld * 4;
    d.live_bytes = d.rows_padded * decode_live_ld * 2;
    d.spare_bytes = round_up(d.rows_padded * (decode_live_ld + 1) * 2, 64);
    d.query_bytes = round_up(d.rows * d.query_width * 4, 64);
    d.pair_bytes = pairs ? round_up(d.rows * d.query_width * 2, 64) : 0;
    d.tile_bytes = pairs && has_tiles ? round_up(d.rows, NR) * d.query_width * 2 : 0;
    d.panel_bytes = d.panels ? round_up(d.rows, NR) * d.query_width * 4 : 0;
    d.out_bytes = round_up(d.rows * d.value_width * 4, 64);
    d.row_bytes = round_up(d.rows_padded * (4 + 4 * VL + 4 + 1), 64);
    d.scratch_bytes = 0;
    const af_program* programs[] = {p.mask, p.score};
    for (const af_program* program : programs)
        if (program && program->scratch_bytes > d.scratch_bytes)
            d.scratch_bytes = program->scratch_bytes;
    d.scratch_bytes = round_up(d.scratch_bytes, 64);
    d.thread_bytes = 2 * d.score_bytes + d.live_bytes + d.spare_bytes + d.query_bytes +
                     d.pair_bytes + d.tile_bytes + d.panel_bytes + 2 * d.out_bytes +
                     d.row_bytes + d.scratch_bytes + 64;
    d.record_bytes = round_up(d.units * d.splits * d.rows * d.record * 4, 64);
    d.total = d.record_bytes + p.threads * d.thread_bytes;
    return d;
}

}  // namespace
}  // namespace AF_LEVEL
