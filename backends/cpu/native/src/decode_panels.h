// The two products of decoding on vectors for many query rows, by the passes of gemm.h.
//
// For few rows, decode_products.h sums scores across lanes. For more, a lane is a row: each
// element of a key is a splat for a panel of rows, and nothing is summed across. Keys and values
// are read as they lie in memory: packing them, as prefill does, would write as much as there is
// to read.
#pragma once
#include "decode_products.h"

namespace AF_LEVEL {

// Minimum number of rows. With fewer (float32, on a Xeon) a panel's empty lanes cost more than
// sums across lanes.
constexpr int64_t least_panel_rows = 9;

// Keys of a turn, which stay in L1: whole vectors, and passes of gemm.h. Copies have 32 KiB of the
// stack, so they take fewer keys, and have a widest row.
constexpr int64_t panel_keys = 48, copied_keys = 32, copied_floats = 8192;
constexpr int64_t widest_panel = copied_floats / VL / NR * NR;
static_assert(panel_keys % VL == 0 && copied_keys % VL == 0 && VL <= copied_keys, "whole vectors");

// n rows of a matrix from c on as floats with adjacent columns. They are copied if memory has them
// in another way, or if a whole panel of columns would end outside of them (whole_panels): copies
// end with zeros.
struct float_rows {
    alignas(64) float copied[copied_floats];
    const float* at;
    int64_t row;

    template <int DTYPE>
    AF_INLINE_MEMBER static bool are_there(const matrix& m, int64_t dim, bool whole_panels) {
        return DTYPE == AF_F32 && m.col == 1 && !(whole_panels && dim % NR != 0);
    }
    template <int DTYPE>
    AF_INLINE_MEMBER static int64_t keys_of_turn(const matrix& m, int64_t dim, bool whole_panels) {
        if (are_there<DTYPE>(m, dim, whole_panels)) return panel_keys;
        return smaller(copied_floats / round_up(dim, NR) / VL * VL, copied_keys);
    }
    template <int DTYPE>
    AF_INLINE_MEMBER void read(const matrix& m, int64_t c, int64_t n, int64_t dim,
                               bool whole_panels) {
        if (are_there<DTYPE>(m, dim, whole_panels)) {
            at = reinterpret_cast<const float*>(address(m, c, 0));
            row = m.row;
            return;
        }
        row = round_up(dim, NR);
        at = copied;
        copy_rows({address(m, c, 0), m.row, m.col, DTYPE}, n, n, dim, row, copied);
    }
};

// Prefetches the lines that are read next, one each time that a product takes another row of its
// panel. Prefetches issued at once would fill all places for lines in flight, and the products
// would wait.
struct lines_ahead {
    const char* at;
    int64_t row_bytes, to_next_row;  // from a row's end
    int64_t left_in_row, rows;

    AF_INLINE_MEMBER static lines_ahead of(const rows_ahead& next, int64_t column, int64_t rows) {
        const int64_t size = element_bytes(next.rows.dtype);
        // Rows with gaps between their elements, or without a row stride, are left to the hardware
        // prefetcher.
        const bool lines = next.rows.col == 1 && next.rows.row != 0 && next.bytes > 0;
        return {next.rows.at(column), next.bytes, next.rows.row * size - next.bytes,
                next.bytes, lines ? rows : 0};
    }
    AF_INLINE_MEMBER void line() {
        if (rows == 0) return;
        __builtin_prefetch(at, 0, 2);
        at += 64;
        left_in_row -= 64;
        if (left_in_row > 0) return;
        at += left_in_row + to_next_row;
        left_in_row = row_bytes;
        --rows;
    }
    // Prefetches the lines that are left.
    AF_INLINE_MEMBER void rest() {
        while (rows > 0) line();
    }
};

// Prefetching beside scores, whose panels are near.
struct beside_scores {
    lines_ahead lines;
    AF_INLINE_MEMBER void operator()(const void*) { lines.line(); }
};

// Prefetching beside values, which are on their way.
struct beside_values {
    lines_ahead lines;
    AF_INLINE_MEMBER void operator()(const void* row) {
        prefetch_panel(row);
        lines.line();
    }
};

// Writes a panel's sums [keys][NR] of a turn, scaled, as rows of scores. Columns past the last key
// get arbitrary numbers.
AF_INLINE void store_panel_scores(const float* sums, int64_t keys, int rows, float scale,
                                  float* score, int64_t ld) {
    for (int64_t c = 0; c < keys; c += VL)
        for (int first = 0; first < rows; first += VL) {
            vu block[VL];
            AF_UNROLL
            for (int i = 0; i < VL; ++i)
                block[i] = as_uint(load(sums + (c + i) * NR + first) * scale);
            transpose(block);
            const int there = rows - first < VL ? rows - first : VL;
            for (int i = 0; i < there; ++i)
                store(score + (first + i) * ld + c, as_float(block[i]));
        }
}

// score[r][c] = scale * (q row r . key c) for columns [begin, end).
// panels: of all rows, [dim][NR] each.
template <int DTYPE>
static void panel_scores(const float* panels, int rows, const matrix& key, int64_t dim,
                         const rows_ahead& next, int64_t begin, int64_t end, float scale,
                         float* score, int64_t ld) {
    alignas(64) float sums[panel_keys * NR] = {};
    float_rows keys;
    const int64_t turn = float_rows::keys_of_turn<DTYPE>(key, dim, false);
    // Length of a sum: a sum of 128 products is most of float32's error. Cut to this length, its
    // rms is 0.6 of that (999 keys, 12 rows). With 16 bits the error is that of their rounding.
    const int64_t longest = DTYPE == AF_F32 ? 64 : dim;
    for (int64_t c = begin; c < end; c += turn) {
        const int n = static_cast<int>(smaller(turn, end - c));
        beside_scores beside = {lines_ahead::of(next, c, n)};
        keys.read<DTYPE>(key, c, n, dim, false);
        for (int r = 0; r < rows; r += NR) {
            const float* panel = panels + r * dim;
            if (rows - r > VL)
                panel_rows_cut<into::store, 2>(n, dim, keys.at, keys.row, 1, panel, sums, NR, 1.0f,
                                               nullptr, longest, beside);
            else
                panel_rows_cut<into::store, 1>(n, dim, keys.at, keys.row, 1, panel, sums, NR, 1.0f,
                                               nullptr, longest, beside);
            store_panel_scores(sums, n, rows - r < NR ? rows - r : NR, scale, score + r * ld + c,
                               ld);
        }
        beside.lines.rest();
    }
}

// out[row][width] += weight[row][c] * value[c] for columns [begin, end); width: whole panels.
template <int DTYPE>
static void panel_values(const float* weight, int64_t ld, int rows, const matrix& value,
                         int64_t dim, const rows_ahead& next, int64_t begin, int64_t end,
                         float* out, int64_t width) {
    float_rows values;
    const int64_t turn = float_rows::keys_of_turn<DTYPE>(value, dim, true);
    for (int64_t c = begin; c < end; c += turn) {
        const int64_t n = smaller(turn, end - c);
        beside_values beside = {lines_ahead::of(next, c, n)};
        values.read<DTYPE>(value, c, n, dim, true);
        for (int64_t d = 0; d < dim; d += NR)
            panel_rows<into::add, 2>(rows, n, weight + c, ld, 1, values.at + d, values.row,
                                     out + d, width, 1.0f, nullptr, beside);
        beside.lines.rest();
    }
}

}  // namespace AF_LEVEL
