// Attention forward: q tiles over packed keys and values, wave by wave of kv heads.
//
// A job is a q tile of one head. For each kv tile of its row of runs: live bits, if some pair may
// be dead; then strip by strip of 32 rows, so that scores stay in L1: score product, score
// program, softmax, value product. Columns in which a strip has no live pair are left out of all.
#include <string.h>

#include "forward_plan.h"
#include "level.h"
#include "pool.h"
#include "softmax.h"

namespace AF_LEVEL {
namespace {

constexpr float log2e = 1.4426950408889634f;
constexpr int most_parts = tile_columns / tile_step;

struct forward_run {
    const af_forward_args* args;
    const af_problem* p;
    forward_plan plan;
    char *packed, *threads;
    int32_t* order;
    af_error* errors;  // one a thread
    int64_t first_unit;
    int64_t chunks;  // packing jobs of a unit
    float stored_scale;  // scores are stored with it
    float factor;        // of a stored score on its way into exp2
    float natural;       // a stored score times this is the score
};

// One packed head.
struct packed_head {
    char *key, *value;
    uint8_t* bad;  // [keys]: rows of value with NaN or infinity, packed as 0
};

packed_head head_at(const forward_run& run, int64_t unit_in_wave) {
    char* at = run.packed + unit_in_wave * run.plan.unit_bytes;
    return {at, at + run.plan.key_bytes,
            reinterpret_cast<uint8_t*>(at + run.plan.key_bytes + run.plan.value_bytes)};
}

// This thread's buffers.
struct forward_buffers {
    float* score;     // [32][tile_columns]
    uint16_t* weight;  // [32][tile_columns], pairs
    live_tile live;
    void* query;
    float* out;  // [q_rows][value_width]
    softmax_state state;
    void* scratch;
    af_error* error;
};

forward_buffers buffers_of(const forward_run& run, int thread) {
    const forward_plan& f = run.plan;
    char* at = run.threads + thread * f.thread_bytes;
    const auto take = [&](int64_t bytes) {
        char* p = at;
        at += bytes;
        return p;
    };
    forward_buffers b;
    b.score = reinterpret_cast<float*>(take(f.score_bytes));
    b.weight = f.pairs ? reinterpret_cast<uint16_t*>(take(f.weight_bytes)) : nullptr;
    b.live.live = reinterpret_cast<uint16_t*>(take(f.live_bytes));
    b.live.spare = reinterpret_cast<uint16_t*>(take(f.spare_bytes));
    b.live.ld = tile_columns / 16;
    b.query = take(f.query_bytes);
    b.out = reinterpret_cast<float*>(take(f.out_bytes));
    b.state.sum = reinterpret_cast<float*>(take(f.q_rows * VL * 4));
    b.state.top = reinterpret_cast<float*>(take(f.q_rows * 4));
    b.state.alpha = reinterpret_cast<float*>(take(f.q_rows * 4));
    b.state.nan = reinterpret_cast<uint8_t*>(take(round_up(f.q_rows, 64)));
    b.scratch = take(f.scratch_bytes);
    b.error = reinterpret_cast<af_error*>(at);
    return b;
}

// One chunk of keys of one head: both operands.
void pack_job(void* context, int64_t index, int) {
    const forward_run& run = *static_cast<forward_run*>(context);
    const af_problem& p = *run.p;
    const forward_plan& f = run.plan;
    const int64_t unit = index / run.chunks, first = index % run.chunks * pack_chunk;
    const packed_head to = head_at(run, unit);
    const int64_t b = f.batches_a_unit > 1 ? 0 : (run.first_unit + unit) / p.kv_heads;
    const int64_t h = (run.first_unit + unit) % p.kv_heads;
    const int64_t n = smaller(pack_chunk, p.kv_length - first);
    const int64_t columns = smaller(pack_chunk, f.keys - first);
    const matrix key = matrix_of(p.key, p.dtype, b, h, first);
    const matrix value = matrix_of(p.value, p.dtype, b, h, first);
    if (f.pairs) {
        pack_transposed_pairs(key, n, p.head_dim, f.k, columns,
                              reinterpret_cast<uint32_t*>(to.key) + first * f.k / 2);
        pack_straight_pairs(value, n, columns, p.value_head_dim,
                            reinterpret_cast<uint32_t*>(to.value) + first / 2 * NR,
                            f.keys / 2 * NR, to.bad + first);
    } else {
        pack_transposed(key, n, p.head_dim, columns,
                        reinterpret_cast<float*>(to.key) + first * f.k);
        pack_straight(value, n, columns, p.value_head_dim,
                      reinterpret_cast<float*>(to.value) + first * NR, f.keys * NR,
                      to.bad + first);
    }
}

// A tile in flight.
struct forward_tile {
    forward_job job;
    tile_span span;
    packed_head head;
    bool any_bad;  // a value row of the tile isn't finite
};

// Stretches of 32-column steps in which rows [first, first + rows) have a live pair; `all` says
// that every pair of them is live.
int live_parts(const live_tile& live, int first, int rows, int64_t columns, stretch* part,
               bool* all) {
    int parts = 0;
    *all = true;
    for (int32_t c = 0; c < columns; c += 32) {
        uint32_t any = 0, every = 0xffffffffu;
        for (int r = first; r < first + rows; ++r) {
            uint32_t bits;
            memcpy(&bits, live.live + r * live.ld + c / 16, 4);
            any |= bits;
            every &= bits;
        }
        *all &= every == 0xffffffffu;
        if (!any) continue;
        if (parts > 0 && part[parts - 1].end == c)
            part[parts - 1].end = c + 32;
        else
            part[parts++] = {c, c + 32};
    }
    return parts;
}

template <bool PAIRS>
void score_product(const forward_run& run, const forward_buffers& b, const forward_tile& t,
                   int first, int rows, const stretch& part) {
    const forward_plan& f = run.plan;
    const int64_t panels = (part.end - part.begin) / NR, key = t.span.begin + part.begin;
    float* to = b.score + part.begin;
    if constexpr (PAIRS)
        gemm_pairs<into::store>(rows, panels, f.k,
                                static_cast<uint16_t*>(b.query) + first * f.query_width,
                                f.query_width / 2,
                                reinterpret_cast<uint32_t*>(t.head.key) + key * (f.k / 2),
                                f.k / 2 * NR, to, tile_columns, run.stored_scale, nullptr);
    else
        gemm<into::store>(rows, panels, f.k, static_cast<float*>(b.query) + first * f.query_width,
                          f.query_width, 1, reinterpret_cast<float*>(t.head.key) + key * f.k,
                          f.k * NR, to, tile_columns, run.stored_scale, nullptr);
}

template <bool PAIRS, into HOW>
void value_product(const forward_run& run, const forward_buffers& b, const forward_tile& t,
                   int first, int rows, const stretch& part) {
    const forward_plan& f = run.plan;
    const int64_t keys = part.end - part.begin, key = t.span.begin + part.begin;
    float* to = b.out + first * f.value_width;
    const float* alpha = b.state.alpha + first;
    if constexpr (PAIRS)
        gemm_pairs<HOW>(rows, f.value_panels, keys, b.weight + part.begin, tile_columns / 2,
                        reinterpret_cast<uint32_t*>(t.head.value) + key / 2 * NR,
                        f.keys / 2 * NR, to, f.value_width, 1.0f, alpha);
    else
        gemm<HOW>(rows, f.value_panels, keys, b.score + part.begin, tile_columns, 1,
                  reinterpret_cast<float*>(t.head.value) + key * NR, f.keys * NR, to,
                  f.value_width, 1.0f, alpha);
}

// A score of -inf is a dead pair; only where a value row isn't finite does that need saying.
void bury_bad(const forward_buffers& b, const forward_tile& t, int first, int rows) {
    for (int64_t c = 0; c < t.span.end - t.span.begin; ++c) {
        if (!t.head.bad[t.span.begin + c]) continue;
        for (int r = 0; r < rows; ++r)
            if (b.score[r * tile_columns + c] == -infinity)
                b.live.live[(first + r) * b.live.ld + c / 16] &=
                    static_cast<uint16_t>(~(1u << (c % 16)));
    }
}

// Adds what live pairs take from value rows that were packed as 0, one by one.
template <bool PAIRS>
void add_bad(const forward_run& run, const forward_buffers& b, const forward_tile& t, int first,
             int rows) {
    const af_problem& p = *run.p;
    const int64_t kv_head = t.job.h / run.plan.group;
    for (int64_t c = 0; c < t.span.end - t.span.begin; ++c) {
        if (!t.head.bad[t.span.begin + c]) continue;
        const matrix value =
            matrix_of(p.value, p.dtype, t.job.b, kv_head, t.span.begin + c);
        for (int r = 0; r < rows; ++r) {
            const uint16_t bits = b.live.live[(first + r) * b.live.ld + c / 16];
            if (!(bits >> (c % 16) & 1)) continue;
            float weight;
            if constexpr (PAIRS) {
                const uint32_t word = uint32_t(b.weight[r * tile_columns + c]) << 16;
                memcpy(&weight, &word, 4);
            } else {
                weight = b.score[r * tile_columns + c];
            }
            float* out = b.out + (first + r) * run.plan.value_width;
            for (int64_t d = 0; d < p.value_head_dim; d += VL)
                store(out + d, load(out + d) + fetch(value, 0, d, p.value_head_dim - d) * weight);
        }
    }
}

template <bool PAIRS, bool MASKED>
void softmax_strip(const forward_run& run, const forward_buffers& b, int first, int rows,
                   const stretch* part, int parts) {
    for (int r = 0; r < rows; r += VL) {
        const softmax_tile tile = {b.score + r * tile_columns,
                                   tile_columns,
                                   PAIRS ? b.weight + r * tile_columns : nullptr,
                                   tile_columns,
                                   b.live.live + (first + r) * b.live.ld,
                                   b.live.ld,
                                   part,
                                   parts};
        const softmax_state& s = b.state;
        const int at = first + r;
        const softmax_state state = {s.top + at, s.sum + at * VL, s.alpha + at, s.nan + at};
        softmax_rows<MASKED, PAIRS>(rows - r < VL ? rows - r : VL, run.factor, tile, state);
    }
}

// `masked`: live bits say which pairs are live.
template <bool PAIRS>
void strip_of_tile(const forward_run& run, const forward_buffers& b, const forward_tile& t,
                   int first, int rows, bool masked) {
    const int64_t columns = t.span.end - t.span.begin;
    stretch part[most_parts];
    int parts = 1;
    bool all = true;
    if (masked)
        parts = live_parts(b.live, first, rows, columns, part, &all);
    else
        part[0] = {0, static_cast<int32_t>(round_up(columns, tile_step))};
    if (parts == 0) return;
    // Rows past the end compute on zeros, so that products have few shapes.
    const int padded = static_cast<int>(round_up(rows, PAIRS && has_tiles ? 16 : 4));
    for (int i = 0; i < parts; ++i)
        score_product<PAIRS>(run, b, t, first, padded, part[i]);
    if (run.p->score) {
        af_tile tile = {};
        tile.score = b.score;
        tile.live = all ? nullptr : b.live.live + first * b.live.ld;
        tile.ld = tile_columns;
        tile.live_ld = b.live.ld;
        tile.rows = rows;
        tile.cols = static_cast<int32_t>(columns);
        tile.b = t.job.b;
        tile.h = t.job.h;
        tile.q = t.job.q + first;
        tile.kv = t.span.begin;
        tile.inputs = &run.p->inputs;
        tile.scratch = b.scratch;
        tile.error = b.error;
        run.p->score->function(run.p->score, &tile);
    }
    if (t.any_bad) bury_bad(b, t, first, rows);
    if (all && !t.any_bad)
        softmax_strip<PAIRS, false>(run, b, first, rows, part, parts);
    else
        softmax_strip<PAIRS, true>(run, b, first, rows, part, parts);
    value_product<PAIRS, into::rescale>(run, b, t, first, padded, part[0]);
    for (int i = 1; i < parts; ++i)
        value_product<PAIRS, into::add>(run, b, t, first, padded, part[i]);
    if (t.any_bad) add_bad<PAIRS>(run, b, t, first, rows);
}

void finish(const forward_run& run, const forward_buffers& b, const forward_job& job) {
    const af_forward_args& args = *run.args;
    const af_problem& p = *run.p;
    const int size = p.dtype == AF_F32 ? 4 : 2;
    for (int r = 0; r < job.rows; ++r) {
        const float sum = sum_of(load(b.state.sum + r * VL));
        const float top = b.state.top[r] * run.natural;
        const int64_t row = (job.b * p.q_heads + job.h) * p.q_length + job.q + r;
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        const float* from = b.out + r * run.plan.value_width;
        const af_tensor& out = args.out;
        if (p.value_head_dim > 0) {
            char* to = static_cast<char*>(out.data) +
                       (job.b * out.stride[0] + job.h * out.stride[1] +
                        (job.q + r) * out.stride[2]) *
                           size;
            store_row(from, p.value_head_dim, inverse, p.dtype, to);
            if (args.unrounded_out)
                store_row(from, p.value_head_dim, inverse, AF_F32,
                          args.unrounded_out + row * p.value_head_dim);
        }
        if (args.lse)
            args.lse[row] = sum == 0.0f ? -infinity : top + __builtin_logf(sum);
        if (args.max_scores) {
            const bool nan = sum != sum && (top != infinity || b.state.nan[r]);
            args.max_scores[row] = nan ? __builtin_nanf("") : top;
        }
    }
}

template <bool PAIRS>
void run_job(const forward_run& run, int64_t index, int thread) {
    const af_problem& p = *run.p;
    const forward_plan& f = run.plan;
    const int64_t unit = index / f.jobs_a_unit;
    forward_tile t;
    t.job = job_of(p, f, run.first_unit + unit, run.order[index]);
    if (t.job.rows <= 0) return;
    t.head = head_at(run, unit);
    const forward_buffers b = buffers_of(run, thread);

    const int64_t rows_padded = round_up(t.job.rows, strip_rows);
    const matrix query = matrix_of(p.query, p.dtype, t.job.b, t.job.h, t.job.q);
    if constexpr (PAIRS)
        copy_rows_pairs(query, t.job.rows, rows_padded, p.head_dim, f.query_width,
                        static_cast<uint16_t*>(b.query));
    else
        copy_rows(query, t.job.rows, rows_padded, p.head_dim, f.query_width,
                  static_cast<float*>(b.query));
    memset(b.out, 0, rows_padded * f.value_width * 4);
    memset(b.state.sum, 0, rows_padded * VL * 4);
    memset(b.state.nan, 0, rows_padded);
    for (int64_t r = 0; r < rows_padded; ++r) b.state.top[r] = -infinity;

    if constexpr (PAIRS) pairs_begin();
    const run_row row = key_runs(p, t.job.b, t.job.h, t.job.q);
    tile_walk walk = {row, tile_columns};
    while (walk.next(&t.span)) {
        t.any_bad = memchr(t.head.bad + t.span.begin, 1, t.span.end - t.span.begin) != nullptr;
        const bool masked = !t.span.whole || t.any_bad;
        if (masked) {
            af_tile tile = {};
            tile.rows = t.job.rows;
            tile.b = t.job.b;
            tile.h = t.job.h;
            tile.q = t.job.q;
            tile.inputs = &p.inputs;
            tile.scratch = b.scratch;
            tile.error = b.error;
            live_of_tile(p.mask, tile, row, t.span, rows_padded, b.live);
        }
        for (int first = 0; first < t.job.rows; first += strip_rows) {
            const int left = t.job.rows - first;
            strip_of_tile<PAIRS>(run, b, t, first,
                                 left < strip_rows ? left : static_cast<int>(strip_rows), masked);
        }
    }
    if constexpr (PAIRS) pairs_end();
    finish(run, b, t.job);
}

void forward_job_of(void* context, int64_t index, int thread) {
    const forward_run& run = *static_cast<forward_run*>(context);
    if constexpr (has_pairs) {
        if (run.plan.pairs) return run_job<true>(run, index, thread);
    }
    run_job<false>(run, index, thread);
}

// Waking a thread costs some 20 us: problems of about 100 us and less run on the caller.
int threads_for(const af_problem& p) {
    const double flops = 2.0 * p.batch * p.q_heads * p.q_length * p.kv_length *
                         (p.head_dim + p.value_head_dim);
    return flops < 1e7 ? 1 : p.threads;
}

}  // namespace

int64_t forward_workspace(const af_problem& problem) { return plan_of(problem).total; }

int32_t forward(const af_forward_args& args, af_error* error) {
    const af_problem& p = args.problem;
    forward_run run;
    run.args = &args;
    run.p = &p;
    run.plan = plan_of(p);
    const forward_plan& f = run.plan;
    run.packed = static_cast<char*>(args.workspace);
    run.order = reinterpret_cast<int32_t*>(run.packed + f.units_a_wave * f.unit_bytes);
    run.threads = reinterpret_cast<char*>(run.order) + f.order_bytes;
    run.chunks = ceil_div(p.kv_length, pack_chunk);

    const float scale = static_cast<float>(p.scale);
    // Without a score program the scale waits for exp2; it must keep the order of scores then.
    const bool late = !p.score && scale > 0.0f && scale < infinity;
    run.stored_scale = late ? 1.0f : scale;
    run.factor = late ? static_cast<float>(p.scale * 1.4426950408889634) : log2e;
    run.natural = late ? scale : 1.0f;

    for (int i = 0; i < f.threads; ++i) memset(buffers_of(run, i).error, 0, sizeof(af_error));
    const int threads = threads_for(p);
    for (int64_t unit = 0; unit < f.units; unit += f.units_a_wave) {
        const int64_t units = smaller(f.units_a_wave, f.units - unit);
        run.first_unit = unit;
        for (int64_t i = 0; i < units; ++i)
            order_jobs(p, f, unit + i, run.order + i * f.jobs_a_unit);
        af_parallel(units * run.chunks, threads, pack_job, &run);
        af_parallel(units * f.jobs_a_unit, threads, forward_job_of, &run);
    }
    for (int i = 0; i < f.threads; ++i) {
        const af_error& e = *buffers_of(run, i).error;
        if (e.code == AF_OK) continue;
        *error = e;
        return e.code;
    }
    return AF_OK;
}

}  // namespace AF_LEVEL
