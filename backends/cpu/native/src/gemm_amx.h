// Pairs on AMX tiles: blocks of 2 x 2 accumulators of 16 x 16, included by gemm.h.
#pragma once
#include "simd.h"

namespace AF_LEVEL {

// Eight tiles of 16 rows of 64 bytes. Costs a few dozen cycles; a thread does it once a job.
AF_INLINE void pairs_begin() {
    alignas(64) struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    _tile_loadconfig(&shape);
}
// Released tiles keep context switches and deep sleep cheap.
AF_INLINE void pairs_end() { _tile_release(); }

// Tiles 0-3 accumulate: rows 0-15 of both halves of the panel, then rows 16-31. k > 0.
template <int ROW_TILES>
AF_INLINE void tile_product(int64_t k, const uint16_t* a, int64_t a_row, const uint32_t* b) {
    const int64_t a_bytes = a_row * 4;
    for (int64_t p = 0; p < k; p += 32, a += 32, b += 16 * NR) {
        _tile_loadd(4, a, a_bytes);
        _tile_loadd(6, b, NR * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 16, NR * 4);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (ROW_TILES == 2) {
            _tile_loadd(5, a + 32 * a_row, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

// C = alpha[row] * C, for the rows whose maximum moved: late in a row of kv tiles, hardly any.
AF_INLINE void rescale_rows(int rows, float* c, int64_t ldc, const float* alpha) {
    for (int r = 0; r < rows; r += 16) {
        uint32_t moved =
            _mm512_cmp_ps_mask(_mm512_loadu_ps(alpha + r), _mm512_set1_ps(1.0f), _CMP_NEQ_UQ);
        for (; moved; moved &= moved - 1) {
            const int i = r + __builtin_ctz(moved);
            float* row = c + i * ldc;
            store(row, load(row) * splat(alpha[i]));
            store(row + 16, load(row + 16) * splat(alpha[i]));
        }
    }
}

AF_INLINE void scale_rows(int rows, float* c, int64_t ldc, float scale) {
    if (scale == 1.0f) return;
    for (int i = 0; i < rows; ++i) {
        float* row = c + i * ldc;
        store(row, load(row) * splat(scale));
        store(row + 16, load(row + 16) * splat(scale));
    }
}

template <int ROW_TILES>
AF_INLINE void tiles_zero() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (ROW_TILES == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
}
template <int ROW_TILES>
AF_INLINE void tiles_load(const float* c, int64_t ldc) {
    _tile_loadd(0, c, ldc * 4);
    _tile_loadd(1, c + 16, ldc * 4);
    if constexpr (ROW_TILES == 2) {
        _tile_loadd(2, c + 16 * ldc, ldc * 4);
        _tile_loadd(3, c + 16 * ldc + 16, ldc * 4);
    }
}
template <int ROW_TILES>
AF_INLINE void tiles_store(float* c, int64_t ldc) {
    _tile_stored(0, c, ldc * 4);
    _tile_stored(1, c + 16, ldc * 4);
    if constexpr (ROW_TILES == 2) {
        _tile_stored(2, c + 16 * ldc, ldc * 4);
        _tile_stored(3, c + 16 * ldc + 16, ldc * 4);
    }
}

template <int ROW_TILES, into HOW>
static void tile_block(int64_t k, const uint16_t* a, int64_t a_row, const uint32_t* b, float* c,
                       int64_t ldc, float scale, const float* alpha) {
    if constexpr (HOW == into::rescale) rescale_rows(16 * ROW_TILES, c, ldc, alpha);
    if constexpr (HOW == into::store)
        tiles_zero<ROW_TILES>();
    else
        tiles_load<ROW_TILES>(c, ldc);
    tile_product<ROW_TILES>(k, a, a_row, b);
    tiles_store<ROW_TILES>(c, ldc);
    if constexpr (HOW == into::store) scale_rows(16 * ROW_TILES, c, ldc, scale);
}

template <into HOW>
static void gemm_tiles(int rows, int64_t panels, int64_t k, const uint16_t* a, int64_t a_row,
                       const uint32_t* b, int64_t b_panel, float* c, int64_t ldc, float scale,
                       const float* alpha) {
    int i = 0;
    for (; i + 16 < rows; i += 32)
        for (int64_t j = 0; j < panels; ++j)
            tile_block<2, HOW>(k, a + i * 2 * a_row, a_row, b + j * b_panel, c + i * ldc + j * NR,
                               ldc, scale, alpha + i);
    if (i < rows)
        for (int64_t j = 0; j < panels; ++j)
            tile_block<1, HOW>(k, a + i * 2 * a_row, a_row, b + j * b_panel, c + i * ldc + j * NR,
                               ldc, scale, alpha + i);
}

}  // namespace AF_LEVEL
