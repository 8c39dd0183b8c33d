// How a forward problem is cut, and where everything lies in its workspace.
//
// Memory: packed heads, 64 bytes and 4 bytes a job of each, and a tile's buffers a thread. One
// thread packs one head at a time; several pack as many as give each of them 64 jobs, at most 64
// MiB. Live bits that heads share take 16 KiB a q tile of 128 rows, at most 4 MiB. A packed head
// is K and V of one (batch, kv head), rounded up to whole panels, floats or bf16, and a byte a
// key.
#pragma once
#include "pack.h"
#include "workspace.h"

namespace AF_LEVEL {
namespace {

constexpr int64_t packed_bound = int64_t(64) << 20;
constexpr int64_t strip_rows = 32;
constexpr int64_t pack_chunk = 256;  // keys that one packing job takes
constexpr int64_t tile_columns = 256;
static_assert(tile_columns <= AF_TILE_COLUMNS, "programs take no more");
constexpr int score_buffers = has_tiles ? 2 : 1;  // strips in flight
constexpr int64_t shared_live_tiles = 4;  // of a q tile, whose live bits all heads share
constexpr int64_t shared_live_bound = int64_t(4) << 20;
constexpr int64_t cost_classes = 64;
constexpr int64_t jobs_a_thread = 64;  // of a wave: all wait for its last one

struct forward_plan {
    bool pairs;
    int64_t query_width;  // elements a row of the copy of q
    int64_t k;            // of the score product
    int64_t value_panels, value_width;
    int64_t keys;  // kv_length rounded up to whole panels
    // Jobs
    int64_t batches_a_unit;  // a unit is one packed head; all batches share a broadcast one
    int64_t units, units_a_wave;
    int64_t group;
    int64_t q_block, tiles_a_block, q_tiles, q_rows;
    int64_t jobs_a_unit;
    int threads;
    int64_t word;        // bytes of an element of an operand
    int64_t unit_bytes;
    int64_t live_words;  // of the live bits of a q tile's kv tile
    int64_t shared_q_tiles;  // number of q tiles that have room for shared live bits
};

// One packed head.
struct packed_head {
    char *key, *value;
    uint8_t* nonfinite;  // [keys]: rows of value with NaN or infinity, packed as 0
};

inline packed_head take_head(arena& memory, const forward_plan& f) {
    packed_head head;
    head.key = memory.take<char>(f.keys * f.k * f.word);
    head.value = memory.take<char>(f.keys * f.value_width * f.word);
    head.nonfinite = memory.take<uint8_t>(f.keys);
    return head;
}

AF_INLINE forward_plan plan_of(const af_problem& p) {
    forward_plan f;
    f.pairs = has_pairs && p.dtype == AF_BF16;
    f.word = f.pairs ? 2 : 4;
    f.query_width = round_up(p.head_dim, f.pairs ? pair_k_step : VL);
    f.k = f.pairs ? f.query_width : p.head_dim;
    f.value_panels = ceil_div(p.value_head_dim, NR);
    f.value_width = f.value_panels * NR;
    f.keys = round_up(p.kv_length, tile_step);

    f.batches_a_unit = p.kv_batch_is_shared ? p.batch : 1;
    f.units = p.batch / f.batches_a_unit * p.kv_heads;
    f.group = p.q_heads / p.kv_heads;
    f.q_rows = f.value_width > 256 ? 64 : 128;
    f.q_block = p.has_mask ? p.q_block : f.q_rows;
    f.tiles_a_block = ceil_div(smaller(f.q_block, p.q_length), f.q_rows);
    // Cuts even tiles: a block of 160 rows is 96 and 64, not 128 and 32.
    f.q_rows = round_up(ceil_div(smaller(f.q_block, p.q_length), f.tiles_a_block), strip_rows);
    f.q_tiles = ceil_div(p.q_length, f.q_block) * f.tiles_a_block;
    f.jobs_a_unit = f.batches_a_unit * f.group * f.q_tiles;

    f.unit_bytes = bytes_of([&](arena& memory) { take_head(memory, f); });
    // One thread uses a packed head while it is near; several need jobs to share.
    const int64_t busy = p.threads == 1 ? 1 : ceil_div(jobs_a_thread * p.threads, f.jobs_a_unit);
    f.units_a_wave = smaller(packed_bound / (f.unit_bytes > 0 ? f.unit_bytes : 1), busy);
    if (f.units_a_wave < 1) f.units_a_wave = 1;
    f.units_a_wave = smaller(f.units_a_wave, f.units);

    f.live_words = f.q_rows * tile_columns / 16;
    f.threads = p.threads;
    f.shared_q_tiles = 0;
    if (p.has_mask && p.batch * p.q_heads > 1)
        f.shared_q_tiles =
            smaller(f.q_tiles, shared_live_bound / (shared_live_tiles * f.live_words * 2));
    return f;
}

// One job: a q tile of one query head.
struct forward_job {
    int64_t b, h, q;
    int64_t tile;  // position of the q tile
    int rows;
};

// Returns job `index` of unit `unit`; rows is 0 for a tile past the end of a ragged block.
AF_INLINE forward_job job_of(const af_problem& p, const forward_plan& f, int64_t unit,
                             int64_t index) {
    forward_job j;
    const int64_t tile = index % f.q_tiles, head = index / f.q_tiles % f.group;
    j.b = f.batches_a_unit > 1 ? index / f.q_tiles / f.group : unit / p.kv_heads;
    j.h = unit % p.kv_heads * f.group + head;
    j.tile = tile;
    const int64_t block = tile / f.tiles_a_block;
    j.q = block * f.q_block + tile % f.tiles_a_block * f.q_rows;
    const int64_t end = smaller(smaller(j.q + f.q_rows, (block + 1) * f.q_block), p.q_length);
    j.rows = end > j.q ? static_cast<int>(end - j.q) : 0;
    return j;
}

// Sorts the jobs of a unit, longest first: a counting sort by classes of cost, so that neighbours
// of a class stay neighbours.
static void order_jobs(const af_problem& p, const forward_plan& f, int64_t unit, int32_t* order) {
    int64_t start[cost_classes + 1] = {};
    const auto class_of = [&](int64_t i) {
        const forward_job j = job_of(p, f, unit, i);
        if (j.rows == 0) return cost_classes - 1;
        const int64_t cost = cost_of(key_runs(p, j.b, j.h, j.q)) * j.rows;
        const int64_t most = (p.kv_length + p.kv_length / 2) * f.q_rows + 1;
        // Overlapping runs cost more than there are columns.
        return larger(cost_classes - 1 - cost * cost_classes / most, 0);
    };
    for (int64_t i = 0; i < f.jobs_a_unit; ++i) ++start[class_of(i) + 1];
    for (int64_t c = 0; c < cost_classes; ++c) start[c + 1] += start[c];
    for (int64_t i = 0; i < f.jobs_a_unit; ++i)
        order[start[class_of(i)]++] = static_cast<int32_t>(i);
}

}  // namespace
}  // namespace AF_LEVEL
