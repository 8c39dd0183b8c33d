// Which q tiles a kv tile meets, by the transposed runs, and which pairs of such a tile are live.
#pragma once
#include "backward_plan.h"

namespace AF_LEVEL {

// Rows of q of one mask block row that fall in a kv tile.
struct block_row {
    run_row runs;
    int64_t next;          // runs below are behind
    int64_t begin, end;    // keys, from the tile's first on
};

// Walks the q tiles that meet keys [first_key, first_key + keys) of (b, h), in order.
struct q_tile_walk {
    const af_problem* problem;
    block_row* rows;  // one a block row of the tile, at most most_kv_rows
    int64_t count;
    int64_t first_key, keys;
    int64_t at;  // tiles below are done

    void start(const af_problem& p, int64_t b, int64_t h, int64_t key, int64_t n) {
        problem = &p;
        first_key = key;
        keys = n;
        at = 0;
        count = 0;
        if (!p.has_mask) {
            rows[count++] = {whole_row(p.q_length), 0, 0, n};
            return;
        }
        for (int64_t block = key / p.kv_block; block * p.kv_block < key + n; ++block) {
            const int64_t begin = larger(block * p.kv_block - key, 0);
            const int64_t end = smaller((block + 1) * p.kv_block - key, n);
            rows[count++] = {runs_of(p.transposed, b, h, block, p.q_block, p.q_length), 0, begin,
                             end};
        }
    }

    bool next(int64_t* tile) {
        int64_t best = -1;
        for (int64_t i = 0; i < count; ++i) {
            block_row& row = rows[i];
            int64_t start = 0;
            for (; row.next < row.runs.count; ++row.next) {
                start = larger(row.runs.begin(row.next), at * q_tile_rows);
                if (row.runs.end(row.next) > start) break;
            }
            if (row.next == row.runs.count) continue;
            const int64_t here = start / q_tile_rows;
            if (best < 0 || here < best) best = here;
        }
        if (best < 0) return false;
        *tile = best;
        at = best + 1;
        return true;
    }
};

// Live pairs of a tile. Column intervals are multiples of `group`; begin == end: no pair is live.
struct tile_liveness {
    bool whole;  // every pair of the tile's rows and of the intervals is live: no bits needed
    bool any;
    uint16_t* live;   // [q_tile_rows][live_words]
    uint16_t* spare;  // [q_tile_rows][live_words + 1]
    int64_t begin[q_tile_rows / group], end[q_tile_rows / group];

    // Writes the live bits of the tile that `walk` has just come to, of (at.b, at.h); `at` carries
    // inputs, scratch and error for the mask program.
    void find(const q_tile_walk& walk, int64_t tile, af_tile at) {
        const af_problem& p = *walk.problem;
        const int64_t first = tile * q_tile_rows;
        const int64_t last = smaller(first + q_tile_rows, p.q_length);
        int64_t full = 0;
        for (int64_t i = 0; i < walk.count; ++i) {
            const block_row& row = walk.rows[i];
            for (int64_t j = row.next; j < row.runs.count && row.runs.begin(j) < last; ++j) {
                if (row.runs.partial(j) && p.mask) continue;
                full += (smaller(row.runs.end(j), last) - larger(row.runs.begin(j), first)) *
                        (row.end - row.begin);
            }
        }
        whole = full == (last - first) * walk.keys && walk.keys % group == 0;
        if (whole) {
            fill_intervals(0, round_up(walk.keys, group));
            return;
        }
        memset(live, 0, q_tile_rows * live_words * 2);
        for (int64_t i = 0; i < walk.count; ++i) {
            const block_row& row = walk.rows[i];
            for (int64_t j = row.next; j < row.runs.count && row.runs.begin(j) < last; ++j) {
                const int64_t q = larger(row.runs.begin(j), first);
                const int64_t end = smaller(row.runs.end(j), last);
                if (q >= end) continue;
                uint16_t* bits = live + (q - first) * live_words;
                if (row.runs.partial(j) && p.mask) {
                    at.q = q;
                    at.rows = static_cast<int32_t>(end - q);
                    live_of_run(p.mask, at, {bits, spare, live_words}, walk.first_key,
                                walk.first_key + row.begin, walk.first_key + row.end);
                } else {
                    for (int64_t r = q; r < end; ++r, bits += live_words)
                        set_bits(bits, row.begin, row.end);
                }
            }
        }
        find_intervals();
    }

    // Returns the same without rows that have no live key at all, with its bits in `bits` if they
    // differ. `keys`: columns of the tile.
    tile_liveness without_dead_rows(const q_tile& tile, int64_t keys, uint16_t* bits) const {
        tile_liveness rest = *this;
        if (*tile.dead_rows == 0) return rest;
        rest.whole = false;
        rest.live = bits;
        memset(bits, 0, q_tile_rows * live_words * 2);
        for (int64_t r = 0; r < q_tile_rows; ++r) {
            if (tile.dead[r]) continue;
            uint16_t* row = bits + r * live_words;
            if (whole)
                set_bits(row, 0, keys);
            else
                memcpy(row, live + r * live_words, live_words * 2);
        }
        rest.find_intervals();
        return rest;
    }

    bool is_live(int64_t r, int64_t c) const {
        return whole || (live[r * live_words + c / 16] >> c % 16 & 1);
    }

  private:
    void fill_intervals(int64_t from, int64_t to) {
        any = from < to;
        for (int64_t i = 0; i < q_tile_rows / group; ++i) {
            begin[i] = from;
            end[i] = to;
        }
    }

    void find_intervals() {
        any = false;
        for (int64_t i = 0; i < q_tile_rows / group; ++i) {
            uint16_t words[live_words] = {};
            for (int64_t r = i * group; r < (i + 1) * group; ++r)
                for (int64_t w = 0; w < live_words; ++w) words[w] |= live[r * live_words + w];
            begin[i] = end[i] = 0;
            for (int64_t w = 0; w < live_words; ++w) {
                if (!words[w]) continue;
                if (begin[i] == end[i]) begin[i] = w * 16 / group * group;
                end[i] = w * 16 / group * group + group;
                any = true;
            }
        }
    }
};

}  // namespace AF_LEVEL
