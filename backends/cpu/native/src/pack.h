// Operands for gemm.h from strided matrices of any dtype, and which rows are non-finite.
//
// pack_transposed: a source row becomes a column of panels (keys for scores, values for dP).
// pack_straight:   a source row becomes a row of panels   (values for the output, keys for dQ).
// copy_rows:       the A side, row-major, padded with zeros.
// Each exists for floats and for bf16 pairs; a pair joins two consecutive k. Padding is 0.
#pragma once
#include <string.h>

#include "anyflex_cpu.h"
#include "gemm.h"

namespace AF_LEVEL {

// A view of rows: strides in elements, dtype an af_dtype.
struct matrix {
    const void* data;
    int64_t row, col;
    int32_t dtype;
};

AF_INLINE constexpr int element_bytes(int32_t dtype) {
    return dtype == AF_F32 ? 4 : dtype <= AF_F16 ? 2 : 1;
}

AF_INLINE const char* address(const matrix& m, int64_t r, int64_t c) {
    return static_cast<const char*>(m.data) + (r * m.row + c * m.col) * element_bytes(m.dtype);
}

// Prefetches neighbouring rows into L2.
AF_INLINE void prefetch_rows(const void* rows, int64_t bytes) {
    const char* at = static_cast<const char*>(rows);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

// Rows of (b, h) of a tensor, from `first` on.
AF_INLINE matrix matrix_of(const af_tensor& t, int32_t dtype, int64_t b, int64_t h,
                           int64_t first) {
    matrix m = {t.data, 1, 1, dtype};
    m.data = address(m, b * t.stride[0] + h * t.stride[1] + first * t.stride[2], 0);
    m.row = t.stride[2];
    m.col = t.stride[3];
    return m;
}

// The page of a key of the sequence, or of its last one, and the page's first key.
struct key_page {
    int64_t id, first;
};
AF_INLINE key_page page_of(const af_problem& p, int64_t key) {
    const int64_t size = p.pages.size, last = (p.kv_length - 1) / size;
    const int64_t page = key / size < last ? key / size : last, id = p.pages.ids[page];
    return {id < 0 || id >= p.pages.count ? 0 : id, page * size};
}

// Rows of (b, h) of keys or values, counted from key `first` on, where they lie in memory; what is
// returned holds for rows [at, *end), and *end is reduced to those that are neighbours.
AF_INLINE matrix key_rows(const af_problem& p, const af_tensor& t, int32_t dtype, int64_t b,
                          int64_t h, int64_t first, int64_t at, int64_t* end) {
    if (!p.pages.ids) return matrix_of(t, dtype, b, h, first);
    const key_page page = page_of(p, first + at);
    const int64_t left = page.first + p.pages.size - first;
    if (left < *end) *end = left;
    matrix m = matrix_of(t, dtype, page.id, h, 0);
    m.data = address(m, first - page.first, 0);
    return m;
}

// Keys or values of the columns of a tile, wherever they lie: 1 << shift columns from a multiple of
// that number on are neighbours. Strides are in elements.
struct column_rows {
    const char* const* blocks;
    int shift;
    int64_t row_bytes, row, col;
    int32_t dtype;

    AF_INLINE_MEMBER const char* at(int64_t column) const {
        const int64_t into = column & ((int64_t(1) << shift) - 1);
        return blocks[column >> shift] + into * row_bytes;
    }
    // The columns from `column` on that are its neighbours, as rows of a matrix.
    AF_INLINE_MEMBER matrix from(int64_t column) const { return {at(column), row, col, dtype}; }
};

// The `columns` keys or values of (b, h) from key `first` on. `blocks` has room for an address a
// column. Keys past the sequence's end have the address of another one.
AF_INLINE column_rows rows_of_columns(const af_problem& p, const af_tensor& t, int32_t dtype,
                                      int64_t b, int64_t h, int64_t first, int64_t columns,
                                      const char** blocks) {
    const matrix all = matrix_of(t, dtype, b, h, first);
    column_rows rows = {blocks, 62, all.row * element_bytes(dtype), all.row, all.col, dtype};
    if (!p.pages.ids) {
        blocks[0] = address(all, 0, 0);
        return rows;
    }
    // Page and first key are multiples of this number.
    rows.shift = __builtin_ctzll(static_cast<uint64_t>(p.pages.size | first));
    const int64_t block = int64_t(1) << rows.shift;
    int64_t page = first / p.pages.size, into = first % p.pages.size;
    const int64_t last = (p.kv_length - 1) / p.pages.size;
    for (int64_t c = 0, i = 0; c < columns; ++page, into = 0) {
        const int64_t id = p.pages.ids[page < last ? page : last];
        const matrix m = matrix_of(t, dtype, id < 0 || id >= p.pages.count ? 0 : id, h, 0);
        for (; into < p.pages.size && c < columns; into += block, c += block)
            blocks[i++] = static_cast<const char*>(m.data) + into * rows.row_bytes;
    }
    return rows;
}

// Scales of keys or values where `key_rows` has their rows: that of row r is at[r * row].
struct row_scales {
    const float* at;
    int64_t row;
};
AF_INLINE row_scales scales_of(const af_problem& p, const af_scales& s, int64_t b, int64_t h,
                               int64_t first, int64_t at) {
    const key_page page = p.pages.ids ? page_of(p, first + at) : key_page{b, 0};
    return {s.data + page.id * s.stride[0] + h * s.stride[1] + (first - page.first) * s.stride[2],
            s.stride[2]};
}

// Type of keys and values in memory.
AF_INLINE int32_t kv_dtype(const af_problem& p) {
    return p.kv_storage ? static_cast<int32_t>(p.kv_storage) : p.dtype;
}

// VL elements at p as floats.
AF_INLINE vf as_floats(const char* p, int32_t dtype) {
    if (dtype == AF_F32) return load(reinterpret_cast<const float*>(p));
    if (dtype == AF_I8) return float_of_int8(p);
    if (dtype == AF_F8) return float_of_f8(p);
    const vh x = load(reinterpret_cast<const uint16_t*>(p));
    return dtype == AF_BF16 ? float_of_bf16(x) : float_of_half(x);
}

// Runs f with m, its dtype and a column stride of 1 known to the compiler.
template <class F>
AF_INLINE auto specialised(matrix m, const F& f) {
    if (m.col == 1) {
        m.col = 1;
        if (m.dtype == AF_F32) {
            m.dtype = AF_F32;
            return f(m);
        }
        if (m.dtype == AF_BF16) {
            m.dtype = AF_BF16;
            return f(m);
        }
        if (m.dtype == AF_F16) {
            m.dtype = AF_F16;
            return f(m);
        }
    }
    return f(m);
}

// Up to VL elements of a row from column c on, of which `n` are inside: the others are 0.
AF_INLINE vf fetch(const matrix& m, int64_t r, int64_t c, int64_t n) {
    const char* p = address(m, r, c);
    if (n >= VL && m.col == 1) return as_floats(p, m.dtype);
    alignas(64) uint32_t words[VL] = {};
    const int size = element_bytes(m.dtype);
    char* to = reinterpret_cast<char*>(words);
    for (int64_t i = 0; i < VL && i < n; ++i) memcpy(to + i * size, p + i * m.col * size, size);
    return as_floats(to, m.dtype);
}

// The same for 2 * VL bf16 elements, as VL words.
AF_INLINE vu fetch_pairs(const matrix& m, int64_t r, int64_t c, int64_t n) {
    const char* p = address(m, r, c);
    vu v;
    if (n >= 2 * VL && m.col == 1) {
        memcpy(&v, p, sizeof v);
        return v;
    }
    alignas(64) uint16_t half[2 * VL] = {};
    for (int64_t i = 0; i < 2 * VL && i < n; ++i) memcpy(half + i, p + i * m.col * 2, 2);
    memcpy(&v, half, sizeof v);
    return v;
}

// to[d] += factor * (row r)[d] for n elements.
AF_INLINE void add_row(const matrix& m, int64_t r, int64_t n, float factor, float* to) {
    for (int64_t d = 0; d < n; d += VL)
        store(to + d, load(to + d) + fetch(m, r, d, n - d) * factor);
}

#if !defined(__AVX512F__)
// a0 b0 a1 b1, and a2 b2 a3 b3, of each 128 bits.
AF_INLINE vu interleave_low(vu a, vu b) {
#if defined(__AVX2__)
    return AF_SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
#else
    return AF_SHUFFLE(a, b, 0, 4, 1, 5);
#endif
}
AF_INLINE vu interleave_high(vu a, vu b) {
#if defined(__AVX2__)
    return AF_SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
#else
    return AF_SHUFFLE(a, b, 2, 6, 3, 7);
#endif
}
#endif

// A VL x VL block of words, in registers.
AF_INLINE void transpose(vu (&r)[VL]) {
#if defined(__AVX512F__)
    __m512i t[16], *x = reinterpret_cast<__m512i*>(r);
    AF_UNROLL
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
    AF_UNROLL
    for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    AF_UNROLL
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    }
    AF_UNROLL
    for (int i = 0; i < 4; ++i) {
        x[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        x[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        x[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
#else
    vu t[VL];
#if defined(__AVX2__)
    AF_UNROLL
    for (int i = 0; i < 4; ++i) {
        t[i] = AF_SHUFFLE(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        t[i + 4] = AF_SHUFFLE(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
#else
    memcpy(t, r, sizeof t);
#endif
    // Blocks of 4 x 4.
    AF_UNROLL
    for (int i = 0; i < VL; i += 4) {
        const vu a = interleave_low(t[i], t[i + 2]), b = interleave_low(t[i + 1], t[i + 3]);
        const vu c = interleave_high(t[i], t[i + 2]), d = interleave_high(t[i + 1], t[i + 3]);
        r[i] = interleave_low(a, b);
        r[i + 1] = interleave_high(a, b);
        r[i + 2] = interleave_low(c, d);
        r[i + 3] = interleave_high(c, d);
    }
#endif
}

// n rows of words, of which fetched(row, word) reads VL, to the columns of panels.
template <class F>
AF_INLINE void transpose_rows(int64_t n, int64_t words, int64_t columns, uint32_t* out,
                              const F& fetched) {
    for (int64_t j = 0; j < columns; j += VL)
        for (int64_t p = 0; p < words; p += VL) {
            vu r[VL];
            AF_UNROLL
            for (int i = 0; i < VL; ++i) r[i] = j + i < n ? fetched(j + i, p) : vu{};
            transpose(r);
            uint32_t* to = out + (j / NR) * words * NR + p * NR + j % NR;
            const int64_t rows = words - p < VL ? words - p : VL;
            if (rows == VL) {
                AF_UNROLL
                for (int i = 0; i < VL; ++i) store(to + i * NR, r[i]);
            } else {
                for (int64_t i = 0; i < rows; ++i) store(to + i * NR, r[i]);
            }
        }
}

// n source rows of k elements -> out [panels of n, rounded up to `columns`][k][NR].
static void pack_transposed(const matrix& m, int64_t n, int64_t k, int64_t columns, float* out) {
    specialised(m, [&](const matrix& x) AF_FLAT {
        transpose_rows(n, k, columns, reinterpret_cast<uint32_t*>(out),
                       [&](int64_t r, int64_t p) AF_FLAT { return as_uint(fetch(x, r, p, k - p)); });
    });
}

// bf16 only. out [panels][k_padded / 2][NR]; k_padded is a multiple of pair_k_step.
static void pack_transposed_pairs(const matrix& m, int64_t n, int64_t k, int64_t k_padded,
                                  int64_t columns, uint32_t* out) {
    transpose_rows(n, k_padded / 2, columns, out, [&](int64_t r, int64_t p) AF_FLAT {
        return fetch_pairs(m, r, 2 * p, k - 2 * p);
    });
}

// n source rows of d elements -> out [panels of d][..][NR], `panel` words from one to the next;
// rows n to n_padded are 0. nonfinite[r] says whether row r holds NaN or infinity; such rows are
// packed as 0, and the result is their number.
static int64_t pack_straight(const matrix& m, int64_t n, int64_t n_padded, int64_t d, float* out,
                             int64_t panel, uint8_t* nonfinite) {
    const int64_t panels = (d + NR - 1) / NR;
    int64_t found = 0;
    specialised(m, [&](const matrix& x) AF_FLAT {
        for (int64_t r = 0; r < n_padded; ++r) {
            vu difference = vu{};
            for (int64_t j = 0; j < panels; ++j) {
                float* to = out + j * panel + r * NR;
                AF_UNROLL
                for (int c = 0; c < NR; c += VL) {
                    const vf y = r < n ? fetch(x, r, j * NR + c, d - j * NR - c) : vf{};
                    difference |= as_uint(y - y);
                    store(to + c, y);
                }
            }
            const bool any = any_bit(difference);
            nonfinite[r] = any;
            if (any) {
                ++found;
                for (int64_t j = 0; j < panels; ++j) memset(out + j * panel + r * NR, 0, NR * 4);
            }
        }
    });
    return found;
}

// Two rows of NR bf16 elements, of which n are inside, as pairs; `nonfinite` says which row has
// NaN or infinity.
AF_INLINE void join_rows(const matrix& m, int64_t r, int64_t rows, int64_t c, int64_t n,
                         uint32_t* to, bool (&is_nonfinite)[2]) {
#if defined(__AVX512BW__)
    if (n >= NR && m.col == 1 && r + 1 < rows) {
        __m512i x[2];
        for (int i = 0; i < 2; ++i) {
            x[i] = _mm512_loadu_si512(address(m, r + i, c));
            const __m512i exponent = _mm512_and_si512(x[i], _mm512_set1_epi16(0x7f80));
            is_nonfinite[i] |= _mm512_cmpeq_epi16_mask(exponent, _mm512_set1_epi16(0x7f80)) != 0;
            // So that interleaving within 128 bits leaves columns in order.
            x[i] = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), x[i]);
        }
        _mm512_storeu_si512(to, _mm512_unpacklo_epi16(x[0], x[1]));
        _mm512_storeu_si512(to + VL, _mm512_unpackhi_epi16(x[0], x[1]));
        return;
    }
#endif
    for (int k = 0; k < NR; k += VL) {
        vf x[2];
        for (int i = 0; i < 2; ++i) {
            x[i] = r + i < rows ? fetch(m, r + i, c + k, n - k) : vf{};
            is_nonfinite[i] |= any_bit(as_uint(x[i] - x[i]));
        }
        store(to + k, (as_uint(x[0]) >> 16) | as_uint(x[1]));
    }
}

// bf16 only. out [panels of d][n_padded / 2][NR]; n_padded is even.
static int64_t pack_straight_pairs(const matrix& m, int64_t n, int64_t n_padded, int64_t d,
                                   uint32_t* out, int64_t panel, uint8_t* nonfinite) {
    const int64_t panels = (d + NR - 1) / NR;
    int64_t found = 0;
    for (int64_t r = 0; r < n_padded; r += 2) {
        bool is_nonfinite[2] = {};
        for (int64_t j = 0; j < panels; ++j)
            join_rows(m, r, n, j * NR, d - j * NR, out + j * panel + r / 2 * NR, is_nonfinite);
        for (int i = 0; i < 2; ++i) {
            nonfinite[r + i] = is_nonfinite[i];
            if (!is_nonfinite[i]) continue;
            ++found;
            for (int64_t j = 0; j < panels; ++j)
                for (int c = 0; c < NR; ++c)
                    out[j * panel + r / 2 * NR + c] &= i ? 0x0000ffffu : 0xffff0000u;
        }
    }
    return found;
}

// rows x k -> out [rows_padded][k_padded], zeros outside. k_padded is a multiple of VL.
static void copy_rows(const matrix& m, int64_t rows, int64_t rows_padded, int64_t k,
                      int64_t k_padded, float* out) {
    specialised(m, [&](const matrix& x) AF_FLAT {
        for (int64_t r = 0; r < rows_padded; ++r)
            for (int64_t c = 0; c < k_padded; c += VL)
                store(out + r * k_padded + c, r < rows && c < k ? fetch(x, r, c, k - c) : vf{});
    });
}

// bf16 to bf16. k_padded is even.
static void copy_rows_pairs(const matrix& m, int64_t rows, int64_t rows_padded, int64_t k,
                            int64_t k_padded, uint16_t* out) {
    for (int64_t r = 0; r < rows_padded; ++r) {
        uint16_t* to = out + r * k_padded;
        if (r < rows && m.col == 1) {
            memcpy(to, address(m, r, 0), 2 * k);
            memset(to + k, 0, 2 * (k_padded - k));
            continue;
        }
        memset(to, 0, 2 * k_padded);
        if (r < rows)
            for (int64_t c = 0; c < k; ++c) memcpy(to + c, address(m, r, c), 2);
    }
}

// n floats times `factor`, rounded to dtype, to an array with stride 1.
static void store_row(const float* from, int64_t n, float factor, int32_t dtype, void* to) {
    const vf f = splat(factor);
    const int size = dtype == AF_F32 ? 4 : 2;
    char* out = static_cast<char*>(to);
    for (int64_t c = 0; c < n; c += VL) {
        alignas(64) char bytes[VL * 4];
        char* at = n - c >= VL ? out + c * size : bytes;
        vf x;
        if (n - c >= VL) {
            x = load(from + c);
        } else {
            alignas(64) float rest[VL] = {};
            memcpy(rest, from + c, (n - c) * 4);
            x = load(rest);
        }
        x = x * f;
        if (dtype == AF_F32)
            store(reinterpret_cast<float*>(at), x);
        else if (dtype == AF_BF16)
            store(reinterpret_cast<uint16_t*>(at), bf16_of_float(x));
        else
            store(reinterpret_cast<uint16_t*>(at), half_of_float(x));
        if (at == bytes) memcpy(out + c * size, bytes, (n - c) * size);
    }
}

}  // namespace AF_LEVEL
