// Gradients of q, k, v and captured tensors, in one pass over the live tiles.
//
// P = exp(s - lse) is computed again from q and k. For each kv tile and each q tile that it meets
//   dV += P^T dout,  dP = dout v^T,  dS' = P (dP - delta),  dS = score_backward(dS'),
//   dK += scale dS^T q,  dQ += scale dS k,  with delta = sum(dout * out) - dlse.
// (T. Dao, FlashAttention-2, 2023, algorithm 2, with a mod's derivative and lse's gradient.)
#include "backward_groups.h"
#include "backward_jobs.h"
#include "backward_row_sums.h"
#include "captured_sums.h"
#include "level.h"
#include "pool.h"

namespace AF_LEVEL {

namespace {

// State of a call, shared by its jobs.
struct pass {
    const af_backward_args* args;
    backward_plan plan;
    bool wants_dscore;
    job_table table;
    captured_sums captured;
    char* q_tiles;     // [units_in_flight][streams][q_tiles] of tile_bytes
    int64_t tile_bytes;
    float* dq;         // [units_in_flight][partitions][streams][q_tiles][dq_tile_floats]
    uint8_t* touched;  // [units_in_flight][partitions][streams][q_tiles]: dq holds a sum
    char* buffers;     // [threads] of buffer_bytes
    int64_t buffer_bytes;
    int64_t first_unit, units;  // in flight now

    const af_problem& problem() const { return args->problem; }

    void head_of(int64_t unit, int64_t stream, int64_t* b, int64_t* h) const {
        const int64_t heads = problem().kv_heads;
        const int64_t at = first_unit + unit;
        *b = at / heads + stream / plan.q_per_kv;
        *h = at % heads * plan.q_per_kv + stream % plan.q_per_kv;
    }

    q_tile q_tile_of(int64_t unit, int64_t stream, int64_t tile) const {
        const int64_t n = (unit * plan.streams + stream) * plan.q_tiles + tile;
        arena memory = {q_tiles + n * tile_bytes, 0};
        return take_q_tile(memory, plan);
    }

    int64_t partial_of(int64_t unit, int64_t partition, int64_t stream, int64_t tile) const {
        return ((unit * plan.partitions + partition) * plan.streams + stream) * plan.q_tiles +
               tile;
    }

    tile_buffers buffers_of(int thread) const {
        arena memory = {buffers + thread * buffer_bytes, 0};
        return take_buffers(memory, plan, problem());
    }
};

// Lays a workspace out; with a null base `memory.used` becomes its size.
pass lay_out(const af_problem& problem, int64_t elements, int64_t owned, arena& memory) {
    pass run;
    run.args = nullptr;
    run.plan = make_plan(problem, elements > 0);
    const backward_plan& plan = run.plan;
    run.table = job_table::take(memory, plan);
    run.captured = captured_sums::take(memory, plan, elements, owned);
    run.tile_bytes = bytes_of([&](arena& one) { take_q_tile(one, plan); });
    const int64_t tiles = plan.units_in_flight * plan.stream_tiles();
    run.q_tiles = memory.take<char>(tiles * run.tile_bytes);
    run.dq = memory.take<float>(tiles * plan.partitions * plan.dq_tile_floats());
    run.touched = memory.take<uint8_t>(tiles * plan.partitions);
    run.buffer_bytes = bytes_of([&](arena& one) { take_buffers(one, plan, problem); });
    run.buffers = memory.take<char>(problem.threads * run.buffer_bytes);
    return run;
}

void pack_job(void* context, int64_t index, int thread) {
    const pass& run = *static_cast<pass*>(context);
    const int64_t tiles = run.plan.q_tiles, streams = run.plan.streams;
    const int64_t tile = index % tiles, stream = index / tiles % streams;
    const int64_t unit = index / tiles / streams;
    int64_t b, h;
    run.head_of(unit, stream, &b, &h);
    tile_place at;
    memset(&at, 0, sizeof at);
    at.args = run.args;
    at.plan = &run.plan;
    at.b = b;
    at.h = h;
    at.q = tile * q_tile_rows;
    at.operands = run.q_tile_of(unit, stream, tile);
    pack_q_tile(*run.args, run.plan, b, h, at.q, at.operands);
    if (*at.operands.large_rows > 0 && !run.args->delta) {
        const subnormal_results flushed(false);
        tile_buffers t = run.buffers_of(thread);
        if (run.plan.pairs)
            sum_large_rows<has_pairs>(at, t);
        else
            sum_large_rows<false>(at, t);
    }
    for (int64_t i = 0; i < run.plan.partitions; ++i)
        run.touched[run.partial_of(unit, i, stream, tile)] = 0;
}

// The tiles of keys [key, key + keys) of a unit with the q tiles of streams [first, last), whose
// live blocks are the same. Returns whether there were any.
template <bool PAIRS>
bool meet_q_tiles(const pass& run, const backward_job& job, tile_buffers& t, int64_t key,
                  int64_t keys, int64_t first, int64_t last, bool packed,
                  double* const* captured_grad) {
    const af_problem& p = run.problem();
    const backward_plan& plan = run.plan;
    int64_t b, h;
    run.head_of(job.unit, first, &b, &h);
    q_tile_walk walk;
    walk.rows = t.block_rows;
    walk.start(p, b, h, key, keys);
    int64_t tile;
    while (walk.next(&tile)) {
        for (int64_t stream = first; stream < last; ++stream) {
            run.head_of(job.unit, stream, &b, &h);
            if (!packed) {
                pack_kv_tile(p, plan, matrix_of(p.key, p.dtype, b, h / plan.q_per_kv, key),
                             matrix_of(p.value, p.dtype, b, h / plan.q_per_kv, key), keys, t.kv);
                memset(t.dk, 0, plan.head_dim * plan.kv_rows * 4);
                memset(t.dv, 0, plan.value_dim * plan.kv_rows * 4);
                packed = true;
            }
            if (stream == first || (p.mask && !p.mask_is_per_call)) {
                t.found.find(walk, tile, mask_tile(p, t, b, h));
            }
            tile_place at;
            at.operands = run.q_tile_of(job.unit, stream, tile);
            t.living = t.found.without_dead_rows(at.operands, keys, t.living_bits);
            if (!t.living.any) continue;
            at.args = run.args;
            at.plan = &plan;
            at.b = b;
            at.h = h;
            at.q = tile * q_tile_rows;
            at.kv = key;
            at.rows = smaller(p.q_length - at.q, q_tile_rows);
            at.keys = keys;
            at.dq = nullptr;
            if (plan.wants_dq) {
                const int64_t partial = run.partial_of(job.unit, job.partition, stream, tile);
                at.dq = run.dq + partial * plan.dq_tile_floats();
                at.dq_is_new = !run.touched[partial];
                run.touched[partial] = 1;
            }
            at.captured_grad = captured_grad;
            at.wants_dscore = run.wants_dscore;
            backward_tile<PAIRS>(at, t);
        }
    }
    return packed;
}

template <bool PAIRS>
void work_on(const pass& run, const backward_job& job, tile_buffers& t,
             double* const* captured_grad) {
    const af_problem& p = run.problem();
    const backward_plan& plan = run.plan;
    const int32_t* bounds = run.table.bounds(plan, job.unit);
    const int64_t unit = run.first_unit + job.unit;
    const int64_t kv_batch = unit / p.kv_heads, kv_head = unit % p.kv_heads;
    const bool alike = !p.has_mask || (p.transposed.heads == 1 &&
                                       (p.transposed.batch == 1 || !p.kv_batch_is_shared));
    const subnormal_results flushed(false);
    if constexpr (PAIRS) pairs_begin();
    for (int64_t tile = bounds[job.partition]; tile < bounds[job.partition + 1]; ++tile) {
        const int64_t key = tile * plan.kv_rows;
        const int64_t keys = smaller(p.kv_length - key, plan.kv_rows);
        bool met = false;
        const int64_t step = alike ? plan.streams : 1;
        for (int64_t stream = 0; stream < plan.streams; stream += step)
            met = meet_q_tiles<PAIRS>(run, job, t, key, keys, stream, stream + step, met,
                                      captured_grad);
        if (!met) {
            memset(t.dk, 0, plan.head_dim * plan.kv_rows * 4);
            memset(t.dv, 0, plan.value_dim * plan.kv_rows * 4);
        }
        if (plan.wants_dk)
            write_kv_rows(plan, t.dk, p.head_dim, plan.head_dim, static_cast<float>(p.scale),
                          run.args->dk, p.dtype, kv_batch, kv_head, key, keys, t.spare);
        if (plan.wants_dv)
            write_kv_rows(plan, t.dv, p.value_head_dim, plan.value_dim,
                          has_dropout(p) ? p.dropout_scale : 1.0f, run.args->dv, p.dtype, kv_batch, kv_head, key, keys, t.spare);
    }
    if constexpr (PAIRS) pairs_end();
}

template <bool PAIRS> void tiles_job(void* context, int64_t index, int thread) {
    const pass& run = *static_cast<pass*>(context);
    tile_buffers t = run.buffers_of(thread);
    work_on<PAIRS>(run, run.table.jobs[index], t, nullptr);
}

// Runs all jobs of one captured partial.
template <bool PAIRS> void partial_job(void* context, int64_t index, int thread) {
    const pass& run = *static_cast<pass*>(context);
    tile_buffers t = run.buffers_of(thread);
    double* captured_grad[most_captured] = {};
    run.captured.pointers(*run.args, index, captured_grad);
    if (run.first_unit == 0)
        memset(run.captured.sums + index * run.captured.elements, 0,
               run.captured.elements * sizeof(double));
    for (int64_t j = 0; j < run.table.count; ++j)
        if (run.table.jobs[j].partial == index)
            work_on<PAIRS>(run, run.table.jobs[j], t, captured_grad);
}

// Sums the partials of dQ of a q tile, in order.
void dq_job(void* context, int64_t index, int) {
    const pass& run = *static_cast<pass*>(context);
    const af_problem& p = run.problem();
    const backward_plan& plan = run.plan;
    const int64_t tile = index % plan.q_tiles, stream = index / plan.q_tiles % plan.streams;
    const int64_t unit = index / plan.q_tiles / plan.streams;
    int64_t b, h;
    run.head_of(unit, stream, &b, &h);
    const int64_t rows = smaller(p.q_length - tile * q_tile_rows, q_tile_rows);
    const int64_t floats = plan.dq_tile_floats();
    float* sum = run.dq + run.partial_of(unit, 0, stream, tile) * floats;
    if (!run.touched[run.partial_of(unit, 0, stream, tile)]) memset(sum, 0, floats * 4);
    const float* more[wanted_jobs];  // partitions aren't more
    int partials = 0;
    for (int64_t i = 1; i < plan.partitions; ++i) {
        const int64_t partial = run.partial_of(unit, i, stream, tile);
        if (run.touched[partial]) more[partials++] = run.dq + partial * floats;
    }
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t j = r * plan.head_dim; j < (r + 1) * plan.head_dim; j += VL) {
            vf x = load(sum + j);
            for (int i = 0; i < partials; ++i) {
                __builtin_prefetch(more[i] + j + 4 * plan.head_dim, 0, 3);  // of row r + 4
                x += load(more[i] + j);
            }
            store(sum + j, x);
        }
        write_row(sum + r * plan.head_dim, p.head_dim, static_cast<float>(p.scale), run.args->dq,
                  p.dtype, b, h, tile * q_tile_rows + r);
    }
}

void clear_job(void* context, int64_t index, int) {
    static_cast<pass*>(context)->captured.clear_owned(index);
}

void captured_job(void* context, int64_t index, int) {
    const pass& run = *static_cast<pass*>(context);
    run.captured.finish(*run.args, index);
}

}  // namespace

int64_t backward_workspace(const af_problem& problem, int64_t captured_elements,
                           int64_t owned_elements) {
    return bytes_of(
        [&](arena& memory) { lay_out(problem, captured_elements, owned_elements, memory); });
}

int32_t backward(const af_backward_args& args, af_error* error) {
    const af_problem& p = args.problem;
    arena memory = {static_cast<char*>(args.workspace), 0};
    pass run = lay_out(p, af_captured_elements(args, 0),
                       af_captured_elements(args, AF_GRAD_OWNED), memory);
    const backward_plan& plan = run.plan;
    run.args = &args;
    const bool learns = run.captured.partials > 0 && p.score_backward;
    run.wants_dscore = plan.wants_dq || plan.wants_dk || learns;
    if (!run.wants_dscore && !plan.wants_dv) return AF_OK;
    clear_errors(run, p.threads);

    const int64_t partials = learns ? run.captured.partials : 0;
    if (learns && plan.units > 0)
        af_parallel(ceil_div(run.captured.owned, captured_chunk), p.threads, clear_job, &run);
    for (run.first_unit = 0; run.first_unit < plan.units; run.first_unit += run.units) {
        run.units = smaller(plan.units_in_flight, plan.units - run.first_unit);
        const int64_t q_tiles = run.units * plan.stream_tiles();
        run.table.fill(p, plan, run.first_unit, run.units, partials, run.captured.owned > 0);
        af_parallel(q_tiles, p.threads, pack_job, &run);
        if (learns)
            af_parallel(partials, p.threads,
                        plan.pairs ? partial_job<has_pairs> : partial_job<false>, &run);
        else
            af_parallel(run.table.count, p.threads,
                        plan.pairs ? tiles_job<has_pairs> : tiles_job<false>, &run);
        if (plan.wants_dq) af_parallel(q_tiles, p.threads, dq_job, &run);
    }
    if (learns && plan.units > 0)
        af_parallel(run.captured.chunks(), p.threads, captured_job, &run);
    return first_error(run, p.threads, error);
}

}  // namespace AF_LEVEL
