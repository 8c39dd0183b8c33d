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

// Rows [first, first + n) of keys or values of the call's type, copied to `rows` where they are in
// pages or stored in another type.
matrix chunk_rows(const forward_run& run, const af_tensor& tensor, const af_scales& scales,
                  int64_t dim, int64_t b, int64_t h, int64_t first, int64_t n, char* rows) {
    const af_problem& p = *run.p;
    if (!copies_rows(p)) return matrix_of(tensor, p.dtype, b, h, first);
    const int64_t size = element_bytes(p.dtype);
    alignas(64) float row[AF_TILE_COLUMNS + VL];
    for (int64_t at = 0; at < n;) {
        int64_t end = n;
        const matrix page = key_rows(p, tensor, kv_dtype(p), b, h, first, at, &end);
        row_scales s = {nullptr, 0};
        if (p.kv_storage) s = scales_of(p, scales, b, h, first, at);
        for (; at < end; ++at) {
            char* to = rows + at * dim * size;
            if (s.at) {
                for (int64_t d = 0; d < dim; d += VL) store(row + d, fetch(page, at, d, dim - d));
                store_row(row, dim, s.at[at * s.row], p.dtype, to);
                continue;
            }
            if (page.col == 1) memcpy(to, address(page, at, 0), dim * size);
            for (int64_t d = 0; page.col != 1 && d < dim; ++d)
                memcpy(to + d * size, address(page, at, d), size);
        }
    }
    return {rows, dim, 1, p.dtype};
}

// One chunk of keys of one head: both operands.
void pack_keys(const forward_run& run, int64_t unit, int64_t first, char* rows) {
    const af_problem& p = *run.p;
    const forward_plan& f = run.plan;
    const packed_head to = run.head_at(unit);
    const int64_t b = f.batches_a_unit > 1 ? 0 : (run.first_unit + unit) / p.kv_heads;
    const int64_t h = (run.first_unit + unit) % p.kv_heads;
    const int64_t n = smaller(pack_chunk, p.kv_length - first);
    const int64_t columns = smaller(pack_chunk, f.keys - first);
    const matrix key = chunk_rows(run, p.key, p.key_scales, p.head_dim, b, h, first, n, rows);
    if (f.pairs)
        pack_transposed_pairs(key, n, p.head_dim, f.k, columns,
                              reinterpret_cast<uint32_t*>(to.key) + first * f.k / 2);
    else
        pack_transposed(key, n, p.head_dim, columns,
                        reinterpret_cast<float*>(to.key) + first * f.k);
    const matrix value =
        chunk_rows(run, p.value, p.value_scales, p.value_head_dim, b, h, first, n, rows);
    if (f.pairs)
        pack_straight_pairs(value, n, columns, p.value_head_dim,
                            reinterpret_cast<uint32_t*>(to.value) + first / 2 * NR,
                            f.keys / 2 * NR, to.nonfinite + first);
    else
        pack_straight(value, n, columns, p.value_head_dim,
                      reinterpret_cast<float*>(to.value) + first * NR, f.keys * NR,
                      to.nonfinite + first);
}

// Packs a unit just before it is used, together with the other threads that need it now. Most
// often this thread packs alone, and its cache then has the unit. Returns when all of it is
// packed.
void pack(const forward_run& run, int64_t unit, char* rows) {
    packing& p = run.packings[unit];
    if (__atomic_load_n(&p.done, __ATOMIC_ACQUIRE) == run.chunks) return;
    for (;;) {
        const int64_t chunk = __atomic_fetch_add(&p.taken, 1, __ATOMIC_RELAXED);
        if (chunk >= run.chunks) break;
        pack_keys(run, unit, chunk * pack_chunk, rows);
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
    const af_tile tile =
        tile_of(*run.p, job.b, job.h, job.q, 0, job.rows, 0, b.scratch, b.error);
    live_of_tile(run.p->mask, tile, row, span, round_up(job.rows, strip_rows), to);
}

// Where all heads find the live bits of the n-th tile that needs some, of a q tile; NULL if they
// aren't shared.
uint16_t* shared_live_at(const forward_run& run, int64_t q_tile, int64_t n) {
    const forward_plan& f = run.plan;
    if (!run.shares_live || q_tile >= f.shared_q_tiles || n >= shared_live_tiles) return nullptr;
    return run.shared_live + (q_tile * shared_live_tiles + n) * f.live_words;
}

void share_live_job(void* context, int64_t index, int thread) {
    const forward_run& run = *static_cast<forward_run*>(context);
    const forward_job job = job_of(*run.p, run.plan, 0, index);
    if (job.rows <= 0) return;
    const forward_buffers b = run.buffers_of(thread);
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
    const forward_buffers b = run.buffers_of(thread);
    pack(run, unit, b.copied_rows);
    t.head = run.head_at(unit);
    const subnormal_results flushed(false);

    const int64_t rows_padded = round_up(rows, strip_rows);
    const matrix query = matrix_of(p.query, p.dtype, t.job.b, t.job.h, t.job.q);
    if constexpr (PAIRS)
        copy_rows_pairs(query, rows, rows_padded, p.head_dim, f.query_width,
                        reinterpret_cast<uint16_t*>(b.query));
    else
        copy_rows(query, rows, rows_padded, p.head_dim, f.query_width,
                  reinterpret_cast<float*>(b.query));
    memset(b.out, 0, rows_padded * f.value_width * 4);
    begin_rows(b.state, rows_padded);

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

// Lays a workspace out; with a null base `memory.used` becomes its size.
forward_run lay_out(const af_problem& p, arena& memory) {
    forward_run run;
    run.p = &p;
    run.plan = plan_of(p);
    const forward_plan& f = run.plan;
    run.packed = memory.take<char>(f.units_a_wave * f.unit_bytes);
    run.order = memory.take<int32_t>(f.units_a_wave * f.jobs_a_unit);
    run.packings = memory.take<packing>(f.units_a_wave);
    run.buffer_bytes = bytes_of([&](arena& one) { take_buffers(one, p, f); });
    run.threads = memory.take<char>(f.threads * run.buffer_bytes);
    run.shared_live = memory.take<uint16_t>(f.shared_q_tiles * shared_live_tiles * f.live_words);
    return run;
}

}  // namespace

int64_t forward_workspace(const af_problem& problem) {
    return bytes_of([&](arena& memory) { lay_out(problem, memory); });
}

int32_t forward(const af_forward_args& args, af_error* error) {
    const af_problem& p = args.problem;
    arena memory = {static_cast<char*>(args.workspace), 0};
    forward_run run = lay_out(p, memory);
    const forward_plan& f = run.plan;
    run.args = &args;
    run.chunks = ceil_div(p.kv_length, pack_chunk);
    run.scale = scale_of(p);
    clear_errors(run, f.threads);
    const int threads = forward_threads(p, f);
    run.shares_live = f.shared_q_tiles > 0 && p.mask && p.mask_is_per_call &&
                      p.runs.batch == 1 && p.runs.heads == 1;
    if (run.shares_live) af_parallel(f.shared_q_tiles, threads, share_live_job, &run);
    for (int64_t unit = 0; unit < f.units; unit += f.units_a_wave) {
        const int64_t units = smaller(f.units_a_wave, f.units - unit);
        run.first_unit = unit;
        for (int64_t i = 0; i < units; ++i)
            order_jobs(p, f, unit + i, run.order + i * f.jobs_a_unit);
        memset(run.packings, 0, units * sizeof(packing));
        af_parallel(units * f.jobs_a_unit, threads, forward_job_of, &run);
    }
    return first_error(run, f.threads, error);
}

}  // namespace AF_LEVEL
