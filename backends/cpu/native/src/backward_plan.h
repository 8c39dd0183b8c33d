// How the backward pass is cut into jobs, and the workspace that it asks for.
//
// A unit is a (kv batch, kv head) with all query heads that read it, its streams: q_heads /
// kv_heads of them, times batch where dk and dv are sums over the batch. A job is a unit and a
// range of its kv tiles. It owns the rows of dk and dv of that range and adds dQ into a partial of
// its own; partials are added in order afterwards. Everything here depends on the problem, never
// on the number of threads, and so does every sum of the pass.
//
//   partitions of a unit = min(ceil(64 / units), kv tiles / 2, 1 GiB / bytes of all of dQ in
//                              float), at least 1
//   units in flight      = one for one thread, else ceil(8 * threads / partitions): what is packed
//                          and summed stays in a near cache. With gradients of captured tensors,
//                          whose sums go along with the order of jobs, ceil(64 / partitions)
//   bytes of a unit      = streams * q tiles * (operands of a q tile + partitions * its dQ)
//   workspace            = units in flight * bytes of a unit + threads * bytes of a thread
//                          + captured partials (captured_sums.h) + 8 bytes a kv tile
//                          + 44 bytes a job of the units in flight
//
// in which, with head dims E and Ev rounded up to 32, w bytes an element (2 where products are
// bf16, else 4) and R rows of a kv tile (256 where products run on AMX tiles and E + Ev >= 192,
// else 128)
//
//   operands of a q tile = 512 * (E + Ev) + 2112
//   its dQ               = 512 * E + 1
//   bytes of a thread    = R * ((2 E + Ev) * w + (E + Ev) * 4 + 256 * w) + 64 * max(E, Ev)
//                          + the mods' scratch + 128 KiB
#pragma once
#include "pack.h"
#include "workspace.h"

namespace AF_LEVEL {

constexpr int64_t q_tile_rows = 128;
// Maximum rows of a kv tile; plan.kv_rows is the number in use. Tile products are fast, so they
// get large tiles: fewer passes over the sums.
constexpr int64_t most_kv_rows = has_tiles ? 256 : 128;
static_assert(most_kv_rows <= AF_TILE_COLUMNS, "programs take no more");
// Rows and columns of a tile that are skipped together where no pair is live.
constexpr int64_t group = 32;
constexpr int64_t live_words = most_kv_rows / 16;
constexpr int64_t wanted_jobs = 64;
constexpr int64_t memory_budget = int64_t(1) << 30;
constexpr int64_t most_partials = 64;  // of captured sums

struct backward_plan {
    bool pairs;                          // bf16 products
    int64_t kv_batches, units, streams;  // streams of a unit
    int64_t q_per_kv;
    int64_t kv_heads;
    bool owns_batch, owns_head;  // owned captured tensors have other elements for each
    int64_t q_tiles, kv_tiles, kv_rows;
    int64_t partitions, units_in_flight;
    int64_t head_dim, value_dim;  // padded
    int64_t word;                 // elements in a word of an operand: 1, or 2 where pairs
    bool wants_dq, wants_dk, wants_dv;

    int64_t dq_tile_floats() const { return wants_dq ? q_tile_rows * head_dim : 0; }
    // Groups of jobs that add to elements of owned captured tensors of their own. Ranges of keys
    // tell the jobs of one unit apart, but not those of two: their bounds may differ.
    int64_t owner_groups() const {
        if (owns_batch && owns_head) return units_in_flight * partitions;
        return owns_batch ? kv_batches : owns_head ? kv_heads : 1;
    }
    int64_t group_of(int64_t unit) const { return owns_batch ? unit / kv_heads : unit % kv_heads; }
    // q tiles of a unit.
    int64_t stream_tiles() const { return streams * q_tiles; }
};

// Operands of a q tile, packed once for all kv tiles. Rows past the end, rows without a live key
// and non-finite rows are 0 in them.
struct q_tile {
    uint8_t* dead;       // [q_tile_rows] lse is -inf, or past the end
    uint8_t* nonfinite_query;  // [q_tile_rows] NaN or infinity in q
    uint8_t* nonfinite_dout;   // [q_tile_rows] the same in dout
    int64_t* dead_rows;  // how many
    int64_t* nonfinite_queries;
    int64_t* nonfinite_douts;
    uint8_t* large;      // [q_tile_rows] lse is too coarse: backward_row_sums.h
    int64_t* large_rows;
    float* row_max;      // [q_tile_rows] subtracted from a large row's scores; 0 in others
    float* lse;          // [q_tile_rows] in powers of two, relative to `row_max`
    float* delta;        // [q_tile_rows] sum(dout * out) - dlse
    uint32_t* query;     // [q_tile_rows][head_dim / word]: left side of the scores
    uint32_t* query_t;   // pairs: [head_dim][q_tile_rows / 2]: left side of dK
    uint32_t* dout;      // [q_tile_rows][value_dim / word]: left side of dP
    uint32_t* dout_t;    // pairs: [value_dim][q_tile_rows / 2]: left side of dV
};

inline q_tile take_q_tile(arena& memory, const backward_plan& plan) {
    q_tile tile;
    const int64_t rows = q_tile_rows / plan.word;
    tile.dead = memory.take<uint8_t>(q_tile_rows);
    tile.nonfinite_query = memory.take<uint8_t>(q_tile_rows);
    tile.nonfinite_dout = memory.take<uint8_t>(q_tile_rows);
    tile.large = memory.take<uint8_t>(q_tile_rows);
    tile.dead_rows = memory.take<int64_t>(4);
    tile.nonfinite_queries = tile.dead_rows + 1;
    tile.nonfinite_douts = tile.dead_rows + 2;
    tile.large_rows = tile.dead_rows + 3;
    tile.lse = memory.take<float>(q_tile_rows);
    tile.row_max = memory.take<float>(q_tile_rows);
    tile.delta = memory.take<float>(q_tile_rows);
    tile.query = memory.take<uint32_t>(rows * plan.head_dim);
    tile.query_t = memory.take<uint32_t>(plan.pairs ? rows * plan.head_dim : 0);
    tile.dout = memory.take<uint32_t>(rows * plan.value_dim);
    tile.dout_t = memory.take<uint32_t>(plan.pairs ? rows * plan.value_dim : 0);
    return tile;
}

// `learns`: some captured tensor wants a gradient.
inline backward_plan make_plan(const af_problem& problem, bool learns) {
    backward_plan plan;
    const bool sum_over_batch = problem.kv_batch_is_shared && problem.batch > 0;
    plan.wants_dq = problem.wanted & 1;
    plan.wants_dk = problem.wanted & 2;
    plan.wants_dv = problem.wanted & 4;
    plan.pairs = problem.dtype == AF_BF16 && has_pairs;
    plan.word = plan.pairs ? 2 : 1;
    plan.q_per_kv = problem.q_heads / larger(problem.kv_heads, 1);
    plan.kv_batches = sum_over_batch ? 1 : problem.batch;
    plan.streams = plan.q_per_kv * (sum_over_batch ? problem.batch : 1);
    plan.units = plan.kv_batches * problem.kv_heads;
    plan.kv_heads = problem.kv_heads;
    plan.owns_batch = plan.kv_batches == 1 || problem.captured_owner & 1;
    plan.owns_head = problem.kv_heads == 1 || problem.captured_owner & 2;
    plan.q_tiles = ceil_div(problem.q_length, q_tile_rows);
    plan.head_dim = round_up(problem.head_dim, 32);
    plan.value_dim = round_up(problem.value_head_dim, 32);
    plan.kv_rows = plan.pairs && plan.head_dim + plan.value_dim >= 192 ? most_kv_rows : 128;
    plan.kv_tiles = ceil_div(problem.kv_length, plan.kv_rows);

    const int64_t dq_bytes = larger(plan.stream_tiles() * plan.dq_tile_floats() * 4, 1);
    const int64_t units = larger(plan.units, 1);
    plan.partitions = smaller(ceil_div(wanted_jobs, units), plan.kv_tiles / 2);
    plan.partitions = smaller(plan.partitions, memory_budget / (units * dq_bytes));
    plan.partitions = larger(plan.partitions, 1);
    const int64_t jobs = learns ? wanted_jobs : problem.threads > 1 ? 8 * problem.threads : 1;
    plan.units_in_flight = smaller(units, ceil_div(jobs, plan.partitions));
    return plan;
}

}  // namespace AF_LEVEL
