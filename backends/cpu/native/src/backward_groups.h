// One tile of the backward pass: its groups of rows in turn, then dV and dK.
#pragma once
#include "backward_tile.h"

namespace AF_LEVEL {

// dV^T += dout^T P and dK^T += q^T dS, for each panel over the rows that are live there.
template <bool PAIRS> static void add_kv_gradients(const tile_place& at, const tile_buffers& t) {
    const backward_plan& plan = *at.plan;
    const af_problem& p = at.args->problem;
    constexpr int64_t word = PAIRS ? 2 : 1;
    constexpr int64_t panel = q_tile_rows / word * NR;
    const tile_liveness& live = t.living;
    const auto rows_of = [&](int64_t c, int64_t* from, int64_t* to) {
        *from = *to = 0;
        for (int64_t g = 0; g < q_tile_rows / group; ++g) {
            if (c < live.begin[g] || c >= live.end[g]) continue;
            if (*from == *to) *from = g * group;
            *to = (g + 1) * group;
        }
    };
    int64_t c = 0;
    while (c < t.kv_rows) {
        int64_t from, to, next_from = 0, next_to = 0;
        rows_of(c, &from, &to);
        int64_t end = c + group;
        for (; end < t.kv_rows; end += group) {
            rows_of(end, &next_from, &next_to);
            if (next_from != from || next_to != to) break;
        }
        if (from < to) {
            const int64_t panels = (end - c) / NR, at_panel = c / NR * panel + from / word * NR;
            // Transposed left sides: pairs have their own, floats are read by columns.
            const int64_t a_row = PAIRS ? q_tile_rows / 2 : 1;
            const uint32_t* dout = PAIRS ? at.operands.dout_t + from / 2
                                         : at.operands.dout + from * plan.value_dim;
            const uint32_t* query = PAIRS ? at.operands.query_t + from / 2
                                          : at.operands.query + from * plan.head_dim;
            if (plan.wants_dv)
                multiply_rows<PAIRS, into::add>(p.value_head_dim, panels, to - from, dout, a_row,
                                                plan.value_dim, t.prob + at_panel, panel,
                                                t.dv + c, t.kv_rows);
            if (plan.wants_dk)
                multiply_rows<PAIRS, into::add>(p.head_dim, panels, to - from, query, a_row,
                                                plan.head_dim, t.dscore + at_panel, panel,
                                                t.dk + c, t.kv_rows);
        }
        c = end;
    }
}

template <bool PAIRS> static void backward_tile(const tile_place& at, const tile_buffers& t) {
    const backward_plan& plan = *at.plan;
    const af_problem& p = at.args->problem;
    const tile_liveness& live = t.living;
    if (!live.any) return;
    const bool nonfinite_q = *at.operands.nonfinite_queries + *at.operands.nonfinite_douts != 0;
    const bool nonfinite = nonfinite_q || t.kv.nonfinite_keys != 0;
    constexpr int64_t word = PAIRS ? 2 : 1;
    const int64_t value_k = PAIRS ? plan.value_dim : p.value_head_dim;
    const int64_t groups = ceil_div(at.rows, group);
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t first = g * group, from = live.begin[g], to = live.end[g];
        const int64_t query_words = plan.head_dim / word, dout_words = plan.value_dim / word;
        clear_operands<PAIRS>(t, first, 0, from);
        clear_operands<PAIRS>(t, first, to, t.kv_rows);
        float* dq = at.dq ? at.dq + first * plan.head_dim : nullptr;
        if (from == to) {
            if (dq && at.dq_is_new) memset(dq, 0, group * plan.head_dim * 4);
            continue;
        }
        pieces_ahead ahead;
        if (dq) ahead.add(dq, group * plan.head_dim * 4);
        if (g + 1 < groups) {
            const int64_t next = first + group;
            ahead.add(at.operands.query + next * query_words, group * query_words * 4);
            ahead.add(at.operands.dout + next * dout_words, group * dout_words * 4);
        }
        if (PAIRS && has_tiles) ahead.rest();
        for (int64_t c = from; c < to; c += t.strip) {
            const int64_t end = smaller(c + t.strip, to), panels = (end - c) / NR;
            score_product<PAIRS>(at, t, first, c, end, ahead);
            multiply_rows<PAIRS, into::store>(
                group, panels, value_k, at.operands.dout + first * dout_words, dout_words, 1,
                t.kv.value_t + c * (value_k / word),
                value_k / word * NR, t.grad, t.strip, ahead);
            if (nonfinite_q) nonfinite_rows(at).products(at, t, first, c, end);
            apply_mods<PAIRS>(at, t, first, c, end);
        }
        ahead.rest();
        if (dq) {
            const void* ds = PAIRS ? static_cast<void*>(t.grad_rows + from) : t.grad;
            const auto multiply = at.dq_is_new ? multiply_rows<PAIRS, into::store, panel_ahead>
                                               : multiply_rows<PAIRS, into::add, panel_ahead>;
            multiply(group, ceil_div(p.head_dim, NR), to - from, static_cast<const uint32_t*>(ds),
                     PAIRS ? t.kv_rows / 2 : t.strip, 1, t.kv.key + from / word * NR,
                     t.kv_rows / word * NR, dq, plan.head_dim, panel_ahead());
        }
        if (nonfinite) nonfinite_rows(at).sums<PAIRS>(at, t, first);
    }
    if (plan.wants_dk || plan.wants_dv) add_kv_gradients<PAIRS>(at, t);
}

}  // namespace AF_LEVEL
