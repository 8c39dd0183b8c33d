// Dropout: which pairs of a query row are kept.
//
// A pair's 32 random bits are a hash of its key's index under two keys of its row, which are
// hashes of the seed and the row's indices; docs/plugins-advanced.md has the function. Every backend has
// the same bits, so they don't depend on tiles, and backward makes forward's again.
#pragma once
#include "anyflex_cpu.h"
#include "simd.h"

namespace AF_LEVEL {

struct row_keys {
    uint32_t first, second;
};

// Two rounds of multiplication; `between` is added to the hash of a pair after the first one.
template <class WORD> AF_INLINE WORD hashed(WORD word, WORD between) {
    word = ((word ^ (word >> 16)) * 0x21f0aaadu) ^ between;
    word = (word ^ (word >> 15)) * 0x735a2d97u;
    return word ^ (word >> 15);
}

inline bool has_dropout(const af_problem& p) { return p.dropout_threshold != 0; }

// Keys of query row q of (b, h).
inline row_keys keys_of_row(const af_problem& p, int64_t b, int64_t h, int64_t q) {
    const int64_t* offset = p.inputs.offset;
    uint32_t key[2];
    for (int i = 0; i < 2; ++i) {
        key[i] = hashed(p.dropout_words[i] ^ static_cast<uint32_t>(b + offset[0]), 0u);
        key[i] = hashed(key[i] ^ static_cast<uint32_t>(h + offset[1]), 0u);
        key[i] = hashed(key[i] ^ static_cast<uint32_t>(q + offset[2]), 0u);
    }
    return {key[0], key[1]};
}

// Bits of the 16 pairs of a row with keys from `kv` on: 1 where a pair is kept.
AF_INLINE uint16_t kept_bits(const af_problem& p, row_keys row, int64_t kv) {
    const uint32_t begin = static_cast<uint32_t>(kv + p.inputs.offset[3]);
    vu lane;
    for (int i = 0; i < VL; ++i) lane[i] = static_cast<uint32_t>(i);
    uint32_t kept = 0;
    for (int c = 0; c < 16; c += VL) {
        const vu key = lane + splat(begin + static_cast<uint32_t>(c));
        const vu bits = hashed(splat(row.first) ^ key, splat(row.second));
#if defined(__AVX512F__)
        kept |= _mm512_cmpge_epu32_mask(reinterpret_cast<__m512i>(bits),
                                        _mm512_set1_epi32(static_cast<int>(p.dropout_threshold)));
#else
        const vi is_kept = reinterpret_cast<vi>(bits >= splat(p.dropout_threshold));
#if defined(__AVX2__)
        kept |= static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(is_kept))) << c;
#else
        for (int i = 0; i < VL; ++i) kept |= static_cast<uint32_t>(is_kept[i] & 1) << (c + i);
#endif
#endif
    }
    return static_cast<uint16_t>(kept);
}

// Clears the dropped weights among the 16 of `weight`, of keys from `kv` on; returns `kept_bits`.
AF_INLINE uint16_t drop_weights(const af_problem& p, row_keys row, int64_t kv, float* weight) {
    const uint16_t kept = kept_bits(p, row, kv);
    for (int c = 0; c < 16; c += VL)
        store(weight + c, where(lanes(&kept, c), load(weight + c), vf{}));
    return kept;
}

}  // namespace AF_LEVEL
