// One vector type `vf` of VL floats and its operations, for the level being compiled.
//
// Everything here is GNU vector extensions (gcc and clang), except what they can't express: bits
// to lanes, bf16 and half conversions, and a faster exp2 on AVX-512. No standard template is
// included: an inline copy made for a level could be the one that the linker keeps.
#pragma once
#include <stdint.h>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define AF_INLINE static inline __attribute__((always_inline))
#define AF_FLAT __attribute__((always_inline))  // of a lambda
#define AF_NOINLINE __attribute__((noinline))
#define AF_INLINE_MEMBER inline __attribute__((always_inline))
#define AF_UNROLL _Pragma("GCC unroll 16")

// Lanes of 32 bits of a, then of b, by their numbers.
#if defined(__clang__)
#define AF_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // gcc has clang's name for it from 12 on
#define AF_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, vu{__VA_ARGS__})
#endif

namespace AF_LEVEL {

#if defined(__AVX512F__)
constexpr int VL = 16;
#elif defined(__AVX2__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
// The same types, for loads and stores at any address.
typedef float vf_any __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t vi_any __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint32_t vu_any __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(VL * 2), aligned(2), may_alias));

AF_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
AF_INLINE vu load(const uint32_t* p) { return *reinterpret_cast<const vu_any*>(p); }
AF_INLINE vi load(const int32_t* p) { return *reinterpret_cast<const vi_any*>(p); }
AF_INLINE vh load(const uint16_t* p) { return *reinterpret_cast<const vh_any*>(p); }
AF_INLINE void store(float* p, vf v) { *reinterpret_cast<vf_any*>(p) = v; }
AF_INLINE void store(uint32_t* p, vu v) { *reinterpret_cast<vu_any*>(p) = v; }
AF_INLINE void store(int32_t* p, vi v) { *reinterpret_cast<vi_any*>(p) = v; }
AF_INLINE void store(uint16_t* p, vh v) { *reinterpret_cast<vh_any*>(p) = v; }

AF_INLINE vf splat(float x) { return x - vf{}; }
AF_INLINE vi splat(int32_t x) { return x - vi{}; }
AF_INLINE vu splat(uint32_t x) { return x - vu{}; }

AF_INLINE vi as_int(vf v) { return reinterpret_cast<vi>(v); }
AF_INLINE vu as_uint(vf v) { return reinterpret_cast<vu>(v); }
AF_INLINE vf as_float(vi v) { return reinterpret_cast<vf>(v); }
AF_INLINE vf as_float(vu v) { return reinterpret_cast<vf>(v); }

AF_INLINE vf magnitude(vf x) { return as_float(as_int(x) & 0x7fffffff); }

// The larger of both. If a is NaN, the result is b or NaN; a NaN b is returned.
AF_INLINE vf larger(vf a, vf b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

AF_INLINE vf madd(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

// Whether `madd` rounds once.
#if defined(__FMA__) || defined(__aarch64__)
constexpr bool is_fused = true;
#else
constexpr bool is_fused = false;
#endif

// The rounded value of x: the compiler may not fuse the product that it came from.
AF_INLINE vf rounded(vf x) {
    __asm__("" : "+m"(x));
    return x;
}

// Forces x into a register, where the compiler would read memory for each of its uses.
AF_INLINE void in_register([[maybe_unused]] vf& x) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(x));
#elif defined(__SSE2__)
    __asm__("" : "+x"(x));
#endif
}

// While it lives, this thread's results that would be subnormal are 0 (or, for mods, are not: they
// see floats as everywhere). Weights far from a row's maximum are often subnormal, and each
// product with one would stop an x86 processor for 100 cycles.
class subnormal_results {
   public:
#if defined(__SSE2__)
    explicit subnormal_results(bool kept) : before_(_mm_getcsr()) {
        _mm_setcsr(kept ? before_ & ~0x8000u : before_ | 0x8000u);
    }
    ~subnormal_results() { _mm_setcsr(before_); }

   private:
    unsigned before_;
#else
    explicit subnormal_results(bool) {}
    ~subnormal_results() {}
#endif
    subnormal_results(const subnormal_results&) = delete;
    subnormal_results& operator=(const subnormal_results&) = delete;
};

// Sum and maximum of all lanes, in a fixed order.
template <class F> AF_INLINE float folded(vf v, const F& join) {
    alignas(64) float lane[VL];
    store(lane, v);
    for (int n = VL / 2; n > 0; n /= 2)
        for (int i = 0; i < n; ++i) lane[i] = join(lane[i], lane[i + n]);
    return lane[0];
}
AF_INLINE float sum_of(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(v);
#else
    return folded(v, [](float a, float b) AF_FLAT { return a + b; });
#endif
}
AF_INLINE float largest_of(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(v);
#else
    return folded(v, [](float a, float b) AF_FLAT { return a > b ? a : b; });
#endif
}

// 2^x for x <= 128; 0 for -inf and, mostly, where 2^x is subnormal; NaN for NaN.
// A polynomial over one octave (minimax in relative error on [0, 1)) and the exponent added.
// Degrees 4 and 6 are exact at whole numbers: a row's largest score has weight 1, and so have all
// that equal it. The mean error of degree 4 is 0 too, so that sums of weights don't drift.
template <int DEGREE = 6>
AF_INLINE vf exp2(vf x) {
    static_assert(DEGREE == 6 || DEGREE == 4 || DEGREE == 3, "degrees that have coefficients");
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    // x - floor(x); 0 for an infinite x. vscalefps takes the floor of x itself.
    const vf f = _mm512_reduce_ps(x, 0x09);
#else
    const vf low = splat(-127.0f);
    x = x < low ? low : x;  // NaN stays
    const vi t = __builtin_convertvector(x, vi);
    const vi n = t + (__builtin_convertvector(t, vf) > x);  // floor: a true compare is -1
    const vf f = x - __builtin_convertvector(n, vf);
#endif
    vf p;
    if constexpr (DEGREE == 6) {  // 6.5e-8, 2e-9 of it from the polynomial
        p = splat(0.000216129152f);
        p = madd(p, f, splat(0.00124678470f));
        p = madd(p, f, splat(0.00967545249f));
        p = madd(p, f, splat(0.0554852821f));
        p = madd(p, f, splat(0.240229309f));
        p = madd(p, f, splat(0.693147063f));
        p = madd(p, f, splat(1.0f));
    } else if constexpr (DEGREE == 4) {  // 3.5e-6
        p = splat(0.013543549f);
        p = madd(p, f, splat(0.0520511903f));
        p = madd(p, f, splat(0.241374582f));
        p = madd(p, f, splat(0.693030655f));
        p = madd(p, f, splat(1.0f));
    } else {  // 7.5e-5
        p = splat(0.0780245215f);
        p = madd(p, f, splat(0.226067156f));
        p = madd(p, f, splat(0.695833564f));
        p = madd(p, f, splat(0.999925196f));
    }
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    return _mm512_scalef_ps(p, x);
#else
    const vf r = p * as_float((n + 127) << 23);
    return x <= low ? vf{} : r;
#endif
}

AF_INLINE bool any_bit(vu v) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(v), reinterpret_cast<__m512i>(v));
#else
    uint64_t words[VL / 2], all = 0;
    __builtin_memcpy(words, &v, sizeof words);
    for (int i = 0; i < VL / 2; ++i) all |= words[i];
    return all != 0;
#endif
}

// Which lanes are live.
#if defined(__AVX512F__)
typedef __mmask16 vm;
AF_INLINE vm lanes(const uint16_t* live, int64_t column) { return live[column / 16]; }
AF_INLINE vf where(vm m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); }
#else
typedef vi vm;
AF_INLINE vm lanes_of_bits(int32_t bits) {
    vi bit;
    for (int i = 0; i < VL; ++i) bit[i] = 1 << i;
    return (splat(bits) & bit) != 0;
}
// Bits of VL columns from `column` on (a multiple of VL), of a row of live words.
AF_INLINE vm lanes(const uint16_t* live, int64_t column) {
    return lanes_of_bits(live[column / 16] >> (column % 16));
}
AF_INLINE vf where(vm m, vf a, vf b) { return m ? a : b; }
#endif

// bf16 and half, VL at a time; rounding is to nearest even, NaN stays NaN.
AF_INLINE vf float_of_bf16(vh x) {
#if defined(__AVX512F__)  // gcc 12 widens halves apart
    return as_float(reinterpret_cast<vu>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(x))) << 16);
#elif defined(__AVX2__)
    return as_float(reinterpret_cast<vu>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(x))) << 16);
#else
    return as_float(__builtin_convertvector(x, vu) << 16);
#endif
}
AF_INLINE vh bf16_of_float(vf x) {
#if defined(__AVX512BF16__)
    return reinterpret_cast<vh>(_mm512_cvtneps_pbh(x));
#else
    const vu u = as_uint(x);
    const vu r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const vu nan = (u >> 16) | 0x40u;
    return __builtin_convertvector((u & 0x7fffffffu) > 0x7f800000u ? nan : r, vh);
#endif
}
AF_INLINE vf float_of_half(vh x) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(reinterpret_cast<__m256i>(x));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(reinterpret_cast<__m128i>(x));
#else
    // Shift into place and multiply by 2^112: exact, subnormals included.
    const vu h = __builtin_convertvector(x, vu);
    const vu magnitude = (h & 0x7fffu) << 13;
    const vf scaled = as_float(magnitude) * splat(0x1p112f);
    const vu infinite = reinterpret_cast<vu>(magnitude >= (0x7c00u << 13));
    const vu bits = (as_uint(scaled) & ~infinite) | ((magnitude | 0x7f800000u) & infinite);
    return as_float(bits | ((h & 0x8000u) << 16));
#endif
}
// VL bytes at p: int8, and float8_e4m3fn, which has no infinities.
AF_INLINE vf float_of_int8(const char* p) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    typedef int8_t vb __attribute__((vector_size(VL)));
    vb x;
    __builtin_memcpy(&x, p, sizeof x);
    return __builtin_convertvector(__builtin_convertvector(x, vi), vf);
#endif
}
AF_INLINE vf float_of_f8(const char* p) {
#if defined(__AVX512F__)
    const vu x = reinterpret_cast<vu>(
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    const vu x = reinterpret_cast<vu>(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    typedef uint8_t vb __attribute__((vector_size(VL)));
    vb bytes;
    __builtin_memcpy(&bytes, p, sizeof bytes);
    const vu x = __builtin_convertvector(bytes, vu);
#endif
    // Shift into place and multiply by 2^120: exact, subnormals included.
    const vu size = x & 0x7fu;
    const vu bits = as_uint(as_float(size << 20) * splat(0x1p120f));
    const vu nan = reinterpret_cast<vu>(size == 0x7fu) & 0x7fc00000u;
    return as_float(bits | nan | ((x & 0x80u) << 24));
}
AF_INLINE vh half_of_float(vf x) {
#if defined(__AVX512F__)
    return reinterpret_cast<vh>(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    return reinterpret_cast<vh>(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
    const vu u = as_uint(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    // Normal: rebias and round the 13 bits that go. Subnormal: let a float addition round.
    const vu normal = (a - (112u << 23) + 0xfffu + ((a >> 13) & 1u)) >> 13;
    const vu tiny = as_uint(as_float(a) + splat(0.5f)) - as_uint(splat(0.5f));
    const vu special = reinterpret_cast<vu>(a > 0x7f800000u) & 0x200u;
    vu r = a < (113u << 23) ? tiny : normal;
    r = a >= (143u << 23) ? (special | 0x7c00u) : r;
    return __builtin_convertvector(r | sign, vh);
#endif
}

}  // namespace AF_LEVEL
