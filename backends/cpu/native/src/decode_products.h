// The two products of decoding, on vectors: few rows against keys and values as they lie in
// memory, for all widths and strides.
//
// Each element of K and V is read once and used for up to four rows while it is in a register;
// nothing is packed, because packing would write as much as decoding reads.
#pragma once
#include "pack.h"
#include "softmax.h"
#include "tiles.h"

namespace AF_LEVEL {

template <int N>
struct count_of {
    static constexpr int value = N;
};

// Calls f(count_of<R>(), r) for all rows, at most MOST of them at a time.
template <int MOST, class F>
AF_INLINE void in_groups_of_rows(int rows, const F& f) {
    int r = 0;
    for (; r + MOST <= rows; r += MOST) f(count_of<MOST>(), r);
    if (MOST == 4 && r + 2 <= rows) {
        f(count_of<2>(), r);
        r += 2;
    }
    if (r < rows) f(count_of<1>(), r);
}

#if defined(__AVX512F__)
// Interleaves the sums of the even and of the odd elements in two vectors of a row, as the row has
// them.
AF_INLINE void interleave(vf even, vf odd, vf* to) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    to[0] = _mm512_permutex2var_ps(even, first, odd);
    to[1] = _mm512_permutex2var_ps(even, second, odd);
}
#endif

// The query rows of a unit, copied: floats, or bf16 pairs where the level multiplies them and
// every key row has its elements beside one another.
struct decode_query {
    const float* row;
    const uint16_t* pairs;  // NULL: floats
    const uint32_t* tiles;  // [panels of rows][width / 2][NR], NULL: the level has no tiles, or
                            // a key row isn't a whole number of them
    int64_t width;          // elements a row, a multiple of 2 * VL
};

// R rows times VL / R keys at k: VL vectors of partial sums, which one reduction across lanes ends.
template <int R, int DTYPE>
AF_INLINE void dot_floats(const decode_query& q, int row, const column_rows& key,
                          const char* const (&k)[VL / R], int64_t dim, float scale, float* sums) {
    constexpr int K = VL / R;
    vf acc[VL] = {};
    const float* a = q.row + row * q.width;
    constexpr int size = element_bytes(DTYPE);
    int64_t d = 0;
    if (key.col == 1)
        for (; d + VL <= dim; d += VL) {
            // Loaded once: the compiler makes memory operands of them, one a key.
            vf y[R];
            AF_UNROLL
            for (int r = 0; r < R; ++r) {
                y[r] = load(a + r * q.width + d);
                in_register(y[r]);
            }
            AF_UNROLL
            for (int i = 0; i < K; ++i) {
                const vf x = as_floats(k[i] + d * size, DTYPE);
                AF_UNROLL
                for (int r = 0; r < R; ++r) acc[r * K + i] = madd(x, y[r], acc[r * K + i]);
            }
        }
    // Unrolled, so that no index of the sums is a variable: they would be in memory.
    for (; d < dim; d += VL)
        AF_UNROLL
        for (int i = 0; i < K; ++i) {
            const vf x = fetch({k[i], key.row, key.col, DTYPE}, 0, d, dim - d);
            AF_UNROLL
            for (int r = 0; r < R; ++r)
                acc[r * K + i] = madd(x, load(a + r * q.width + d), acc[r * K + i]);
        }
    store(sums, across<true>(acc) * scale);
}

#if defined(__AVX512BF16__)
template <int R>
AF_INLINE void dot_pairs(const decode_query& q, int row, const column_rows& key,
                         const char* const (&k)[VL / R], int64_t dim, float scale, float* sums) {
    constexpr int K = VL / R;
    vf acc[VL] = {};
    const uint16_t* a = q.pairs + row * q.width;
    const auto step = [&](int64_t d, const vu (&x)[K]) {
        AF_UNROLL
        for (int r = 0; r < R; ++r) {
            const __m512bh y = reinterpret_cast<__m512bh>(_mm512_loadu_si512(a + r * q.width + d));
            AF_UNROLL
            for (int i = 0; i < K; ++i)
                acc[r * K + i] = _mm512_dpbf16_ps(acc[r * K + i],
                                                  reinterpret_cast<__m512bh>(x[i]), y);
        }
    };
    int64_t d = 0;
    vu x[K];
    for (; d + 2 * VL <= dim; d += 2 * VL) {
        AF_UNROLL
        for (int i = 0; i < K; ++i) memcpy(&x[i], k[i] + d * 2, sizeof x[i]);
        step(d, x);
    }
    if (d < dim) {
        for (int i = 0; i < K; ++i) x[i] = fetch_pairs({k[i], key.row, key.col, AF_BF16}, 0, d, dim - d);
        step(d, x);
    }
    store(sums, across<true>(acc) * scale);
}
#endif

// Number of streams that keys and values are read as, a quarter of the columns each. One stream
// keeps too few lines in flight to fill the memory's bandwidth, because hardware prefetching ends
// at page boundaries.
constexpr int streams = 4;

// Rows that are read after the columns at hand, of the same number: values after their keys, the
// next keys after those. Each row that is read prefetches its counterpart here into L2, which
// holds both: no line comes late, and none is prefetched twice.
struct rows_ahead {
    column_rows rows;
    int64_t bytes;  // of a row

    AF_INLINE_MEMBER void fetch(int64_t column) const { prefetch_rows(rows.at(column), bytes); }
};

inline rows_ahead rows_ahead_of(const column_rows& rows, int64_t dim) {
    return {rows, dim * element_bytes(rows.dtype)};
}

// Columns of a turn, which all query rows take while they are in L1. The last is repeated up to a
// whole vector.
template <int EACH>
struct turn_of_columns {
    static constexpr int64_t most = streams * EACH;
    static_assert(most % VL == 0, "whole vectors");
    int64_t column[most];
    int64_t count;
};

// Calls f(turn) for columns [begin, end), EACH of every stream a turn. A remainder that doesn't
// divide is one stream.
template <int EACH, class F>
AF_INLINE void in_turns(int64_t begin, int64_t end, const F& f) {
    turn_of_columns<EACH> turn;
    constexpr int64_t most = turn_of_columns<EACH>::most;
    const int64_t whole = (end - begin) % most == 0 ? (end - begin) / streams : 0;
    for (int64_t c = begin; c < begin + whole; c += EACH) {
        for (int64_t i = 0; i < most; ++i) turn.column[i] = c + i / streams + i % streams * whole;
        turn.count = most;
        f(turn);
    }
    for (int64_t c = whole > 0 ? end : begin; c < end; c += most) {
        turn.count = smaller(most, end - c);
        for (int64_t i = 0; i < most; ++i) turn.column[i] = c + smaller(i, turn.count - 1);
        f(turn);
    }
}

// score[r][c] = scale * (q row r . key c) for R rows from `row` on and the columns of a turn, whose
// keys are at k.
template <int R, int DTYPE, int EACH>
static void score_rows(const decode_query& q, int row, const column_rows& key,
                       const char* const* k, int64_t dim, const rows_ahead& next,
                       const turn_of_columns<EACH>& turn, float scale, float* score, int64_t ld) {
    constexpr int K = VL / R;
    for (int64_t c = 0; c < turn.count; c += K) {
        const char* keys[K];
        for (int i = 0; i < K; ++i) {
            keys[i] = k[c + i];
            if (row == 0) next.fetch(turn.column[c + i]);
        }
        alignas(64) float sums[VL];
#if defined(__AVX512BF16__)
        if (DTYPE == AF_BF16 && q.pairs)
            dot_pairs<R>(q, row, key, keys, dim, scale, sums);
        else
#endif
            dot_floats<R, DTYPE>(q, row, key, keys, dim, scale, sums);
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < K; ++i)
                score[(row + r) * ld + turn.column[c + i]] = sums[r * K + i];
    }
}

// Scores of all rows.
template <int DTYPE>
static void decode_scores(const decode_query& q, int rows, const column_rows& key, int64_t dim,
                          const rows_ahead& next, int64_t begin, int64_t end, float scale,
                          float* score, int64_t ld) {
    in_turns<8>(begin, end, [&](const turn_of_columns<8>& turn) {
        const char* k[turn_of_columns<8>::most];
        for (int i = 0; i < turn.most; ++i) k[i] = key.at(turn.column[i]);
        in_groups_of_rows<4>(rows, [&](auto count, int r) AF_FLAT {
            score_rows<decltype(count)::value, DTYPE>(q, r, key, k, dim, next, turn, scale, score,
                                                      ld);
        });
    });
}

// out[R][N * VL] += weight[c][R] * value[c][N * VL] from element `d` on, over a turn's columns,
// whose values are at v.
template <int R, int N, int DTYPE>
AF_INLINE void value_block(const float* weight, const char* const* v, int64_t count, int64_t d,
                           float* out, int64_t width) {
    constexpr int size = element_bytes(DTYPE);
    // Starts from 0: one sum through all keys would lose more.
    vf acc[R][N] = {};
    for (int64_t c = 0; c < count; ++c) {
        const char* at = v[c] + d * size;
        vf x[N];
        AF_UNROLL
        for (int j = 0; j < N; ++j) x[j] = as_floats(at + j * VL * size, DTYPE);
        AF_UNROLL
        for (int r = 0; r < R; ++r) {
            const vf w = splat(weight[c * R + r]);
            AF_UNROLL
            for (int j = 0; j < N; ++j) acc[r][j] = madd(w, x[j], acc[r][j]);
        }
    }
    AF_UNROLL
    for (int r = 0; r < R; ++r)
        AF_UNROLL
        for (int j = 0; j < N; ++j) {
            float* to = out + r * width + j * VL;
            store(to, load(to) + acc[r][j]);
        }
}

// The same for all elements, and rows of weights. `next` may be NULL.
template <int R, int DTYPE, int EACH>
static void value_rows(const float* weight, int64_t ld, const column_rows& value,
                       const char* const* v, const rows_ahead* next,
                       const turn_of_columns<EACH>& turn, int64_t dim, float* out, int64_t width) {
    constexpr int N = VL == 16 ? 4 : 2;
    float weights[turn_of_columns<EACH>::most * R];
    for (int64_t c = 0; c < turn.count; ++c) {
        if (next) next->fetch(turn.column[c]);
        for (int r = 0; r < R; ++r) weights[c * R + r] = weight[r * ld + turn.column[c]];
    }
    int64_t d = 0;
    if (value.col == 1) {
        for (; d + N * VL <= dim; d += N * VL)
            value_block<R, N, DTYPE>(weights, v, turn.count, d, out + d, width);
        for (; d + VL <= dim; d += VL)
            value_block<R, 1, DTYPE>(weights, v, turn.count, d, out + d, width);
    }
    for (; d < dim; d += VL)
        for (int64_t c = 0; c < turn.count; ++c) {
            const vf x = fetch({v[c], value.row, value.col, DTYPE}, 0, d, dim - d);
            for (int r = 0; r < R; ++r) {
                float* to = out + r * width + d;
                store(to, madd(splat(weights[c * R + r]), x, load(to)));
            }
        }
}

// out[row][width] += weight[row][c] * value[c] for columns [begin, end).
template <int DTYPE>
static void decode_values(const float* weight, int64_t ld, int rows, const column_rows& value,
                          int64_t dim, const rows_ahead& next, int64_t begin, int64_t end,
                          float* out, int64_t width) {
    in_turns<4>(begin, end, [&](const turn_of_columns<4>& turn) {
        const char* v[turn_of_columns<4>::most];
        for (int i = 0; i < turn.most; ++i) v[i] = value.at(turn.column[i]);
        in_groups_of_rows<4>(rows, [&](auto count, int r) AF_FLAT {
            value_rows<decltype(count)::value, DTYPE>(weight + r * ld, ld, value, v,
                                                      r == 0 ? &next : nullptr, turn, dim,
                                                      out + r * width, width);
        });
    });
}

}  // namespace AF_LEVEL
