// Operands that the backward pass packs (rows of a q tile, rows of a kv tile), and the gradients
// that it writes back.
#pragma once
#include "backward_plan.h"
#include "score_base.h"

namespace AF_LEVEL {

constexpr float log2_e = 1.4426950408889634f;

AF_INLINE float element(const matrix& m, int64_t r, int64_t c) { return fetch(m, r, c, 1)[0]; }

// sum(a[r] * b[r]) over n columns.
inline float row_product(const matrix& a, int64_t ar, const matrix& b, int64_t br, int64_t n) {
    vf sum = {};
    for (int64_t c = 0; c < n; c += VL)
        sum = madd(fetch(a, ar, c, n - c), fetch(b, br, c, n - c), sum);
    return sum_of(sum);
}

inline bool row_is_finite(const matrix& m, int64_t r, int64_t n) {
    vu nonfinite = {};
    for (int64_t c = 0; c < n; c += VL) {
        const vf x = fetch(m, r, c, n - c);
        nonfinite |= as_uint(x - x);
    }
    return !any_bit(nonfinite);
}

// to[c][r / 2] = the bf16 from[r][c] and from[r + 1][c] in one word.
inline void transpose_pairs(const uint16_t* from, int64_t columns, uint32_t* to) {
    for (int64_t c = 0; c < columns; c += VL)
        for (int64_t j = 0; j < q_tile_rows / 2; j += VL) {
            vu block[VL];
            for (int i = 0; i < VL; ++i) {
                const uint16_t* pair = from + 2 * (j + i) * columns + c;
                block[i] = __builtin_convertvector(load(pair), vu) |
                           (__builtin_convertvector(load(pair + columns), vu) << 16);
            }
            transpose(block);
            for (int i = 0; i < VL; ++i) store(to + (c + i) * (q_tile_rows / 2) + j, block[i]);
        }
}

// One side of a q tile: rows without those that are dead or non-finite, and the transposed rows.
inline void pack_q_side(const backward_plan& plan, const matrix& m, int64_t rows, int64_t dim,
                        int64_t dim_padded, const uint8_t* dead, uint8_t* nonfinite,
                        int64_t* nonfinite_rows,
                        uint32_t* packed, uint32_t* transposed) {
    if (plan.pairs)
        copy_rows_pairs(m, rows, q_tile_rows, dim, dim_padded,
                        reinterpret_cast<uint16_t*>(packed));
    else
        copy_rows(m, rows, q_tile_rows, dim, dim_padded, reinterpret_cast<float*>(packed));
    const int64_t words = dim_padded / plan.word;
    *nonfinite_rows = 0;
    for (int64_t r = 0; r < q_tile_rows; ++r) {
        nonfinite[r] = !dead[r] && !row_is_finite(m, r, dim);
        *nonfinite_rows += nonfinite[r];
        if (dead[r] || nonfinite[r]) memset(packed + r * words, 0, words * 4);
    }
    if (plan.pairs)
        transpose_pairs(reinterpret_cast<const uint16_t*>(packed), dim_padded, transposed);
}

// Smallest natural lse that is too coarse for the weights of its row: see backward_row_sums.h.
// Products of bf16 round weights to 8 bits themselves, so their limit is higher.
constexpr float large_lse = 16.0f, large_lse_of_pairs = 16384.0f;

inline bool is_large(const backward_plan& plan, float lse, float row_max) {
    const float size = __builtin_fabsf(lse);
    return size >= (plan.pairs ? large_lse_of_pairs : large_lse) && row_max - row_max == 0.0f;
}

// The product, or modified score, that scales to the lse of a row.
inline float row_max_of_lse(const af_problem& p, float lse) {
    return p.score ? lse : static_cast<float>(lse / p.scale);
}

// Packs rows [first, first + q_tile_rows) of query head h.
inline void pack_q_tile(const af_backward_args& args, const backward_plan& plan, int64_t b,
                        int64_t h, int64_t first, const q_tile& tile) {
    const af_problem& p = args.problem;
    const int64_t rows = smaller(p.q_length - first, q_tile_rows);
    const int64_t at = (b * p.q_heads + h) * p.q_length + first;
    const int64_t ev = p.value_head_dim;
    const matrix query = matrix_of(p.query, p.dtype, b, h, first);
    const matrix dout = matrix_of(args.dout, p.dtype, b, h, first);
    const matrix out = args.unrounded_out ? matrix{args.unrounded_out + at * ev, ev, 1, AF_F32}
                                          : matrix_of(args.out, p.dtype, b, h, first);
    *tile.dead_rows = 0;
    *tile.large_rows = 0;
    for (int64_t r = 0; r < q_tile_rows; ++r) {
        const bool dead = r >= rows || args.lse[at + r] == -__builtin_inff();
        tile.dead[r] = dead;
        *tile.dead_rows += dead;
        const float lse = dead ? 0.0f : args.lse[at + r], row_max = row_max_of_lse(p, lse);
        tile.large[r] = !dead && is_large(plan, lse, row_max);
        *tile.large_rows += tile.large[r];
        tile.lse[r] = 0;
        tile.row_max[r] = 0;
        tile.delta[r] = 0;
        if (dead) continue;
        tile.lse[r] = lse * log2_e;
        if (tile.large[r]) {
            tile.row_max[r] = row_max;
            const double product = p.score ? double(row_max) : row_max * p.scale;
            tile.lse[r] = static_cast<float>((lse - product) * 1.4426950408889634);
        }
        tile.delta[r] = args.delta ? args.delta[at + r] : row_product(out, r, dout, r, ev);
        if (args.dlse) tile.delta[r] -= args.dlse[at + r];
    }
    pack_q_side(plan, query, rows, p.head_dim, plan.head_dim, tile.dead, tile.nonfinite_query,
                tile.nonfinite_queries, tile.query, tile.query_t);
    pack_q_side(plan, dout, rows, ev, plan.value_dim, tile.dead, tile.nonfinite_dout,
                tile.nonfinite_douts, tile.dout, tile.dout_t);
    if (plan.pairs) return;
    // lse in powers of two was rounded again, so all weights of a row are off by one factor. dout
    // and delta, which the weights multiply, take the factor in. Products of bf16 are too coarse
    // to show it.
    for (int64_t r = 0; r < rows; ++r) {
        if (tile.dead[r] || tile.large[r] || tile.lse[r] - tile.lse[r] != 0) continue;
        const double exact = args.lse[at + r] * 1.4426950408889634;
        const float factor = static_cast<float>(1 - (exact - tile.lse[r]) * 0.6931471805599453);
        tile.delta[r] *= factor;
        float* row = reinterpret_cast<float*>(tile.dout) + r * plan.value_dim;
        for (int64_t e = 0; e < plan.value_dim; ++e) row[e] *= factor;
    }
}

// Operands of a kv tile: panels of NR columns, as gemm.h wants them.
struct kv_operands {
    uint32_t* key_t;    // [kv_rows / NR][head_dim / word][NR]: right side of the scores
    uint32_t* value_t;  // [kv_rows / NR][value_dim / word][NR]: right side of dP
    uint32_t* key;      // [head_dim / NR][kv_rows / word][NR]: right side of dQ
    uint8_t* nonfinite_key;  // [kv_rows] NaN or infinity in k: 0 in `key`
    int64_t nonfinite_keys;
};

inline kv_operands take_kv_operands(arena& memory, const backward_plan& plan) {
    kv_operands kv;
    const int64_t rows = plan.kv_rows / plan.word;
    kv.key_t = memory.take<uint32_t>(rows * plan.head_dim);
    kv.value_t = memory.take<uint32_t>(rows * plan.value_dim);
    kv.key = memory.take<uint32_t>(rows * plan.head_dim);
    kv.nonfinite_key = memory.take<uint8_t>(plan.kv_rows);
    kv.nonfinite_keys = 0;
    return kv;
}

inline void pack_keys_transposed(const af_problem& p, const backward_plan& plan, const matrix& key,
                                 int64_t rows, const kv_operands& kv) {
    if (plan.pairs)
        pack_transposed_pairs(key, rows, p.head_dim, plan.head_dim, plan.kv_rows, kv.key_t);
    else
        pack_transposed(key, rows, p.head_dim, plan.kv_rows, reinterpret_cast<float*>(kv.key_t));
}

inline void pack_kv_tile(const af_problem& p, const backward_plan& plan, const matrix& key,
                         const matrix& value, int64_t rows, kv_operands& kv) {
    const int64_t e = p.head_dim, ev = p.value_head_dim;
    pack_keys_transposed(p, plan, key, rows, kv);
    if (plan.pairs) {
        pack_transposed_pairs(value, rows, ev, plan.value_dim, plan.kv_rows, kv.value_t);
        kv.nonfinite_keys = pack_straight_pairs(key, rows, plan.kv_rows, e, kv.key,
                                                plan.kv_rows / 2 * NR, kv.nonfinite_key);
    } else {
        pack_transposed(value, rows, ev, plan.kv_rows, reinterpret_cast<float*>(kv.value_t));
        kv.nonfinite_keys =
            pack_straight(key, rows, plan.kv_rows, e, reinterpret_cast<float*>(kv.key),
                          plan.kv_rows * NR, kv.nonfinite_key);
    }
}

// n floats times `factor` to a row of a tensor of any strides.
inline void write_row(const float* from, int64_t n, float factor, const af_tensor& tensor,
                      int32_t dtype, int64_t b, int64_t h, int64_t row) {
    const matrix m = matrix_of(tensor, dtype, b, h, row);
    if (m.col == 1) {
        store_row(from, n, factor, dtype, const_cast<void*>(m.data));
        return;
    }
    for (int64_t c = 0; c < n; ++c)
        store_row(from + c, 1, factor, dtype, const_cast<char*>(address(m, 0, c)));
}

// dk or dv of a kv tile from its transposed sums [dim_padded][kv_rows]. `spare` holds
// 16 rows of dim_padded floats.
inline void write_kv_rows(const backward_plan& plan, const float* sums, int64_t dim,
                          int64_t dim_padded, float factor, const af_tensor& tensor, int32_t dtype,
                          int64_t b, int64_t h, int64_t first, int64_t rows, float* spare) {
    for (int64_t r = 0; r < rows; r += VL) {
        for (int64_t c = 0; c < dim_padded; c += VL) {
            vu block[VL];
            for (int i = 0; i < VL; ++i)
                block[i] = as_uint(load(sums + (c + i) * plan.kv_rows + r));
            transpose(block);
            for (int i = 0; i < VL; ++i) store(spare + i * dim_padded + c, as_float(block[i]));
        }
        for (int64_t i = 0; i < VL && r + i < rows; ++i)
            write_row(spare + i * dim_padded, dim, factor, tensor, dtype, b, h, first + r + i);
    }
}

}  // namespace AF_LEVEL
