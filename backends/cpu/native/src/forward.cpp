// Attention forward: q tiles over packed keys and values, wave by wave of kv heads.
//
// A job is a q tile of one head. For each kv tile of its row of runs it finds the live bits, if
// some pair may be dead; then it goes strip by strip of 32 rows, so that scores stay near. Columns
// without a live pair in a strip are left out.
#include <string.h>

#include "finish_row.h"
#include "forward_strip.h"
#include "level.h"
#include "pool.h"

namespace AF_LEVEL {
namespace {

packed_head head_at(const forward_run& run, int64_t unit_in_wave) {
    char* at = run.packed + unit_in_wave * run.plan.unit_bytes;
    return {at, at + run.plan.key_bytes,
            reinterpret_cast<uint8_t*>(at + run.plan.key_bytes + run.plan.value_bytes)};
}

// State of one thread.
forward_buffers buffers_of(const forward_run& run, int thread) {
    const forward_plan& f = run.plan;
    char* at = run.threads + thread * f.thread_bytes;
    const auto take = [&](int64_t bytes) {
        char* p = at;
        at += bytes;
        return p;
    };
    forward_buffers b;
    for (int i = 0; i < score_buffers; ++i) {
        b.score[i] = reinterpret_cast<float*>(take(f.score_bytes));
        b.alpha[i] = reinterpret_cast<float*>(take(strip_rows * 4));
        b.live[i].live = reinterpret_cast<uint16_t*>(take(f.live_bytes));
        b.live[i].ld = tile_columns / 16;
    }
    char* spare = take(f.spare_bytes);
    for (live_tile& live : b.live) live.spare = reinterpret_cast<uint16_t*>(spare);
    b.query = take(f.query_bytes);
    b.out = reinterpret_cast<float*>(take(f.out_bytes));
    b.state.row_sum = reinterpret_cast<float*>(take(f.q_rows * VL * 4));
    b.state.row_max = reinterpret_cast<float*>(take(f.q_rows * 4));
    b.state.alpha = nullptr;
    b.state.nan = reinterpret_cast<uint8_t*>(take(round_up(f.q_rows, 64)));
    b.scratch = take(f.scratch_bytes);
    b.error = reinterpret_cast<af_error*>(at);
    return b;
}

// One chunk of keys of one head: both operands.
void pack_keys(const forward_run& run, int64_t unit, int64_t first) {
    const af_problem& p = *run.p;
    const forward_plan& f = run.plan;
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
                            f.keys / 2 * NR, to.nonfinite + first);
    } else {
        pack_transposed(key, n, p.head_dim, columns,
                        reinterpret_cast<float*>(to.key) + first * f.k);
        pack_straight(value, n, columns, p.value_head_dim,
                      reinterpret_cast<float*>(to.value) + first * NR, f.keys * NR,
                      to.nonfinite + first);
    }
}

// Packs a unit just before it is used, together with the other threads that need it now. Most
// often this thread packs alone, and its cache then has the unit. Returns when all of it is
// packed.
void pack(const forward_run& run, int64_t unit) {
    packing& p = run.packings[unit];
    if (__atomic_load_n(&p.done, __ATOMIC_ACQUIRE) == run.chunks) return;
    for (;;) {
        const int64_t chunk = __atomic_fetch_add(&p.taken, 1, __ATOMIC_RELAXED);
        if (chunk >= run.chunks) break;
        pack_keys(run, unit, chunk * pack_chunk);
        __atomic_fetch_add(&p.done, 1, __ATOMIC_RELEASE);
    }
    for (int turn = 0; __atomic_load_n(&p.done, __ATOMIC_ACQUIRE) < run.chunks; ++turn)
        af_wait_a_little(turn);
}

void finish(const forward_run& run, const forward_buffers& b, const forward_job& job) {
    for (int r = 0; r < job.rows; ++r)
        finish_row(*run.args, run.scale, job.b, job.h, job.q + r,
                   {b.state.row_max[r], sum_of(load(b.state.row_sum + r * VL)),
                    b.state.nan[r] != 0, b.out + r * run.plan.value_width});
}

// Writes the live bits of a tile, with this thread's buffers.
void find_live(const forward_run& run, const forward_buffers& b, const forward_job& job,
               const run_row& row, const tile_span& span, const live_tile& to) {
    af_tile tile = {};
    tile.rows = job.rows;
    tile.b = job.b;
    tile.h = job.h;
    tile.q = job.q;
    tile.inputs = &run.p->inputs;
    tile.scratch = b.scratch;
    tile.error = b.error;
    live_of_tile(run.p->mask, tile, row, span, round_up(job.rows, strip_rows), to);
}

// Where all heads find the live bits of the n-th tile that needs some, of a q tile; NULL if they
// aren't shared.
uint16_t* shared_live_at(const forward_run& run, int64_t q_tile, int64_t n) {
    const forward_plan& f = run.plan;
    if (!run.shared_live || q_tile >= f.shared_q_tiles || n >= shared_live_tiles) return nullptr;
    return reinterpret_cast<uint16_t*>(run.shared_live +
                                       (q_tile * shared_live_tiles + n) * f.live_bytes);
}

void share_live_job(void* context, int64_t index, int thread) {
    const forward_run& run = *static_cast<forward_run*>(context);
    const forward_job job = job_of(*run.p, run.plan, 0, index);
    if (job.rows <= 0) return;
    const forward_buffers b = buffers_of(run, thread);
    const run_row row = key_runs(*run.p, 0, 0, job.q);
    tile_walk walk = {row, tile_columns};
    tile_span span;
    live_tile to = b.live[0];
    for (int64_t n = 0; n < shared_live_tiles && walk.next(&span);) {
        if (span.whole) continue;
        to.live = shared_live_at(run, job.tile, n++);
        find_live(run, b, job, row, span, to);
    }
}

template <bool PAIRS>
struct strips_for {
    typedef strips_in_turn<PAIRS> type;
};
#if defined(__AMX_BF16__)
template <>
struct strips_for<true> {
    typedef strips_overlapped type;
};
#endif

// All kv tiles of a job, strip by strip.
template <bool PAIRS>
void visit_tiles(const forward_run& run, const forward_buffers& b, forward_tile& t) {
    const af_problem& p = *run.p;
    typename strips_for<PAIRS>::type strips(run, b);
    const run_row row = key_runs(p, t.job.b, t.job.h, t.job.q);
    tile_walk walk = {row, tile_columns};
    int64_t partial = 0;
    while (walk.next(&t.span)) {
        t.any_nonfinite =
            memchr(t.head.nonfinite + t.span.begin, 1, t.span.end - t.span.begin) != nullptr;
        t.masked = !t.span.whole || t.any_nonfinite;
        live_tile live = strips.free_live();
        uint16_t* shared = t.span.whole ? nullptr : shared_live_at(run, t.job.tile, partial++);
        // A tile with a non-finite value row has live bits of its own for this head.
        if (shared && !t.any_nonfinite)
            live.live = shared;
        else if (t.masked)
            find_live(run, b, t.job, row, t.span, live);
        for (int first = 0; first < t.job.rows; first += strip_rows) strips.take(t, first, live);
    }
    strips.finish();
}

template <bool PAIRS>
void run_job(const forward_run& run, int64_t index, int thread) {
    const af_problem& p = *run.p;
    const forward_plan& f = run.plan;
    const int64_t unit = index / f.jobs_a_unit;
    forward_tile t;
    t.job = job_of(p, f, run.first_unit + unit, run.order[index]);
    const int rows = t.job.rows;
    if (rows <= 0) return;
    pack(run, unit);
    t.head = head_at(run, unit);
    const forward_buffers b = buffers_of(run, thread);
    const subnormal_results flushed(false);

    const int64_t rows_padded = round_up(rows, strip_rows);
    const matrix query = matrix_of(p.query, p.dtype, t.job.b, t.job.h, t.job.q);
    if constexpr (PAIRS)
        copy_rows_pairs(query, rows, rows_padded, p.head_dim, f.query_width,
                        static_cast<uint16_t*>(b.query));
    else
        copy_rows(query, rows, rows_padded, p.head_dim, f.query_width,
                  static_cast<float*>(b.query));
    memset(b.out, 0, rows_padded * f.value_width * 4);
    memset(b.state.row_sum, 0, rows_padded * VL * 4);
    memset(b.state.nan, 0, rows_padded);
    for (int64_t r = 0; r < rows_padded; ++r) b.state.row_max[r] = -infinity;

    if constexpr (PAIRS) pairs_begin();
    visit_tiles<PAIRS>(run, b, t);
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

int forward_threads(const af_problem& p, const forward_plan& f) {
    return threads_worth(microseconds_of_products(p, has_tiles && f.pairs), p.threads);
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
    run.packings = reinterpret_cast<packing*>(reinterpret_cast<char*>(run.order) + f.order_bytes);
    run.threads = reinterpret_cast<char*>(run.packings + f.units_a_wave);
    run.chunks = ceil_div(p.kv_length, pack_chunk);

    run.scale = scale_of(p);
    for (int i = 0; i < f.threads; ++i) memset(buffers_of(run, i).error, 0, sizeof(af_error));
    const int threads = forward_threads(p, f);
    const bool alike = p.mask && p.mask_is_per_call && p.runs.batch == 1 && p.runs.heads == 1;
    run.shared_live = nullptr;
    if (alike && f.shared_q_tiles > 0) {
        run.shared_live = run.threads + f.threads * f.thread_bytes;
        af_parallel(f.shared_q_tiles, threads, share_live_job, &run);
    }
    for (int64_t unit = 0; unit < f.units; unit += f.units_a_wave) {
        const int64_t units = smaller(f.units_a_wave, f.units - unit);
        run.first_unit = unit;
        for (int64_t i = 0; i < units; ++i)
            order_jobs(p, f, unit + i, run.order + i * f.jobs_a_unit);
        memset(run.packings, 0, units * sizeof(packing));
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
