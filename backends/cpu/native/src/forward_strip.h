// One strip of a q tile against one kv tile: scores, score program, softmax, value product.
#pragma once
#include "dropout.h"
#include "forward_plan.h"
#include "live_parts.h"
#include "score_scale.h"
#include "softmax.h"
#include "tile_queue.h"

namespace AF_LEVEL {
namespace {

// The bf16 weights of a row lie where its scores began: one buffer in L1 instead of two.
constexpr int64_t weight_ld = 2 * tile_columns;

// Progress of packing a unit, in chunks.
struct alignas(64) packing {
    int64_t taken, done;
};

// This thread's buffers.
struct forward_buffers {
    float* score[score_buffers];  // [32][tile_columns]
    float* alpha[score_buffers];  // [32]
    live_tile live[score_buffers];
    char* query;
    float* out;  // [q_rows][value_width]
    softmax_state state;  // alpha is a strip's own
    char* copied_rows;    // [pack_chunk] rows of keys or values in one type, one after the other
    char* scratch;
    af_error* error;
};

// Whether rows of keys and values are copied before they are packed.
inline bool copies_rows(const af_problem& p) { return p.pages.ids || p.kv_storage; }

inline forward_buffers take_buffers(arena& memory, const af_problem& p, const forward_plan& f) {
    forward_buffers b;
    for (int i = 0; i < score_buffers; ++i) {
        b.score[i] = memory.take<float>(strip_rows * tile_columns);
        b.alpha[i] = memory.take<float>(strip_rows);
        b.live[i].live = memory.take<uint16_t>(f.live_words);
        b.live[i].ld = tile_columns / 16;
    }
    uint16_t* spare = memory.take<uint16_t>(f.live_words + f.q_rows);
    for (live_tile& live : b.live) live.spare = spare;
    b.query = memory.take<char>(f.q_rows * f.query_width * f.word);
    b.out = memory.take<float>(f.q_rows * f.value_width);
    b.state.row_sum = memory.take<float>(f.q_rows * VL);
    b.state.row_max = memory.take<float>(f.q_rows);
    b.state.alpha = nullptr;
    b.state.nan = memory.take<uint8_t>(f.q_rows);
    const int64_t widest = larger(p.head_dim, p.value_head_dim);
    b.copied_rows =
        memory.take<char>(copies_rows(p) ? pack_chunk * widest * element_bytes(p.dtype) : 0);
    b.scratch = memory.take<char>(scratch_bytes(p, false));
    b.error = memory.take<af_error>(1);
    return b;
}

struct forward_run {
    const af_forward_args* args;
    const af_problem* p;
    forward_plan plan;
    char* packed;         // [units_a_wave] of unit_bytes
    int32_t* order;       // [units_a_wave][jobs_a_unit]
    packing* packings;    // [units_a_wave]
    char* threads;        // of buffer_bytes each
    uint16_t* shared_live;  // [shared_q_tiles][shared_live_tiles][live_words]
    bool shares_live;     // the same for all heads, of which there are several
    int64_t buffer_bytes;
    int64_t first_unit;
    int64_t chunks;  // chunks of a packed unit
    score_scale scale;

    packed_head head_at(int64_t unit_in_wave) const {
        arena memory = {packed + unit_in_wave * plan.unit_bytes, 0};
        return take_head(memory, plan);
    }
    forward_buffers buffers_of(int thread) const {
        arena memory = {threads + thread * buffer_bytes, 0};
        return take_buffers(memory, *p, plan);
    }
};

// A kv tile in flight.
struct forward_tile {
    forward_job job;
    tile_span span;
    packed_head head;
    bool any_nonfinite;  // a value row of the tile is non-finite
    bool masked;         // live bits say which pairs are live
};

struct forward_strip {
    forward_tile tile;
    int first, rows, padded;  // padded: rows that products compute
    live_tile live;           // of the tile
    float *score, *alpha;
    live_columns<tile_columns> in;
};

// Starts a strip. False if no pair of it is live.
template <bool PAIRS>
bool begin_strip(const forward_tile& t, int first, const live_tile& live, forward_strip* s) {
    s->tile = t;
    s->first = first;
    s->rows = static_cast<int>(smaller(t.job.rows - first, strip_rows));
    // Rows past the end compute on zeros, so that products have few shapes.
    s->padded = static_cast<int>(round_up(s->rows, PAIRS && has_tiles ? 16 : 4));
    s->live = live;
    const int64_t columns = t.span.end - t.span.begin;
    s->in = t.masked ? live_columns_of<tile_columns>(live, first, s->rows, columns)
                     : every_column<tile_columns>(columns);
    return s->in.parts > 0;
}

// Operands of the two products.
struct strip_operands {
    const void *query, *key, *value;
    float *score, *out;
    const void* weight;
};

template <bool PAIRS>
strip_operands operands_of(const forward_run& run, const forward_buffers& b,
                           const forward_strip& s, const stretch& part) {
    const forward_plan& f = run.plan;
    const int64_t size = PAIRS ? 2 : 4, key = s.tile.span.begin + part.begin;
    strip_operands o;
    o.query = b.query + s.first * f.query_width * size;
    o.key = s.tile.head.key + key * f.k * size;
    o.value = s.tile.head.value + key * NR * size;
    o.score = s.score + part.begin;
    o.out = b.out + s.first * f.value_width;
    o.weight = PAIRS ? static_cast<void*>(reinterpret_cast<uint16_t*>(s.score) + part.begin)
                     : o.score;
    return o;
}

template <bool PAIRS>
void score_product(const forward_run& run, const forward_buffers& b, const forward_strip& s) {
    const forward_plan& f = run.plan;
    constexpr int64_t word = PAIRS ? 2 : 1;
    for (int i = 0; i < s.in.parts; ++i) {
        const strip_operands o = operands_of<PAIRS>(run, b, s, s.in.part[i]);
        const int64_t panels = (s.in.part[i].end - s.in.part[i].begin) / NR;
        multiply_words<PAIRS, into::store>(s.padded, panels, f.k, o.query, f.query_width / word, 1,
                                           o.key, f.k / word * NR, o.score, tile_columns,
                                           run.scale.stored, nullptr);
    }
}

template <bool PAIRS, into HOW>
void value_product_of(const forward_run& run, const forward_buffers& b, const forward_strip& s,
                      const stretch& part) {
    const forward_plan& f = run.plan;
    const strip_operands o = operands_of<PAIRS>(run, b, s, part);
    // A row of weights has as many words as one of scores, where its pairs begin.
    multiply_words<PAIRS, HOW>(s.padded, f.value_panels, part.end - part.begin, o.weight,
                               tile_columns, 1, o.value, f.keys / (PAIRS ? 2 : 1) * NR, o.out,
                               f.value_width, 1.0f, s.alpha);
}

template <bool PAIRS>
void value_product(const forward_run& run, const forward_buffers& b, const forward_strip& s) {
    value_product_of<PAIRS, into::rescale>(run, b, s, s.in.part[0]);
    for (int i = 1; i < s.in.parts; ++i)
        value_product_of<PAIRS, into::add>(run, b, s, s.in.part[i]);
}

// Marks the dead pairs of a strip whose tile has non-finite value rows: a score of -inf is a dead
// pair, which only such tiles must know.
inline void exclude_nonfinite(const forward_strip& s) {
    const tile_span& span = s.tile.span;
    for (int64_t c = 0; c < span.end - span.begin; ++c) {
        if (!s.tile.head.nonfinite[span.begin + c]) continue;
        for (int r = 0; r < s.rows; ++r)
            if (s.score[r * tile_columns + c] == -infinity)
                s.live.live[(s.first + r) * s.live.ld + c / 16] &=
                    static_cast<uint16_t>(~(1u << (c % 16)));
    }
}

// Adds the contributions of live pairs with value rows that were packed as 0, one by one.
template <bool PAIRS>
void add_nonfinite(const forward_run& run, const forward_buffers& b, const forward_strip& s) {
    const af_problem& p = *run.p;
    const tile_span& span = s.tile.span;
    const forward_job& job = s.tile.job;
    for (int64_t c = 0; c < span.end - span.begin; ++c) {
        if (!s.tile.head.nonfinite[span.begin + c]) continue;
        const int64_t kv_head = job.h / run.plan.group, key = span.begin + c;
        int64_t one = 1;
        const matrix value = key_rows(p, p.value, kv_dtype(p), job.b, kv_head, key, 0, &one);
        float scale = 1.0f;
        if (p.kv_storage) scale = *scales_of(p, p.value_scales, job.b, kv_head, key, 0).at;
        for (int r = 0; r < s.rows; ++r) {
            const uint16_t bits = s.live.live[(s.first + r) * s.live.ld + c / 16];
            if (!(bits >> (c % 16) & 1)) continue;
            float weight = s.score[r * tile_columns + c];
            if constexpr (PAIRS) {
                uint16_t half;
                memcpy(&half, reinterpret_cast<char*>(s.score) + (r * weight_ld + c) * 2, 2);
                const uint32_t word = uint32_t(half) << 16;
                memcpy(&weight, &word, 4);
            }
            add_row(value, 0, p.value_head_dim, weight * scale,
                    b.out + (s.first + r) * run.plan.value_width);
        }
    }
}

// Runs the score program on a strip whose scores are there, and the steps that must precede its
// softmax.
inline void modify_scores(const forward_run& run, const forward_buffers& b,
                          const forward_strip& s) {
    if (const af_program* score = run.p->score) {
        const forward_job& job = s.tile.job;
        const tile_span& span = s.tile.span;
        af_tile tile = tile_of(*run.p, job.b, job.h, job.q + s.first, span.begin, s.rows,
                               span.end - span.begin, b.scratch, b.error);
        tile.score = s.score;
        tile.ld = tile_columns;
        tile.live = s.in.all ? nullptr : s.live.live + s.first * s.live.ld;
        tile.live_ld = s.live.ld;
        run_program(score, tile);
    }
    if (s.tile.any_nonfinite) exclude_nonfinite(s);
}

// Runs the softmax of all rows; between(done, rows) is called after each row.
template <bool PAIRS, bool MASKED, class F>
AF_INLINE void softmax_strip(const forward_run& run, const forward_buffers& b,
                             const forward_strip& s, const F& between) {
    const vf factor = splat(run.scale.factor);
    for (int r = 0; r < s.rows; r += VL) {
        const int at = s.first + r, rows = s.rows - r < VL ? s.rows - r : VL;
        const softmax_tile tile = {s.score + r * tile_columns,
                                   tile_columns,
                                   reinterpret_cast<uint16_t*>(s.score) + r * weight_ld,
                                   weight_ld,
                                   s.live.live + at * s.live.ld,
                                   s.live.ld,
                                   s.in.part,
                                   s.in.parts,
                                   s.tile.any_nonfinite ? 0 : s.in.whole_steps};
        const softmax_state state = {b.state.row_max + at, b.state.row_sum + at * VL, s.alpha + r,
                                     b.state.nan + at};
        alignas(64) float bases[VL];
        update_row_max<MASKED>(rows, run.scale.factor, tile, state, bases);
        for (int i = 0; i < rows; ++i) {
            softmax_row<MASKED, PAIRS>(i, factor, tile, state, bases);
            between(r + i + 1, s.rows);
        }
    }
}

template <bool PAIRS, class F>
void softmax_of(const forward_run& run, const forward_buffers& b, const forward_strip& s,
                const F& between) {
    if (s.in.all && !s.tile.any_nonfinite)
        softmax_strip<PAIRS, false>(run, b, s, between);
    else
        softmax_strip<PAIRS, true>(run, b, s, between);
}

// Clears the dropped weights of a strip. Where value rows are non-finite, their pairs lose their
// live bits too.
template <bool PAIRS>
void drop_pairs(const forward_run& run, const forward_strip& s) {
    const af_problem& p = *run.p;
    if (!has_dropout(p)) return;
    const forward_job& job = s.tile.job;
    for (int r = 0; r < s.rows; ++r) {
        const row_keys row = keys_of_row(p, job.b, job.h, job.q + s.first + r);
        uint16_t* live = s.live.live + (s.first + r) * s.live.ld;
        for (int i = 0; i < s.in.parts; ++i)
            for (int64_t c = s.in.part[i].begin; c < s.in.part[i].end; c += 16) {
                const int64_t kv = s.tile.span.begin + c;
                uint16_t kept;
                if constexpr (PAIRS) {
                    kept = kept_bits(p, row, kv);
#if defined(__AVX512BF16__)
                    uint16_t* weight = reinterpret_cast<uint16_t*>(s.score) + r * weight_ld + c;
                    _mm256_storeu_epi16(weight, _mm256_maskz_loadu_epi16(kept, weight));
#endif
                } else {
                    kept = drop_weights(p, row, kv, s.score + r * tile_columns + c);
                }
                if (s.tile.any_nonfinite) live[c / 16] &= kept;
            }
    }
}

// Takes strips one after the other.
template <bool PAIRS>
class strips_in_turn {
   public:
    strips_in_turn(const forward_run& run, const forward_buffers& b) : run_(run), b_(b) {}
    const live_tile& free_live() const { return b_.live[0]; }

    void take(const forward_tile& t, int first, const live_tile& live) {
        forward_strip s;
        if (!begin_strip<PAIRS>(t, first, live, &s)) return;
        s.score = b_.score[0];
        s.alpha = b_.alpha[0];
        score_product<PAIRS>(run_, b_, s);
        modify_scores(run_, b_, s);
        softmax_of<PAIRS>(run_, b_, s, [](int, int) {});
        drop_pairs<PAIRS>(run_, s);
        value_product<PAIRS>(run_, b_, s);
        if (t.any_nonfinite) add_nonfinite<PAIRS>(run_, b_, s);
    }
    void finish() {}

   private:
    const forward_run& run_;
    const forward_buffers& b_;
};

#if defined(__AMX_BF16__)

// While a strip's softmax runs on vectors, tiles compute the value product of the strip before it
// and then the scores of the strip after it, which may have the same buffer.
class strips_overlapped {
   public:
    strips_overlapped(const forward_run& run, const forward_buffers& b) : run_(run), b_(b) {}

    // Live bits of the strip in flight stay where they are.
    const live_tile& free_live() const {
        return b_.live[scored_ && ring_[current_].live.live == b_.live[0].live ? 1 : 0];
    }

    void take(const forward_tile& t, int first, const live_tile& live) {
        forward_strip& s = ring_[(current_ + 1) % 3];
        if (!begin_strip<true>(t, first, live, &s)) return;
        buffer_ = 1 - buffer_;
        s.score = b_.score[buffer_];
        s.alpha = b_.alpha[buffer_];
        queue_.clear();
        if (weighted_) push_values(ring_[(current_ + 2) % 3]);
        push_scores(s);
        weighted_ = false;
        if (scored_)
            softmax(ring_[current_]);
        else
            queue_.drain();
        scored_ = true;
        current_ = (current_ + 1) % 3;
    }

    void finish() {
        if (!scored_) return;
        queue_.clear();
        if (weighted_) push_values(ring_[(current_ + 2) % 3]);
        weighted_ = false;
        softmax(ring_[current_]);
        if (!weighted_) return;
        queue_.clear();
        push_values(ring_[current_]);
        queue_.drain();
    }

   private:
    void push_scores(const forward_strip& s) {
        const forward_plan& f = run_.plan;
        for (int i = 0; i < s.in.parts; ++i) {
            const strip_operands o = operands_of<true>(run_, b_, s, s.in.part[i]);
            queue_.push({static_cast<const uint16_t*>(o.query), static_cast<const uint32_t*>(o.key),
                         o.score, nullptr, f.query_width / 2, f.k / 2 * NR, tile_columns,
                         static_cast<int32_t>((s.in.part[i].end - s.in.part[i].begin) / NR),
                         static_cast<int32_t>(f.k / 32), s.padded / 16, into::store,
                         run_.scale.stored});
        }
    }
    void push_values(const forward_strip& s) {
        const forward_plan& f = run_.plan;
        for (int i = 0; i < s.in.parts; ++i) {
            const strip_operands o = operands_of<true>(run_, b_, s, s.in.part[i]);
            queue_.push({static_cast<const uint16_t*>(o.weight),
                         static_cast<const uint32_t*>(o.value), o.out, s.alpha, weight_ld / 2,
                         f.keys / 2 * NR, f.value_width, static_cast<int32_t>(f.value_panels),
                         (s.in.part[i].end - s.in.part[i].begin) / 32, s.padded / 16,
                         i == 0 ? into::rescale : into::add, 1.0f});
        }
    }

    // The softmax of a strip, the queue's steps spread over it.
    void softmax(const forward_strip& s) {
        modify_scores(run_, b_, s);
        softmax_of<true>(run_, b_, s, [&](int done, int rows) AF_FLAT { queue_.keep_up(done, rows); });
        drop_pairs<true>(run_, s);
        queue_.drain();
        weighted_ = true;
        if (!s.tile.any_nonfinite) return;
        value_product<true>(run_, b_, s);
        add_nonfinite<true>(run_, b_, s);
        weighted_ = false;
    }

    const forward_run& run_;
    const forward_buffers& b_;
    tile_queue queue_;
    forward_strip ring_[3];
    int current_ = 0, buffer_ = 0;
    bool scored_ = false;    // ring_[current_] has scores
    bool weighted_ = false;  // the strip before it has weights whose product is to come
};

#endif

}  // namespace
}  // namespace AF_LEVEL
