// The two products of decoding on vectors of 512 bits, for keys and values of usual widths: whole
// rows are read one after the other.
//
// Code that reads so, without a loop inside of a row, and asks for nothing ahead (but for rows
// apart) is what prefetching of an AMD Zen 4 follows best: lines of several rows in turns, half
// rows, or a line a turn of a loop are read half as fast, and instructions that ask for lines wait
// for one another. Intel's Sapphire Rapids reads streams, with lines asked for, 1.1 times as fast.
// A Zen 5 follows it too, but of float32 keys, whose products leave it idle while the later rows of
// queries take keys out of the first cache: there they ask for the next turn's.
#pragma once
#include "decode_products.h"
#include "level.h"

#if defined(__AVX512F__)
namespace AF_LEVEL {

// All rows of queries take these columns, which are in the first cache from then on.
constexpr int64_t turn_in_order = 16;

// How many of columns [begin, end) are read so, a multiple of a turn's; the others are for streams.
// Rows of these widths that don't lie beside one another are no streams: every processor reads them
// so.
AF_INLINE int64_t columns_in_order(const matrix& m, int64_t dim, int64_t begin, int64_t end) {
    const bool usual = m.col == 1 && (dim == 64 || dim == 96 || dim == 128);
    if (!usual || (m.row == dim && !af_reads_best_in_order())) return 0;
    return (end - begin) / turn_in_order * turn_in_order;
}

// f(count_of<dim>()) for a width that columns_in_order takes.
template <class F>
AF_INLINE void with_width(int64_t dim, const F& f) {
    if (dim == 128) return f(count_of<128>());
    if (dim == 96) return f(count_of<96>());
    f(count_of<64>());
}

// Where one is in rows of DIM elements. Rows of queries and of sums, which are padded to whole
// vectors and pairs, are as wide.
template <int DTYPE, int DIM>
struct row_in_order {
    static_assert(DIM % (2 * VL) == 0 && turn_in_order % VL == 0, "whole vectors and groups");
    static constexpr int size = DTYPE == AF_F32 ? 4 : 2;
    const char* at;
    int64_t step;  // bytes to the next row

    // The row of column c. Rows that don't lie beside one another, which nothing else foresees, are
    // asked for a turn ahead.
    AF_INLINE_MEMBER static row_in_order of(const matrix& m, int64_t c, int64_t end) {
        if (m.row != DIM)
            for (int64_t i = c + turn_in_order; i < smaller(c + 2 * turn_in_order, end); ++i)
                prefetch_rows(address(m, i, 0), DIM * size);
        return {address(m, c, 0), m.row * size};
    }
    // The compiler is kept from knowing where this is, so it can't move what is read from here on
    // up among earlier lines: gcc does, and then lines of a few rows are read in turns.
    AF_INLINE_MEMBER void move(int64_t bytes) {
        at += bytes;
        __asm__ volatile("" : "+r"(at));
    }
    AF_INLINE_MEMBER void next_row() { move(step - DIM * size); }
};

// R rows of queries times VL / R keys: VL vectors of partial sums, which one reduction across lanes
// ends. Query rows are in registers, if they have room, so that what waits to be read is keys: a
// query row read for each key would fill the queue of loads, and memory be asked for a few keys at
// a time.
// AHEAD: asks for the same lines of the next turn, of rows beside one another.
template <int R, bool AHEAD, int DTYPE, int DIM>
AF_INLINE vf dot_in_order(const decode_query& q, int row, row_in_order<DTYPE, DIM>& key) {
    constexpr int K = VL / R;
    vf acc[VL] = {};
#if defined(__AVX512BF16__)
    if (DTYPE == AF_BF16 && q.pairs) {
        constexpr int steps = DIM / (2 * VL);
        __m512bh y[R][steps];
        AF_UNROLL
        for (int r = 0; r < R; ++r)
            AF_UNROLL
            for (int d = 0; d < steps; ++d)
                y[r][d] = reinterpret_cast<__m512bh>(
                    _mm512_loadu_si512(q.pairs + (row + r) * DIM + d * 2 * VL));
        AF_UNROLL
        for (int i = 0; i < K; ++i, key.next_row())
            AF_UNROLL
            for (int d = 0; d < steps; ++d, key.move(64)) {
                const __m512bh x = reinterpret_cast<__m512bh>(_mm512_loadu_si512(key.at));
                AF_UNROLL
                for (int r = 0; r < R; ++r)
                    acc[r * K + i] = _mm512_dpbf16_ps(acc[r * K + i], x, y[r][d]);
            }
        return across<true>(acc);
    }
#endif
    const float* a = q.row + row * DIM;
    constexpr int steps = DIM / VL;
    if constexpr (DTYPE == AF_F32 && R * steps <= VL) {
        vf y[R][steps];
        AF_UNROLL
        for (int r = 0; r < R; ++r)
            AF_UNROLL
            for (int d = 0; d < steps; ++d) {
                y[r][d] = load(a + r * DIM + d * VL);
                __asm__("" : "+v"(y[r][d]));  // not in memory, of which it may be an operand
            }
        AF_UNROLL
        for (int i = 0; i < K; ++i, key.next_row())
            AF_UNROLL
            for (int d = 0; d < steps; ++d, key.move(64)) {
                if (AHEAD) __builtin_prefetch(key.at + turn_in_order * DIM * key.size, 0, 3);
                const vf x = as_floats_of<DTYPE>(key.at);
                AF_UNROLL
                for (int r = 0; r < R; ++r)
                    acc[r * K + i] = madd(x, y[r][d], acc[r * K + i]);
            }
        return across<true>(acc);
    }
    AF_UNROLL
    for (int i = 0; i < K; ++i, key.next_row())
        AF_UNROLL
        for (int d = 0; d < DIM; d += VL, key.move(VL * key.size)) {
            const vf x = as_floats_of<DTYPE>(key.at);
            AF_UNROLL
            for (int r = 0; r < R; ++r)
                acc[r * K + i] = madd(x, load(a + r * DIM + d), acc[r * K + i]);
        }
    return across<true>(acc);
}

// score[row][c] = scale * (q row . key c) for columns [begin, end), a multiple of a turn's.
template <int DTYPE, int DIM>
static void scores_in_order(const decode_query& q, int rows, const matrix& keys, int64_t begin,
                            int64_t end, float scale, float* score, int64_t ld) {
    // Four rows of pairs of 128 columns are not in registers beside VL sums, nor of floats of 96.
    // Of float16, which are floats by then, two rows and twice the keys at a time take a twentieth
    // less than four.
    constexpr int most = DIM > (DTYPE == AF_F32 ? 64 : 96) ? 2 : 4;
    const bool asks = DTYPE == AF_F32 && keys.row == DIM && af_asks_ahead_in_order();
    for (int64_t c = begin; c < end; c += turn_in_order) {
        const auto first = row_in_order<DTYPE, DIM>::of(keys, c, end);
        in_groups_of_rows<most>(rows, [&](auto count, int row) AF_FLAT {
            constexpr int R = decltype(count)::value, K = VL / R;
            auto key = first;
            for (int64_t i = 0; i < turn_in_order; i += K) {
                alignas(64) float scores[VL];
                const vf dots = asks && row > 0 ? dot_in_order<R, true>(q, row, key)
                                                : dot_in_order<R, false>(q, row, key);
                store(scores, dots * scale);
                for (int r = 0; r < R; ++r)
                    memcpy(score + (row + r) * ld + c + i, scores + r * K, K * sizeof(float));
            }
        });
    }
}

// A row of values as floats. bfloat16: of each two vectors the first has what is even.
template <int DTYPE, int DIM>
AF_INLINE void load_in_order(row_in_order<DTYPE, DIM>& value, vf* x) {
    AF_UNROLL
    for (int j = 0; j < DIM / VL; j += DTYPE == AF_BF16 ? 2 : 1) {
        if constexpr (DTYPE == AF_BF16) {
            vu both;
            memcpy(&both, value.at, sizeof both);
            x[j] = as_float(both << 16);
            x[j + 1] = as_float(both & 0xffff0000u);
            value.move(64);
        } else {
            x[j] = as_floats_of<DTYPE>(value.at);
            value.move(VL * value.size);
        }
    }
    value.next_row();
}

// Sums of such rows to out.
template <int DTYPE, int DIM>
AF_INLINE void add_in_order(vf* sum, float* out) {
    AF_UNROLL
    for (int j = 0; j < DIM / VL; j += 2) {
        if constexpr (DTYPE == AF_BF16) interleave(sum[j], sum[j + 1], sum + j);
        store(out + j * VL, load(out + j * VL) + sum[j]);
        store(out + (j + 1) * VL, load(out + (j + 1) * VL) + sum[j + 1]);
    }
}

// out[row][DIM] += weight[row][c] * value[c] for columns [begin, end), a multiple of a turn's.
template <int DTYPE, int DIM>
static void values_in_order(const float* weight, int64_t ld, int rows, const matrix& values,
                            int64_t begin, int64_t end, float* out) {
    constexpr int N = DIM / VL;
    for (int64_t c = begin; c < end; c += turn_in_order) {
        const auto first = row_in_order<DTYPE, DIM>::of(values, c, end);
        // R * N sums and N vectors of a row are in registers.
        in_groups_of_rows<(N <= 6 ? 4 : 2)>(rows, [&](auto count, int row) AF_FLAT {
            constexpr int R = decltype(count)::value;
            // From 0: a sum that runs through all keys would lose more.
            vf acc[R][N] = {};
            auto value = first;
            for (int64_t i = c; i < c + turn_in_order; ++i) {
                vf x[N];
                load_in_order(value, x);
                AF_UNROLL
                for (int r = 0; r < R; ++r) {
                    const vf w = splat(weight[(row + r) * ld + i]);
                    AF_UNROLL
                    for (int j = 0; j < N; ++j) acc[r][j] = madd(w, x[j], acc[r][j]);
                }
            }
            AF_UNROLL
            for (int r = 0; r < R; ++r)
                add_in_order<DTYPE, DIM>(acc[r], out + (row + r) * DIM);
        });
    }
}

}  // namespace AF_LEVEL
#endif
