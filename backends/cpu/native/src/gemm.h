// Micro-GEMM: a block of rows of A times packed panels of B, float sums.
//
//   A  float, any row and k stride; or bf16 pairs, rows of consecutive pairs (k even)
//   B  panels of NR columns: float [k][NR]; pairs [k / 2][NR], the pair of k in one word (VNNI);
//      decode_panels.h has rows that are further apart, and half panels
//   C  float, row-major
//
// pack.h makes panels. Pairs exist where the level multiplies bf16 (`has_pairs`). On AMX levels
// they run on tiles: then A and C must have rows up to a multiple of 16 (what they hold past
// `rows` is read and written), k must be a multiple of pair_k_step, and calls must lie between
// pairs_begin() and pairs_end(), which set up and release this thread's tile registers.
#pragma once
#include "simd.h"

namespace AF_LEVEL {

constexpr int NR = 2 * VL;  // columns of a panel

enum class into {
    store,    // C = scale * A B
    add,      // C += A B
    rescale,  // C = alpha[row] * C + A B
};

#if defined(__AVX512BF16__)
constexpr bool has_pairs = true;
#else
constexpr bool has_pairs = false;
#endif
#if defined(__AMX_BF16__)
constexpr bool has_tiles = true;
constexpr int64_t pair_k_step = 32;
#else
constexpr bool has_tiles = false;
constexpr int64_t pair_k_step = 2;
#endif

// Rows that one pass of the vector kernels takes: two vectors a row, and room for the operands.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MR = 12;
#else
constexpr int MR = 6;
#endif

// Whether panels stream from L2, or from further away.
constexpr int64_t prefetched_rows = 16;
AF_INLINE void prefetch_panel(const void* row) {
    const char* at = static_cast<const char*>(row);
    for (int i = 0; i < NR * 4; i += 64) __builtin_prefetch(at + i, 0, 3);
}

struct panel_ahead {
    AF_INLINE_MEMBER void operator()(const void* row) const { prefetch_panel(row); }
};

// M rows of A, four from a pointer. With one pointer they would take ten index registers, and
// compilers then keep other addresses in vector registers, where a move waits behind all products
// before it (2 to 5 % of the time of products of 64 to 128 steps, gcc 12 on a Zen 4).
template <int M, class T> struct row_pointers {
    const T* quad[(M + 3) / 4];
    int64_t row;

    AF_INLINE_MEMBER row_pointers(const T* a, int64_t a_row) : row(a_row) {
        AF_UNROLL
        for (int i = 0; i < (M + 3) / 4; ++i) {
            quad[i] = a + 4 * i * a_row;
            __asm__("" : "+r"(quad[i]));  // hides that it is a multiple
        }
    }
    AF_INLINE_MEMBER const T& operator[](int i) const { return quad[i / 4][i % 4 * row]; }
    AF_INLINE_MEMBER void step(int64_t a_k) {
        AF_UNROLL
        for (int i = 0; i < (M + 3) / 4; ++i) quad[i] += a_k;
    }
};

// acc += A B for M rows and N vectors of a panel, whose rows are b_row words apart. A word of A is
// a float, or a pair. `ahead` is called at each step with a row of B that comes later.
template <int M, int N, class AHEAD>
AF_INLINE void multiply(vf (&acc)[M][N], int64_t k, const float* a, int64_t a_row, int64_t a_k,
                        const float* b, int64_t b_row, AHEAD& ahead) {
    row_pointers<M, float> rows(a, a_row);
    for (int64_t p = 0; p < k; ++p, rows.step(a_k), b += b_row) {
        vf y[N];
        AF_UNROLL
        for (int j = 0; j < N; ++j) y[j] = load(b + j * VL);
        ahead(b + prefetched_rows * b_row);
        AF_UNROLL
        for (int i = 0; i < M; ++i) {
            const vf x = splat(rows[i]);
            AF_UNROLL
            for (int j = 0; j < N; ++j) acc[i][j] = madd(x, y[j], acc[i][j]);
        }
    }
}

#if defined(__AVX512BF16__)
// Pairs are loaded as floats: vpbroadcastd would cost each call 20 cycles more on a Zen 4.
AF_INLINE __m512bh load_pairs(const uint32_t* b) {
    return reinterpret_cast<__m512bh>(load(reinterpret_cast<const float*>(b)));
}
AF_INLINE __m512bh splat_pair(const uint32_t& pair) {
    float bits;  // rows may have been written as 16 bits
    __builtin_memcpy(&bits, &pair, sizeof bits);
    return reinterpret_cast<__m512bh>(_mm512_set1_ps(bits));
}

template <int M, class AHEAD>
AF_INLINE void multiply(vf (&acc)[M][2], int64_t pairs, const uint32_t* a, int64_t a_row, int64_t,
                        const uint32_t* b, int64_t b_row, AHEAD& ahead) {
    row_pointers<M, uint32_t> rows(a, a_row);
    for (int64_t p = 0; p < pairs; ++p, rows.step(1), b += b_row) {
        const __m512bh b0 = load_pairs(b), b1 = load_pairs(b + VL);
        ahead(b + prefetched_rows * b_row);
        AF_UNROLL
        for (int i = 0; i < M; ++i) {
            const __m512bh x = splat_pair(rows[i]);
            acc[i][0] = _mm512_dpbf16_ps(acc[i][0], x, b0);
            acc[i][1] = _mm512_dpbf16_ps(acc[i][1], x, b1);
        }
    }
}
#endif

template <int M, int N, into HOW, class T, class AHEAD>
static AF_NOINLINE void micro(int64_t k, const T* a, int64_t a_row, int64_t a_k, const T* b,
                              int64_t b_row, float* c, int64_t ldc, float scale,
                              const float* alpha, AHEAD& ahead) {
    // Starts from 0: the sums of a tile's products are added up, which loses less than one sum
    // through all tiles.
    vf acc[M][N] = {};
    multiply(acc, k, a, a_row, a_k, b, b_row, ahead);
    if constexpr (HOW == into::store) {
        // A branch costs less than products with 1, and most scales are 1.
        if (scale != 1.0f) {
            AF_UNROLL
            for (int i = 0; i < M; ++i)
                AF_UNROLL
                for (int j = 0; j < N; ++j) acc[i][j] *= splat(scale);
        }
    }
    AF_UNROLL
    for (int i = 0; i < M; ++i)
        AF_UNROLL
        for (int j = 0; j < N; ++j) {
            float* at = c + i * ldc + j * VL;
            if constexpr (HOW == into::store)
                store(at, acc[i][j]);
            else if constexpr (HOW == into::add)
                store(at, load(at) + acc[i][j]);
            else
                store(at, madd(load(at), splat(alpha[i]), acc[i][j]));
        }
}

// N vectors of a panel, any number of rows.
template <into HOW, int N, class T, class AHEAD>
static void panel_rows(int rows, int64_t k, const T* a, int64_t a_row, int64_t a_k, const T* b,
                       int64_t b_row, float* c, int64_t ldc, float scale, const float* alpha,
                       AHEAD& ahead) {
    const auto step = [&](int done) {
        a += done * a_row;
        c += done * ldc;
        rows -= done;
        if constexpr (HOW == into::rescale) alpha += done;
    };
    // One or two rows would leave half of the units idle: 8 are split into two times 4, 9 into 4,
    // 4 and 1.
    while (rows >= MR && !(MR == 6 && (rows == 8 || rows == 9))) {
        micro<MR, N, HOW>(k, a, a_row, a_k, b, b_row, c, ldc, scale, alpha, ahead);
        step(MR);
    }
    if constexpr (MR > 8) {
        if (rows >= 8) {
            micro<8, N, HOW>(k, a, a_row, a_k, b, b_row, c, ldc, scale, alpha, ahead);
            step(8);
        }
    }
    while (rows >= 4) {
        micro<4, N, HOW>(k, a, a_row, a_k, b, b_row, c, ldc, scale, alpha, ahead);
        step(4);
    }
    if (rows >= 2) {
        micro<2, N, HOW>(k, a, a_row, a_k, b, b_row, c, ldc, scale, alpha, ahead);
        step(2);
    }
    if (rows == 1) micro<1, N, HOW>(k, a, a_row, a_k, b, b_row, c, ldc, scale, alpha, ahead);
}

// Maximum number of products in one float sum before it is added to the result: a sum's error
// grows with its length.
constexpr int64_t longest_sum = 128;

// panel_rows of a packed panel, whose sums take up to `longest` products. With into::store `scale`
// must be 1: it is the first sum's.
template <into HOW, int N, class AHEAD>
static void panel_rows_cut(int rows, int64_t k, const float* a, int64_t a_row, int64_t a_k,
                           const float* b, float* c, int64_t ldc, float scale, const float* alpha,
                           int64_t longest, AHEAD& ahead) {
    const int64_t first = k > longest ? longest : k;
    panel_rows<HOW, N>(rows, first, a, a_row, a_k, b, NR, c, ldc, scale, alpha, ahead);
    for (int64_t i = first; i < k; i += longest)
        panel_rows<into::add, N>(rows, k - i > longest ? longest : k - i, a + i * a_k, a_row, a_k,
                                 b + i * NR, NR, c, ldc, scale, alpha, ahead);
}

// C[rows][panels * NR] (+)= A[rows][k] * B; `b_panel` words from a panel to the next.
// `scale` is for into::store, which has one sum whatever k, alpha[rows] for into::rescale.
template <into HOW, class AHEAD = panel_ahead>
static void gemm(int rows, int64_t panels, int64_t k, const float* a, int64_t a_row, int64_t a_k,
                 const float* b, int64_t b_panel, float* c, int64_t ldc, float scale,
                 const float* alpha, int64_t longest = longest_sum, AHEAD&& ahead = AHEAD()) {
    for (int64_t j = 0; j < panels; ++j) {
        const float* panel = b + j * b_panel;
        if constexpr (HOW == into::store)
            panel_rows<HOW, 2>(rows, k, a, a_row, a_k, panel, NR, c + j * NR, ldc, scale,
                               alpha, ahead);
        else
            panel_rows_cut<HOW, 2>(rows, k, a, a_row, a_k, panel, c + j * NR, ldc, scale, alpha,
                                   longest, ahead);
    }
}

}  // namespace AF_LEVEL

#if defined(__AMX_BF16__)
#include "gemm_amx.h"
#endif

namespace AF_LEVEL {

#if !defined(__AMX_BF16__)
AF_INLINE void pairs_begin() {}
AF_INLINE void pairs_end() {}
#endif

// The same on pairs: `k` counts single elements and is even, `a_row` pairs, `a` is 4-byte aligned.
// On tiles nothing is asked of `ahead`.
template <into HOW, class AHEAD = panel_ahead>
static void gemm_pairs(int rows, int64_t panels, int64_t k, const uint16_t* a, int64_t a_row,
                       const uint32_t* b, int64_t b_panel, float* c, int64_t ldc, float scale,
                       const float* alpha, [[maybe_unused]] AHEAD&& ahead = AHEAD()) {
#if defined(__AMX_BF16__)
    gemm_tiles<HOW>(rows, panels, k, a, a_row, b, b_panel, c, ldc, scale, alpha);
#elif defined(__AVX512BF16__)
    const uint32_t* words = reinterpret_cast<const uint32_t*>(a);
    for (int64_t j = 0; j < panels; ++j)
        panel_rows<HOW, 2, uint32_t>(rows, k / 2, words, a_row, 1, b + j * b_panel, NR,
                                     c + j * NR, ldc, scale, alpha, ahead);
#else
    static_assert(HOW != HOW, "this level has no bf16 products: has_pairs is false");
#endif
}

// gemm or gemm_pairs: rows of A and panels of B in words, which are floats, or pairs with a_k 1.
template <bool PAIRS, into HOW, class AHEAD = panel_ahead>
static void multiply_words(int64_t rows, int64_t panels, int64_t k, const void* a, int64_t a_row,
                           int64_t a_k, const void* b, int64_t b_panel, float* c, int64_t ldc,
                           float scale, const float* alpha, int64_t longest = longest_sum,
                           AHEAD&& ahead = AHEAD()) {
    if constexpr (PAIRS)
        gemm_pairs<HOW>(static_cast<int>(rows), panels, k, static_cast<const uint16_t*>(a), a_row,
                        static_cast<const uint32_t*>(b), b_panel, c, ldc, scale, alpha, ahead);
    else
        gemm<HOW>(static_cast<int>(rows), panels, k, static_cast<const float*>(a), a_row, a_k,
                  static_cast<const float*>(b), b_panel, c, ldc, scale, alpha, longest, ahead);
}

}  // namespace AF_LEVEL
