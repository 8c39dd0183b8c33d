// Decoding: few query rows against many keys, limited by memory bandwidth.
//
// Split-KV (Flash-Decoding, Dao et al., 2023): a job is a split of the keys of one unit; its
// sums stay in a record, and the records of a unit are combined in their order.
#include <algorithm>

#include "decode_amx.h"
#include "decode_in_order.h"
#include "decode_panels.h"
#include "decode_plan.h"
#include "dropout.h"
#include "finish_row.h"
#include "level.h"
#include "live_parts.h"
#include "pool.h"
#include "score_scale.h"

namespace AF_LEVEL {
namespace {

struct decode_buffers {
    float* score;
    float* spare;  // as large: scores computed again, or weights as tiles take them
    live_tile live;
    decode_query query;
    float *query_rows, *out, *before;
    uint16_t* pairs;
    uint32_t* tiles;
    float* panels;
    const char **keys, **values, **next_keys;  // column_rows of a tile in pages
    bool values_on_tiles;  // the level has tiles, and a value row is a whole number of them
    softmax_state state;
    char* scratch;
    af_error* error;
};

decode_buffers take_buffers(arena& memory, const af_problem& p, const decode_plan& d) {
    const int64_t panel_rows = round_up(d.rows, NR);
    decode_buffers b;
    b.error = memory.take<af_error>(1);  // first: problems of all sizes have it in one place
    b.score = memory.take<float>(d.rows_padded * decode_ld);
    b.spare = memory.take<float>(d.rows_padded * decode_ld);
    b.live.live = memory.take<uint16_t>(d.rows_padded * decode_live_ld);
    b.live.spare = memory.take<uint16_t>(d.rows_padded * (decode_live_ld + 1));
    b.live.ld = decode_live_ld;
    b.query_rows = memory.take<float>(d.rows * d.query_width);
    b.pairs = memory.take<uint16_t>(d.pairs ? d.rows * d.query_width : 0);
    b.tiles = memory.take<uint32_t>(d.pairs && has_tiles ? panel_rows * d.query_width / 2 : 0);
    b.panels = memory.take<float>(d.panels ? panel_rows * d.query_width : 0);
    b.out = memory.take<float>(d.rows * d.value_width);
    b.before = memory.take<float>(d.rows * d.value_width);
    const int64_t blocks = p.pages.ids ? decode_columns : 0;
    b.keys = memory.take<const char*>(blocks);
    b.values = memory.take<const char*>(blocks);
    b.next_keys = memory.take<const char*>(blocks);
    b.state.row_sum = memory.take<float>(d.rows_padded * VL);
    b.state.row_max = memory.take<float>(d.rows_padded);
    b.state.alpha = memory.take<float>(d.rows_padded);
    b.state.nan = memory.take<uint8_t>(d.rows_padded);
    b.scratch = memory.take<char>(scratch_bytes(p, false));
    return b;
}

struct decode_run {
    const af_forward_args* args;
    const af_problem* p;
    decode_plan plan;
    score_scale scale;
    float* records;
    char* threads;  // of buffer_bytes each
    int64_t buffer_bytes;

    decode_buffers buffers_of(int thread) const {
        arena memory = {threads + thread * buffer_bytes, 0};
        return take_buffers(memory, *p, plan);
    }
};

// One split of one unit.
struct decode_job {
    int64_t b, h, kv_head;  // h: the first head
    int64_t begin, end;     // keys
    int64_t record;
};

// Jobs of the same keys come one after the other: the heads of a page are neighbours in memory.
decode_job decode_job_at(const decode_run& run, int64_t index) {
    const af_problem& p = *run.p;
    const decode_plan& d = run.plan;
    const int64_t unit = index % d.units, split = index / d.units;
    decode_job j;
    j.record = unit * d.splits + split;
    j.b = unit / d.units_a_batch;
    j.h = unit % d.units_a_batch * d.heads;
    j.kv_head = j.h / (p.q_heads / p.kv_heads);
    j.begin = split * d.split_keys;
    j.end = smaller(j.begin + d.split_keys, p.kv_length);
    return j;
}

struct decode_tile {
    decode_job job;
    tile_span span;
    int64_t columns;
    live_columns<decode_columns> in;
    const char* only[3];  // the one block each of keys that aren't in pages
    column_rows key, value;
    column_rows next_key;  // of the next tile. The last one has its own again, which are near: the
                           // next job may be another thread's.
};

// The tile of one head: the rows of a head are neighbours.
af_tile tile_of_head(const decode_run& run, const decode_buffers& b, const decode_tile& t,
                     int64_t head) {
    return tile_of(*run.p, t.job.b, t.job.h + head, 0, t.span.begin, run.p->q_length, t.columns,
                   b.scratch, b.error);
}

void decode_live(const decode_run& run, const decode_buffers& b, const run_row& row,
                 decode_tile& t) {
    const af_problem& p = *run.p;
    t.in = every_column<decode_columns>(t.columns);
    if (t.span.whole) return;
    const int64_t words = p.q_length * b.live.ld;
    for (int64_t head = 0; head < run.plan.heads; ++head) {
        live_tile to = b.live;
        to.live += head * words;
        if (head > 0 && (!p.mask || p.mask_is_per_call))
            memcpy(to.live, b.live.live, words * 2);
        else
            live_of_tile(p.mask, tile_of_head(run, b, t, head), row, t.span, p.q_length, to);
    }
    t.in = live_columns_of<decode_columns>(b.live, 0, static_cast<int>(run.plan.rows), t.columns);
}

void find_rows(const decode_run& run, const decode_buffers& b, decode_tile& t) {
    const af_problem& p = *run.p;
    const auto rows = [&](const af_tensor& tensor, int64_t first, const char** blocks, int one) {
        return rows_of_columns(p, tensor, kv_dtype(p), t.job.b, t.job.kv_head, first, t.columns,
                               p.pages.ids ? blocks : t.only + one);
    };
    const int64_t next = t.span.end < t.job.end ? t.span.end : t.span.begin;
    t.key = rows(p.key, t.span.begin, b.keys, 0);
    t.value = rows(p.value, t.span.begin, b.values, 1);
    t.next_key = rows(p.key, next, b.next_keys, 2);
}

// Calls f(begin, end) for the tile's columns that are worth computing.
template <class F> void in_parts(const decode_tile& t, const F& f) {
    for (int i = 0; i < t.in.parts; ++i) f(t.in.part[i].begin, smaller(t.in.part[i].end, t.columns));
}

// Calls f(begin, end) for columns [begin, end), cut where they are no neighbours in memory.
template <class F>
void in_neighbours(const decode_run& run, const decode_tile& t, int64_t begin, int64_t end,
                   const F& f) {
    const int64_t size = run.p->pages.ids ? run.p->pages.size : decode_columns;
    const int64_t into = run.p->pages.ids ? t.span.begin % size : 0;  // rows into its page
    while (begin < end) {
        const int64_t stop = smaller((into + begin) / size * size + size - into, end);
        f(begin, stop);
        begin = stop;
    }
}

// Neighbours, from `column` on, as rows of a matrix that has the tile's column 0 as its first.
matrix rows_at(const column_rows& rows, int64_t column) {
    matrix m = rows.from(column);
    m.data = address(m, -column, 0);
    return m;
}

template <int DTYPE>
void scores_of_columns(const decode_run& run, const decode_buffers& b, const decode_tile& t,
                       int64_t begin, int64_t end, float* score) {
    const af_problem& p = *run.p;
    const rows_ahead next = rows_ahead_of(t.value, p.value_head_dim);
    const int rows = static_cast<int>(run.plan.rows);
    if (run.plan.panels) {
        in_neighbours(run, t, begin, end, [&](int64_t first, int64_t stop) {
            panel_scores<DTYPE>(b.panels, rows, rows_at(t.key, first), p.head_dim, next, first,
                                stop, run.scale.stored, score, decode_ld);
        });
        return;
    }
#if defined(__AMX_BF16__)
    if (DTYPE == AF_BF16 && b.query.tiles && are_on_tiles(t.key, begin)) {
        const tile_columns columns = columns_for_tiles(begin, end);
        const int64_t dim = smaller(p.value_head_dim, value_dim_a_pass);
        score_tiles(b.query, rows, t.key, p.head_dim, columns,
                    block_of(t.value, columns.begin, columns.stride(), 0, dim), run.scale.stored,
                    score, decode_ld);
        begin = columns.end;
    }
#endif
#if defined(__AVX512F__)
    if constexpr (DTYPE <= AF_F16) {
        if (is_read_in_order(t.key, p.head_dim)) {
            in_neighbours(run, t, begin, end, [&](int64_t first, int64_t stop) {
                const int64_t turns = first + (stop - first) / turn_in_order * turn_in_order;
                with_width(p.head_dim, [&](auto width) {
                    scores_in_order<DTYPE, decltype(width)::value>(
                        b.query, rows, rows_at(t.key, first), first, turns, run.scale.stored,
                        score, decode_ld);
                });
                decode_scores<DTYPE>(b.query, rows, t.key, p.head_dim, next, turns, stop,
                                     run.scale.stored, score, decode_ld);
            });
            return;
        }
    }
#endif
    decode_scores<DTYPE>(b.query, rows, t.key, p.head_dim, next, begin, end, run.scale.stored,
                         score, decode_ld);
}

// Multiplies columns [begin, end) of a tile's rows by their scales.
void scale_columns(const decode_run& run, const decode_tile& t, const af_scales& scales,
                   int64_t begin, int64_t end, const float* from, float* to) {
    in_neighbours(run, t, begin, end, [&](int64_t first, int64_t stop) {
        const row_scales s =
            scales_of(*run.p, scales, t.job.b, t.job.kv_head, t.span.begin, first);
        for (int64_t r = 0; r < run.plan.rows; ++r) {
            const float* x = from + r * decode_ld;
            float* y = to + r * decode_ld;
            // The usual stride apart, which makes vectors.
            if (s.row == 1)
                for (int64_t c = first; c < stop; ++c) y[c] = x[c] * s.at[c];
            else
                for (int64_t c = first; c < stop; ++c) y[c] = x[c] * s.at[c * s.row];
        }
    });
}

template <int DTYPE>
void scores_of_tile(const decode_run& run, const decode_buffers& b, const decode_tile& t,
                    float* score) {
    const af_problem& p = *run.p;
    in_parts(t, [&](int64_t begin, int64_t end) {
        scores_of_columns<DTYPE>(run, b, t, begin, end, score);
        if (DTYPE > AF_F16) scale_columns(run, t, p.key_scales, begin, end, score, score);
    });
    if (!p.score) return;
    for (int64_t head = 0; head < run.plan.heads; ++head) {
        af_tile tile = tile_of_head(run, b, t, head);
        tile.score = score + head * p.q_length * decode_ld;
        tile.ld = decode_ld;
        tile.live = t.in.all ? nullptr : b.live.live + head * p.q_length * b.live.ld;
        tile.live_ld = b.live.ld;
        run_program(p.score, tile);
    }
}

bool finite(const float* x, int64_t n) {
    vf nonfinite = vf{};
    for (int64_t i = 0; i < n; i += VL) nonfinite += load(x + i) - load(x + i);
    return sum_of(nonfinite) == 0.0f;
}

row_keys keys_of_decoded_row(const decode_run& run, const decode_tile& t, int64_t r) {
    const af_problem& p = *run.p;
    return keys_of_row(p, t.job.b, t.job.h + r / p.q_length, r % p.q_length);
}

// Clears the dropped weights of a tile.
void drop_pairs(const decode_run& run, const decode_buffers& b, const decode_tile& t) {
    const af_problem& p = *run.p;
    if (!has_dropout(p)) return;
    for (int64_t r = 0; r < run.plan.rows; ++r) {
        const row_keys row = keys_of_decoded_row(run, t, r);
        for (int i = 0; i < t.in.parts; ++i)
            for (int64_t c = t.in.part[i].begin; c < t.in.part[i].end; c += 16)
                drop_weights(p, row, t.span.begin + c, b.score + r * decode_ld + c);
    }
}

// The value product of a tile with non-finite values: adds live pairs only, one by one. Weights
// have replaced the scores, so scores are computed again; a score of -inf is a dead pair too.
template <int DTYPE>
void careful_values(const decode_run& run, const decode_buffers& b, const decode_tile& t) {
    const af_problem& p = *run.p;
    const decode_plan& d = run.plan;
    memcpy(b.out, b.before, d.rows * d.value_width * 4);
    scores_of_tile<DTYPE>(run, b, t, b.spare);
    in_parts(t, [&](int64_t begin, int64_t end) {
        row_scales s = {nullptr, 0};
        for (int64_t c = begin; c < end; ++c) {
            if (DTYPE > AF_F16)
                s = scales_of(p, p.value_scales, t.job.b, t.job.kv_head, t.span.begin, c);
            for (int64_t r = 0; r < d.rows; ++r) {
                const uint16_t bits = t.in.all ? 0xffff : b.live.live[r * b.live.ld + c / 16];
                if (!(bits >> (c % 16) & 1) || b.spare[r * decode_ld + c] == -infinity) continue;
                if (has_dropout(p)) {
                    const row_keys row = keys_of_decoded_row(run, t, r);
                    const uint16_t kept = kept_bits(p, row, t.span.begin + c / 16 * 16);
                    if (!(kept >> (c % 16) & 1)) continue;
                }
                const float weight = b.score[r * decode_ld + c];
                add_row(t.value.from(c), 0, p.value_head_dim,
                        s.at ? weight * s.at[c * s.row] : weight, b.out + r * d.value_width);
            }
        }
    });
}

// Prefetches the first values of a tile and the first keys of the next where rows are read in
// order (decode_in_order.h): the softmax between them reads nothing, and hardware prefetching
// begins each stream anew. Streams prefetch all that they read.
void fetch_next([[maybe_unused]] const decode_run& run, [[maybe_unused]] const decode_tile& t) {
#if defined(__AVX512F__)
    const af_problem& p = *run.p;
    const auto fetch = [](const column_rows& rows, int64_t dim, int64_t first, int64_t columns) {
        if (!is_read_in_order(rows, dim)) return;
        for (int64_t c = first; c < smaller(first + turn_in_order, columns); ++c)
            rows_ahead_of(rows, dim).fetch(c);
    };
    fetch(t.value, p.value_head_dim, t.in.part[0].begin, t.columns);
    fetch(t.next_key, p.head_dim, 0, t.columns);
#endif
}

template <bool MASKED>
void softmax_of_tile(const decode_run& run, const decode_buffers& b, const decode_tile& t) {
    const int rows = static_cast<int>(run.plan.rows);
    for (int r = 0; r < rows; r += VL) {
        const softmax_tile tile = {b.score + r * decode_ld, decode_ld, nullptr, 0,
                                   b.live.live + r * b.live.ld, b.live.ld, t.in.part, t.in.parts,
                                   t.in.whole_steps};
        const softmax_state& s = b.state;
        const softmax_state state = {s.row_max + r, s.row_sum + r * VL, s.alpha + r, s.nan + r};
        softmax_rows<MASKED, false>(rows - r < VL ? rows - r : VL, run.scale.factor, tile, state);
    }
}

// Adds the weighted values of columns [begin, end). The keys of the next tile are read afterwards.
template <int DTYPE>
void values_of_columns(const decode_run& run, const decode_buffers& b, const decode_tile& t,
                       int64_t begin, int64_t end) {
    const af_problem& p = *run.p;
    const decode_plan& d = run.plan;
    const rows_ahead next = rows_ahead_of(t.next_key, p.head_dim);
    const int rows = static_cast<int>(d.rows);
    const float* weight = b.score;
    if (DTYPE > AF_F16) {
        scale_columns(run, t, p.value_scales, begin, end, b.score, b.spare);
        weight = b.spare;
    }
    if (d.panels) {
        in_neighbours(run, t, begin, end, [&](int64_t first, int64_t stop) {
            panel_values<DTYPE>(weight, decode_ld, rows, rows_at(t.value, first),
                                p.value_head_dim, next, first, stop, b.out, d.value_width);
        });
        return;
    }
#if defined(__AMX_BF16__)
    if (DTYPE == AF_BF16 && b.values_on_tiles && are_on_tiles(t.value, begin)) {
        const tile_columns columns = columns_for_tiles(begin, end);
        value_tiles(weight, decode_ld, rows, t.value, p.value_head_dim, columns,
                    block_of(t.next_key, 0, columns.stride(), 0, p.head_dim),
                    reinterpret_cast<uint32_t*>(b.spare), b.out, d.value_width);
        begin = columns.end;
    }
#endif
#if defined(__AVX512F__)
    if constexpr (DTYPE <= AF_F16) {
        if (is_read_in_order(t.value, p.value_head_dim)) {
            in_neighbours(run, t, begin, end, [&](int64_t first, int64_t stop) {
                const int64_t turns = first + (stop - first) / turn_in_order * turn_in_order;
                with_width(p.value_head_dim, [&](auto width) {
                    values_in_order<DTYPE, decltype(width)::value>(
                        weight, decode_ld, rows, rows_at(t.value, first), first, turns, b.out);
                });
                decode_values<DTYPE>(weight, decode_ld, rows, t.value, p.value_head_dim, next,
                                     turns, stop, b.out, d.value_width);
            });
            return;
        }
    }
#endif
    decode_values<DTYPE>(weight, decode_ld, rows, t.value, p.value_head_dim, next, begin, end,
                         b.out, d.value_width);
}

template <int DTYPE>
void values_of_tile(const decode_run& run, const decode_buffers& b, const decode_tile& t) {
    const decode_plan& d = run.plan;
    for (int64_t r = 0; r < d.rows; ++r) {
        const float alpha = b.state.alpha[r];
        for (int64_t e = 0; alpha != 1.0f && e < d.value_width; e += VL)
            store(b.out + r * d.value_width + e, load(b.out + r * d.value_width + e) * alpha);
    }
    memcpy(b.before, b.out, d.rows * d.value_width * 4);
    in_parts(t, [&](int64_t begin, int64_t end) {
        values_of_columns<DTYPE>(run, b, t, begin, end);
    });
    if (!finite(b.out, d.rows * d.value_width)) careful_values<DTYPE>(run, b, t);
}

template <int DTYPE>
void decode_split(const decode_run& run, int64_t index, int thread) {
    const af_problem& p = *run.p;
    const decode_plan& d = run.plan;
    decode_buffers b = run.buffers_of(thread);
    decode_tile t;
    t.job = decode_job_at(run, index);
    const subnormal_results flushed(false);
    const bool pairs =
        has_pairs && DTYPE == AF_BF16 && (p.key.stride[3] == 1 || p.head_dim == 1);
    const bool tiles = has_tiles && pairs && p.head_dim % (2 * VL) == 0;
    b.values_on_tiles = has_tiles && DTYPE == AF_BF16 && p.value.stride[3] == 1 &&
                    p.value_head_dim % (2 * VL) == 0;
    b.query = {b.query_rows, pairs ? b.pairs : nullptr, tiles ? b.tiles : nullptr, d.query_width};
    for (int64_t head = 0; head < d.heads; ++head) {
        const matrix query = matrix_of(p.query, p.dtype, t.job.b, t.job.h + head, 0);
        const int64_t row = head * p.q_length * d.query_width;
        if (pairs)
            copy_rows_pairs(query, p.q_length, p.q_length, p.head_dim, d.query_width,
                            b.pairs + row);
        else
            copy_rows(query, p.q_length, p.q_length, p.head_dim, d.query_width,
                      b.query_rows + row);
    }
    if constexpr (has_tiles) {
        if (tiles)
            pack_transposed_pairs({b.pairs, d.query_width, 1, AF_BF16}, d.rows, p.head_dim,
                                  d.query_width, d.rows_padded, b.tiles);
    }
    if (d.panels)
        pack_transposed({b.query_rows, d.query_width, 1, AF_F32}, d.rows, p.head_dim,
                        round_up(d.rows, NR), b.panels);
    if (tiles || b.values_on_tiles) pairs_begin();
    memset(b.out, 0, d.rows * d.value_width * 4);
    begin_rows(b.state, d.rows_padded);

    run_row row = key_runs(p, t.job.b, t.job.h, 0);
    row.length = smaller(row.length, t.job.end);
    while (row.count > 0 && row.begin(row.count - 1) >= row.length) --row.count;
    tile_walk walk = {row, decode_columns};
    walk.at = t.job.begin;
    while (walk.next(&t.span)) {
        t.columns = t.span.end - t.span.begin;
        decode_live(run, b, row, t);
        if (t.in.parts == 0) continue;
        find_rows(run, b, t);
        scores_of_tile<DTYPE>(run, b, t, b.score);
        fetch_next(run, t);
        if (t.in.all)
            softmax_of_tile<false>(run, b, t);
        else
            softmax_of_tile<true>(run, b, t);
        drop_pairs(run, b, t);
        values_of_tile<DTYPE>(run, b, t);
    }
    if (tiles || b.values_on_tiles) pairs_end();
    float* record = run.records + t.job.record * d.rows * d.record;
    for (int64_t r = 0; r < d.rows; ++r, record += d.record) {
        record[0] = b.state.row_max[r];
        record[1] = sum_of(load(b.state.row_sum + r * VL));
        record[2] = b.state.nan[r];
        memcpy(record + 4, b.out + r * d.value_width, d.value_width * 4);
    }
}

// Problems that run together. Their jobs, and their units, are counted through.
struct decode_batch {
    int64_t count;
    decode_run* runs;
    int64_t *first_job, *first_unit;  // [count + 1]

    const decode_run& run_of(const int64_t* first, int64_t* index) const {
        const int64_t i = std::upper_bound(first, first + count + 1, *index) - first - 1;
        *index -= first[i];
        return runs[i];
    }
};

void decode_split_of(void* context, int64_t index, int thread) {
    const decode_batch& batch = *static_cast<decode_batch*>(context);
    const decode_run& run = batch.run_of(batch.first_job, &index);
    switch (kv_dtype(*run.p)) {
        case AF_F32: return decode_split<AF_F32>(run, index, thread);
        case AF_BF16: return decode_split<AF_BF16>(run, index, thread);
        case AF_I8: return decode_split<AF_I8>(run, index, thread);
        case AF_F8: return decode_split<AF_F8>(run, index, thread);
        default: return decode_split<AF_F16>(run, index, thread);
    }
}

// Combines the records of a row, in their order, into its result. The first one is overwritten.
void combine(void* context, int64_t unit, int) {
    const decode_batch& batch = *static_cast<decode_batch*>(context);
    const decode_run& run = batch.run_of(batch.first_unit, &unit);
    const af_problem& p = *run.p;
    const decode_plan& d = run.plan;
    const decode_job job = decode_job_at(run, unit);
    for (int64_t r = 0; r < d.rows; ++r) {
        float* first = run.records + (unit * d.splits * d.rows + r) * d.record;
        const int64_t step = d.rows * d.record;
        float row_max = -infinity;
        for (int64_t s = 0; s < d.splits; ++s)
            row_max = first[s * step] > row_max ? first[s * step] : row_max;
        const vf factor = splat(run.scale.factor);
        row_sums row = {row_max, 0.0f, false, first + 4};
        for (int64_t s = 0; s < d.splits; ++s) {
            float* record = first + s * step;
            const vf share = share_of(splat(record[0]), splat(row_max), factor);
            row.nan |= record[2] != 0.0f || (record[0] != infinity && record[1] != record[1]);
            row.row_sum += share[0] * record[1];
            for (int64_t e = 4; e < d.record; e += VL) {
                const vf sum = s > 0 ? load(first + e) : vf{};
                store(first + e, madd(share, load(record + e), sum));
            }
        }
        finish_row(*run.args, run.scale, job.b, job.h + r / p.q_length, r % p.q_length, row);
    }
}

double microseconds_of_decoding(const af_problem& p) {
    const double bytes = double(p.batch) * p.kv_heads * p.kv_length *
                         (p.head_dim + p.value_head_dim) * element_bytes(kv_dtype(p));
    const double reads = bytes / 1e4;
    const double products = microseconds_of_products(p, has_tiles && p.dtype == AF_BF16);
    return reads > products ? reads : products;
}

int64_t records_of(const decode_plan& d) { return d.units * d.splits * d.rows * d.record; }

int64_t buffer_bytes_of(const af_problem& p, const decode_plan& d) {
    return bytes_of([&](arena& one) { take_buffers(one, p, d); });
}

decode_batch take_batch(arena& memory, int64_t count) {
    decode_batch batch;
    batch.count = count;
    batch.runs = memory.take<decode_run>(count);
    batch.first_job = memory.take<int64_t>(count + 1);
    batch.first_unit = memory.take<int64_t>(count + 1);
    return batch;
}

}  // namespace

int64_t decode_workspace(int64_t count) {
    return bytes_of([&](arena& memory) { take_batch(memory, count); });
}

int64_t decode_workspace_of(const af_problem& p, int64_t* buffers) {
    // A unit of one head takes less.
    const decode_plan d = decode_plan_of(p, p.q_heads / p.kv_heads);
    *buffers = larger(*buffers, p.threads * buffer_bytes_of(p, d));
    return bytes_of([&](arena& memory) { memory.take<float>(records_of(d)); });
}

int32_t decode(const af_forward_args* args, int64_t count, void* workspace, af_error* error) {
    arena memory = {static_cast<char*>(workspace), 0};
    decode_batch batch = take_batch(memory, count);
    batch.first_job[0] = batch.first_unit[0] = 0;
    double microseconds = 0;
    int64_t buffer_bytes = 0;
    bool splits = false;
    for (int64_t i = 0; i < count; ++i) {
        const af_problem& p = args[i].problem;
        decode_run& run = batch.runs[i];
        const bool alone = p.has_mask && p.runs.heads > 1;
        run.args = args + i;
        run.p = &p;
        run.plan = decode_plan_of(p, alone ? 1 : p.q_heads / p.kv_heads);
        run.scale = scale_of(p);
        run.records = memory.take<float>(records_of(run.plan));
        buffer_bytes = larger(buffer_bytes, buffer_bytes_of(p, run.plan));
        batch.first_job[i + 1] = batch.first_job[i] + run.plan.units * run.plan.splits;
        batch.first_unit[i + 1] = batch.first_unit[i] + run.plan.units;
        microseconds += microseconds_of_decoding(p);
        splits |= run.plan.splits > 1;
    }
    const int most = args[0].problem.threads;
    char* buffers = memory.take<char>(most * buffer_bytes);
    for (int64_t i = 0; i < count; ++i) {
        batch.runs[i].threads = buffers;
        batch.runs[i].buffer_bytes = buffer_bytes;
    }
    clear_errors(batch.runs[0], most);
    const int threads = threads_worth(microseconds, most);
    af_parallel(batch.first_job[count], threads, decode_split_of, &batch);
    af_parallel(batch.first_unit[count], splits ? threads : 1, combine, &batch);
    return first_error(batch.runs[0], most, error);
}

}  // namespace AF_LEVEL
