// Steps of a program as they run: a function on lanes, and the ways to write one.
//
// Loops over lanes are plain scalar loops that the compiler vectorises, except comparisons to
// bits, bits to lanes and elementary functions, which it can't. Registers of a step are the same
// one or disjoint, never shifted against each other, so that no lane waits for another (ivdep).
#pragma once
#include "anyflex_cpu.h"
#include "bytecode.h"
#include "simd.h"

#if defined(__clang__)
#define AF_LANES_APART _Pragma("clang loop vectorize(assume_safety)")
#else
#define AF_LANES_APART _Pragma("GCC ivdep")
#endif

namespace AF_LEVEL {

enum section { UNIFORM, ROWS, COLUMNS, PAIRS };

// The rows and columns that a step runs on: `lanes` is a multiple of 16, at most AF_LANES.
struct lane_block {
    int32_t lanes;
    int32_t row;     // in the block of rows: the lane of operands that are one value
    int32_t first_row, first_column;  // of the block, in the tile
    int32_t rows;    // in the block
    int32_t columns; // in the block
    section where;
    const af_tile* tile;
    int32_t kind;    // of the program
    bool all_live;   // whatever the tile's live bits say: a mask program is still to make them
    void* indices;   // room for AF_LANES int64
};

struct step;
typedef void (*step_function)(const step&, const lane_block&);

struct alignas(64) step {
    step_function run;
    char *d, *a, *b, *c;
    const af_step* code;
    const af_operand* list;
    char* registers;
};

// An address in a step that advances with the row: of scores, gradients or live bits.
struct moving {
    char** address;
    char* begin;
    int64_t row_bytes;
    int64_t block_bytes;
};
static_assert(sizeof(step) + 4 * sizeof(moving) == AF_STEP_SCRATCH, "what a step needs");

template <class T>
AF_INLINE T* lanes_of(char* p) {
    return reinterpret_cast<T*>(p);
}
template <class T>
AF_INLINE const T* lanes_of(const char* p) {
    return reinterpret_cast<const T*>(p);
}

// D lane = F::of(A lane); LANES of a D: 16 of a word of bits.
template <class F, class D, class A, int LANES = 1>
static void unary(const step& s, const lane_block& t) {
    D* d = lanes_of<D>(s.d);
    const A* a = lanes_of<A>(s.a);
    const int n = (t.lanes & ~15) / LANES;
    AF_LANES_APART
    for (int i = 0; i < n; ++i) d[i] = F::of(a[i]);
}

// T lane = F::of(T lane, T lane), or with one value for all lanes.
template <class F, class T>
static void binary(const step& s, const lane_block& t) {
    T* d = lanes_of<T>(s.d);
    const T *a = lanes_of<T>(s.a), *b = lanes_of<T>(s.b);
    const int n = t.lanes & ~15;
    AF_LANES_APART
    for (int i = 0; i < n; ++i) d[i] = F::of(a[i], b[i]);
}
template <class F, class T>
static void binary_one(const step& s, const lane_block& t) {
    T* d = lanes_of<T>(s.d);
    const T* a = lanes_of<T>(s.a);
    const T b = lanes_of<T>(s.b)[t.row];
    const int n = t.lanes & ~15;
    AF_LANES_APART
    for (int i = 0; i < n; ++i) d[i] = F::of(a[i], b);
}

// Float lanes through a function of vectors.
template <class F>
static void vectors(const step& s, const lane_block& t) {
    float* d = lanes_of<float>(s.d);
    const float* a = lanes_of<float>(s.a);
    for (int i = 0; i < t.lanes; i += VL) store(d + i, F::of(load(a + i)));
}

// Vectors of doubles and int64, half as many lanes as vf.
constexpr int VD = VL / 2;
typedef double vd __attribute__((vector_size(VL * 4)));
typedef int64_t vl __attribute__((vector_size(VL * 4)));

template <int BYTES>
struct mask_of_lanes {
    typedef vi type;
};
template <>
struct mask_of_lanes<8> {
    typedef vl type;
};
template <class T>
struct vector_of {
    typedef T type __attribute__((vector_size(VL * 4)));
    typedef typename mask_of_lanes<sizeof(T)>::type mask;
};

// The lowest bit of the returned number is that of lane 0.
AF_INLINE uint32_t bits_of(vi mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask));
#elif defined(__AVX2__)
    return uint32_t(_mm256_movemask_ps(reinterpret_cast<__m256>(mask)));
#elif defined(__SSE2__)
    return uint32_t(_mm_movemask_ps(reinterpret_cast<__m128>(mask)));
#elif defined(__aarch64__)
    const uint32x4_t bit = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(reinterpret_cast<uint32x4_t>(mask), bit));
#else
    uint32_t bits = 0;
    for (int i = 0; i < VL; ++i) bits |= uint32_t(mask[i] & 1) << i;
    return bits;
#endif
}
AF_INLINE uint32_t bits_of(vl mask) {
#if defined(__AVX512F__)
    return _mm512_movepi64_mask(reinterpret_cast<__m512i>(mask));
#elif defined(__AVX2__)
    return uint32_t(_mm256_movemask_pd(reinterpret_cast<__m256d>(mask)));
#elif defined(__SSE2__)
    return uint32_t(_mm_movemask_pd(reinterpret_cast<__m128d>(mask)));
#else
    uint32_t bits = 0;
    for (int i = 0; i < VD; ++i) bits |= uint32_t(mask[i] & 1) << i;
    return bits;
#endif
}

// The mask of the lanes of a vector of 4- or 8-byte lanes whose bits are set.
AF_INLINE vi mask_of(uint32_t bits, vi) {
#if defined(__AVX512F__)
    return reinterpret_cast<vi>(_mm512_movm_epi32(__mmask16(bits)));
#else
    return lanes_of_bits(int32_t(bits));
#endif
}
AF_INLINE vl mask_of(uint32_t bits, vl) {
#if defined(__AVX512F__)
    return reinterpret_cast<vl>(_mm512_movm_epi64(__mmask8(bits)));
#else
    vl bit;
    for (int i = 0; i < VD; ++i) bit[i] = 1 << i;
    return ((vl{} + int64_t(bits)) & bit) != 0;
#endif
}

template <class T>
AF_INLINE typename vector_of<T>::type vector_at(const T* p) {
    return *reinterpret_cast<const typename vector_of<T>::type*>(p);
}

// bits = F::of(lane, lane)
template <class F, class T, bool ONE>
static void comparison(const step& s, const lane_block& t) {
    typedef typename vector_of<T>::type vector;
    constexpr int WIDTH = int(sizeof(vector) / sizeof(T));
    uint16_t* d = lanes_of<uint16_t>(s.d);
    const T *a = lanes_of<T>(s.a), *b = lanes_of<T>(s.b);
    const vector one = (ONE ? b[t.row] : T(0)) - vector{};
    for (int i = 0; i < t.lanes; i += 16) {
        uint32_t word = 0;
        AF_UNROLL
        for (int j = 0; j < 16; j += WIDTH) {
            const vector x = vector_at(a + i + j), y = ONE ? one : vector_at(b + i + j);
            word |= F::bits(x, y) << j;
        }
        d[i / 16] = uint16_t(word);
    }
}

// lane = bit ? lane : lane
template <class T, bool ONE_X, bool ONE_Y>
static void selection(const step& s, const lane_block& t) {
    typedef typename vector_of<T>::type vector;
    typedef typename vector_of<T>::mask mask;
    constexpr int WIDTH = int(sizeof(vector) / sizeof(T));
    T* d = lanes_of<T>(s.d);
    const uint16_t* a = lanes_of<uint16_t>(s.a);
    const T *b = lanes_of<T>(s.b), *c = lanes_of<T>(s.c);
    const vector one_x = (ONE_X ? b[t.row] : T(0)) - vector{};
    const vector one_y = (ONE_Y ? c[t.row] : T(0)) - vector{};
    for (int i = 0; i < t.lanes; i += 16) {
        const uint32_t word = a[i / 16];
        AF_UNROLL
        for (int j = 0; j < 16; j += WIDTH) {
            const vector x = ONE_X ? one_x : vector_at(b + i + j);
            const vector y = ONE_Y ? one_y : vector_at(c + i + j);
            const mask m = mask_of(word >> j, mask{});
            *reinterpret_cast<vector*>(d + i + j) = m ? x : y;
        }
    }
}

// Words of bits.
template <class F>
static void bitwise(const step& s, const lane_block& t) {
    uint16_t* d = lanes_of<uint16_t>(s.d);
    const uint16_t *a = lanes_of<uint16_t>(s.a), *b = lanes_of<uint16_t>(s.b);
    const int n = t.lanes / 16;
    AF_LANES_APART
    for (int i = 0; i < n; ++i) d[i] = uint16_t(F::of(uint32_t(a[i]), uint32_t(b[i])));
}

template <class T>
AF_INLINE void fill(char* to, T value, int lanes) {
    T* d = lanes_of<T>(to);
    const int n = lanes & ~15;
    for (int i = 0; i < n; ++i) d[i] = value;
}
AF_INLINE void fill_bits(char* to, bool value, int lanes) {
    uint16_t* d = lanes_of<uint16_t>(to);
    for (int i = 0; i < lanes / 16; ++i) d[i] = value ? 0xffff : 0;
}

}  // namespace AF_LEVEL
