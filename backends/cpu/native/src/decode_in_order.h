// The two products of decoding on vectors of 512 bits, for keys and values of usual widths: whole
// rows are read one after the other.
//
// The prefetcher of an AMD Zen 4 follows code best that reads whole rows in order, without a loop
// inside of a row and without prefetch instructions (except for rows apart). Reading lines of
// several rows in turns, half rows, or one line per iteration is half as fast, and prefetch
// instructions wait for one another. Intel's Sapphire Rapids is 1.1 times as fast with streams and
// prefetch instructions. A Zen 5 follows whole rows too, but not those of float32 keys: their
// products leave the prefetcher idle while the later query rows take keys from L1. There the code
// prefetches the next turn's keys.
#pragma once
#include "decode_products.h"
#include "level.h"

#if defined(__AVX512F__)
namespace AF_LEVEL {

// All query rows take these columns while they are in L1.
constexpr int64_t turn_in_order = 16;

// Whether rows are read in order, whole turns of them; others are read in streams. Rows of these
// widths that aren't neighbours make no streams, so every processor reads them in order.
AF_INLINE bool is_read_in_order(const column_rows& rows, int64_t dim) {
    const bool usual =
        rows.col == 1 && rows.dtype <= AF_F16 && (dim == 64 || dim == 96 || dim == 128);
    return usual && (rows.row != dim || af_reads_best_in_order());
}

// Calls f(count_of<dim>()) for a width that is_read_in_order takes.
template <class F>
AF_INLINE void with_width(int64_t dim, const F& f) {
    if (dim == 128) return f(count_of<128>());
    if (dim == 96) return f(count_of<96>());
    f(count_of<64>());
}

// Address of a row of DIM elements. Rows of queries and of sums are padded to whole vectors and
// pairs and have the same width.
template <int DTYPE, int DIM>
struct row_in_order {
    static_assert(DIM % (2 * VL) == 0 && turn_in_order % VL == 0, "whole vectors and groups");
    static constexpr int size = element_bytes(DTYPE);
    const char* at;
    int64_t step;  // bytes to the next row

    // Returns the row of column c. Rows that aren't neighbours are prefetched a turn ahead,
    // because the hardware doesn't foresee them.
    AF_INLINE_MEMBER static row_in_order of(const matrix& m, int64_t c, int64_t end) {
        if (m.row != DIM)
            for (int64_t i = c + turn_in_order; i < smaller(c + 2 * turn_in_order, end); ++i)
                prefetch_rows(address(m, i, 0), DIM * size);
        return {address(m, c, 0), m.row * size};
    }
    // Hides this address from the compiler, so that it can't move later reads up among earlier
    // lines. gcc does that otherwise, and lines of a few rows are then read in turns.
    AF_INLINE_MEMBER void move(int64_t bytes) {
        at += bytes;
        __asm__ volatile("" : "+r"(at));
    }
    AF_INLINE_MEMBER void next_row() { move(step - DIM * size); }
};

// R query rows times VL / R keys: VL vectors of partial sums, which one reduction across lanes
// ends. Query rows stay in registers if they have room, so that only keys wait in the load queue:
// a query row read for each key would fill that queue, and memory would be asked for a few keys at
// a time. AHEAD: prefetch the same lines of the next turn, for rows that are neighbours.
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
                in_register(y[r][d]);
            }
        AF_UNROLL
        for (int i = 0; i < K; ++i, key.next_row())
            AF_UNROLL
            for (int d = 0; d < steps; ++d, key.move(64)) {
                if (AHEAD) __builtin_prefetch(key.at + turn_in_order * DIM * key.size, 0, 3);
                const vf x = as_floats(key.at, DTYPE);
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
            const vf x = as_floats(key.at, DTYPE);
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
    // Sizes without room in registers: four rows of pairs of 128 columns beside VL sums, and
    // floats of 96. For float16, which are floats by then, two rows and twice the keys at a time
    // take a twentieth less than four.
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

// A row of values as floats. bfloat16: the first of each two vectors has the even elements.
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
            x[j] = as_floats(value.at, DTYPE);
            value.move(VL * value.size);
        }
    }
    value.next_row();
}

// Adds the sums of such rows to out.
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
            // Starts from 0: one sum through all keys would lose more.
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
