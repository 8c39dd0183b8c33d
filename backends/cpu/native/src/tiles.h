// Cutting a problem by its block mask: kv tiles of a row of blocks, live bits of a tile, costs.
//
// A kv tile begins at a multiple of `tile_step` columns, so that it begins with a packed panel,
// and spans one or several runs. Pairs of it that lie in no run, or that the mask program kills,
// are dead: bits of `live`. A tile whose columns all lie in FULL runs needs no bits.
#pragma once
#include <string.h>

#include "anyflex_cpu.h"
#include "simd.h"

namespace AF_LEVEL {

constexpr int64_t tile_step = 32;  // columns: a multiple of NR and of 16 at every level

AF_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
AF_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
AF_INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
AF_INLINE int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

// Returns how many threads are worth waking. That costs some 20 us each, so one thread does alone
// what takes it less than about 100 us.
AF_INLINE int threads_worth(double microseconds, int threads) {
    return microseconds < 100 ? 1 : threads;
}

// Estimated time of the products of all pairs, dead ones included.
AF_INLINE double microseconds_of_products(const af_problem& p, bool tiles) {
    const double pairs = double(p.batch) * p.q_heads * p.q_length * p.kv_length;
    const double a_microsecond = tiles ? 4e5 : VL == 16 ? 1e5 : 2e4;
    return 2 * pairs * (p.head_dim + p.value_head_dim) / a_microsecond;
}

// The runs of one row of blocks, in columns (elements).
//
// A mask's memory may have been overwritten with anything, past torch's version counter. Columns
// are bounded where they are read, runs without a column are passed over, and no code relies on
// their order: such a mask gives wrong numbers, and nothing is read outside of q, k and v.
struct run_row {
    const int32_t* run;  // [count][3]
    int64_t count;
    int64_t block;   // columns of a block
    int64_t length;  // columns in all
    int64_t begin(int64_t i) const { return column(run[3 * i]); }
    int64_t end(int64_t i) const { return column(run[3 * i + 1]); }
    bool partial(int64_t i) const { return run[3 * i + 2] == 2; }

  private:
    int64_t column(int64_t of_block) const {
        return larger(smaller(of_block * block, length), 0);
    }
};

// `block` is the row of blocks; `columns_of_block` and `length` belong to the side that runs span.
AF_INLINE run_row runs_of(const af_runs& runs, int64_t b, int64_t h, int64_t block,
                          int64_t columns_of_block, int64_t length) {
    const int64_t row = ((runs.batch == 1 ? 0 : b) * runs.heads + (runs.heads == 1 ? 0 : h)) *
                            (runs.blocks + 1) +
                        block;
    const int64_t first = larger(smaller(runs.offsets[row], runs.count), 0);
    const int64_t last = larger(smaller(runs.offsets[row + 1], runs.count), first);
    return {runs.runs + 3 * first, last - first, columns_of_block, length};
}

// One FULL run over all columns: the runs of a problem without a mask.
AF_INLINE run_row whole_row(int64_t length) {
    static const int32_t whole[3] = {0, 1, 1};
    return {whole, length > 0 ? 1 : 0, length, length};
}

// The kv runs of query row q of (b, h).
AF_INLINE run_row key_runs(const af_problem& p, int64_t b, int64_t h, int64_t q) {
    if (!p.has_mask) return whole_row(p.kv_length);
    return runs_of(p.runs, b, h, q / p.q_block, p.kv_block, p.kv_length);
}

struct tile_span {
    int64_t begin, end;  // columns; begin is a multiple of tile_step
    int64_t first, last;  // runs that reach into it: [first, last)
    bool whole;  // every column in a FULL run: no live bits
};

// Walks the kv tiles of a row of runs.
struct tile_walk {
    run_row row;
    int64_t width;  // at most this many columns, a multiple of tile_step
    int64_t next_run = 0;
    int64_t at = 0;  // columns below are done

    bool next(tile_span* tile) {
        int64_t start = at;
        for (; next_run < row.count; ++next_run) {
            start = larger(row.begin(next_run), at);
            if (row.end(next_run) > start) break;
        }
        if (next_run >= row.count) return false;
        tile->begin = start / tile_step * tile_step;
        const int64_t limit = tile->begin + width;
        tile->first = next_run;
        tile->whole = true;
        int64_t covered = tile->begin, i = next_run;
        for (; i < row.count && row.begin(i) < limit; ++i) {
            if (row.partial(i) || (row.begin(i) > covered)) tile->whole = false;
            covered = larger(covered, smaller(row.end(i), limit));
        }
        if (covered % tile_step) tile->whole = false;  // the rest of the panel is padding
        tile->last = i;
        tile->end = covered;
        at = covered;
        return true;
    }
};

// Columns that a row of runs covers, with PARTIAL ones at 1.5 times their number: the cost of a
// job.
AF_INLINE int64_t cost_of(const run_row& row) {
    int64_t cost = 0;
    for (int64_t i = 0; i < row.count; ++i) {
        const int64_t columns = larger(row.end(i) - row.begin(i), 0);
        cost += row.partial(i) ? columns + columns / 2 : columns;
    }
    return cost;
}

// Bits [begin, end) of a row of live words, or-ed.
AF_INLINE void set_bits(uint16_t* live, int64_t begin, int64_t end) {
    while (begin < end) {
        const int64_t stop = smaller(end, begin / 16 * 16 + 16);
        const uint32_t high = (1u << (stop - begin / 16 * 16)) - 1, low = (1u << begin % 16) - 1;
        live[begin / 16] |= static_cast<uint16_t>(high & ~low);
        begin = stop;
    }
}

// Live bits that a mask program writes, and room for one run of them.
struct live_tile {
    uint16_t* live;  // [rows rounded up to 32][ld]
    uint16_t* spare;  // the same size and one word a row more
    int64_t ld;      // words a row: at least the tile's columns rounded up to tile_step, / 16
};

inline void run_program(const af_program* program, const af_tile& tile) {
    const subnormal_results kept(true);
    program->function(program, &tile);
}

// Runs `mask` on columns [begin, end) of a tile that begins at column `origin`, or-ed into live.
static void live_of_run(const af_program* mask, af_tile t, const live_tile& to, int64_t origin,
                        int64_t begin, int64_t end) {
    t.kv = begin;
    t.cols = static_cast<int32_t>(end - begin);
    t.live = to.spare;
    t.live_ld = to.ld + 1;
    run_program(mask, t);
    const int64_t shift = (begin - origin) % 16, word = (begin - origin) / 16;
    const int64_t words = ceil_div(end - begin, 16);
    for (int r = 0; r < t.rows; ++r) {
        uint16_t* row = to.live + r * to.ld + word;
        const uint16_t* bits = to.spare + r * t.live_ld;
        for (int64_t i = 0; i < words; ++i) {
            const uint32_t x = static_cast<uint32_t>(bits[i]) << shift;
            row[i] |= static_cast<uint16_t>(x);
            if (x >> 16) row[i + 1] |= static_cast<uint16_t>(x >> 16);
        }
    }
}

// Live bits of a tile of `t.rows` rows from (t.b, t.h, t.q) on, all words of rows_padded rows up
// to the tile's end rounded up to tile_step. `t` carries inputs, scratch and error; columns and
// live are set here. A PARTIAL run without a mask program is taken as live.
static void live_of_tile(const af_program* mask, const af_tile& t, const run_row& row,
                         const tile_span& tile, int64_t rows_padded, const live_tile& to) {
    memset(to.live, 0, rows_padded * to.ld * 2);
    for (int64_t i = tile.first; i < tile.last; ++i) {
        int64_t begin = row.begin(i), end = smaller(row.end(i), tile.end);
        if (begin < tile.begin) begin = tile.begin;
        if (begin >= end) continue;
        if (row.partial(i) && mask) {
            live_of_run(mask, t, to, tile.begin, begin, end);
        } else {
            for (int r = 0; r < t.rows; ++r)
                set_bits(to.live + r * to.ld, begin - tile.begin, end - tile.begin);
        }
    }
}

}  // namespace AF_LEVEL
