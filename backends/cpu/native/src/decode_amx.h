// The two products of decoding on AMX tiles, which take keys and values as they lie in memory.
//
// Both go over turns of 64 columns, 16 of each stream. A tile load waits for all of its lines, so
// each product prefetches the lines of the turn after it: a few of every stream beside each tile,
// in the order of their addresses, because that order triggers the hardware prefetcher.
#pragma once
#include "decode_products.h"

#if defined(__AMX_BF16__)
namespace AF_LEVEL {

static_assert(streams == 4, "a tile of scores for each");
constexpr int tile_keys = 16;
constexpr int64_t turn_columns = streams * tile_keys;

// Columns [begin, end); their number is a multiple of a turn's columns.
struct tile_columns {
    int64_t begin, end;
    int64_t stride() const { return (end - begin) / streams; }
    int64_t turns() const { return (end - begin) / turn_columns; }
};

// Returns the whole turns of [begin, end); the vector kernels take the remaining columns.
AF_INLINE tile_columns columns_for_tiles(int64_t begin, int64_t end) {
    return {begin, begin + (end - begin) / turn_columns * turn_columns};
}

// Whether the columns from `begin` on are neighbours by the keys of a tile.
AF_INLINE bool are_on_tiles(const column_rows& rows, int64_t begin) {
    return rows.shift >= 4 && begin % tile_keys == 0;
}

// `dim` elements of the rows of a turn, 16 of each of four streams, which begin at these addresses.
struct stream_block {
    const char* stream[streams];
    int64_t row, width;  // bytes: from a row to the next, and of one
};

// Returns those of columns first, first + stride and so on, from element d on.
AF_INLINE stream_block block_of(const column_rows& rows, int64_t first, int64_t stride, int64_t d,
                                int64_t dim) {
    stream_block b;
    for (int s = 0; s < streams; ++s) b.stream[s] = rows.at(first + s * stride) + d * rows.col * 2;
    b.row = rows.row * 2;
    b.width = dim * 2;
    return b;
}

// Prefetches the lines of a turn into L1.
class turn_ahead {
   public:
    AF_INLINE_MEMBER explicit turn_ahead(const stream_block& turn)
        : turn_(turn), line_(0), end_(turn.width) {}
    // Prefetches four lines of each stream: the share of a tile, which is 16 lines of one stream.
    AF_INLINE_MEMBER void fetch() {
        AF_UNROLL
        for (int i = 0; i < 4; ++i) {
            AF_UNROLL
            for (int s = 0; s < streams; ++s) __builtin_prefetch(turn_.stream[s] + line_, 0, 3);
            line_ += 64;
            if (line_ < end_) continue;
            line_ = end_ - turn_.width + turn_.row;
            end_ = line_ + turn_.width;
        }
    }

   private:
    const stream_block turn_;
    int64_t line_, end_;
};

// Columns 0 to 3 of a matrix of 16 rows of 16.
AF_INLINE void four_columns(const float* m, vf (&column)[4]) {
    __m512d x[4];
    AF_UNROLL
    for (int i = 0; i < 4; ++i) {  // rows i, i + 4, i + 8 and i + 12
        __m512 rows = _mm512_castps128_ps512(_mm_loadu_ps(m + i * 16));
        rows = _mm512_insertf32x4(rows, _mm_loadu_ps(m + (i + 4) * 16), 1);
        rows = _mm512_insertf32x4(rows, _mm_loadu_ps(m + (i + 8) * 16), 2);
        rows = _mm512_insertf32x4(rows, _mm_loadu_ps(m + (i + 12) * 16), 3);
        x[i] = _mm512_castps_pd(rows);
    }
    const auto low = [](__m512d a, __m512d b) AF_FLAT {
        return _mm512_castps_pd(_mm512_unpacklo_ps(_mm512_castpd_ps(a), _mm512_castpd_ps(b)));
    };
    const auto high = [](__m512d a, __m512d b) AF_FLAT {
        return _mm512_castps_pd(_mm512_unpackhi_ps(_mm512_castpd_ps(a), _mm512_castpd_ps(b)));
    };
    const __m512d a = low(x[0], x[1]), b = high(x[0], x[1]);
    const __m512d c = low(x[2], x[3]), d = high(x[2], x[3]);
    column[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    column[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    column[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    column[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
}

// Stores tiles 0 to 3, which hold sums.
AF_INLINE void store_sums(float (&sums)[4][16 * 16]) {
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
}

// score[row][c] = scale * (q row . key c), for 16 keys of each stream. Keys are the left side.
static void score_turn(const decode_query& q, int rows, const stream_block& key,
                       const stream_block& next, float scale, float* score, int64_t ld,
                       int64_t stride) {
    const auto& k = key.stream;
    for (int r = 0; r < rows; r += 16) {
        const uint32_t* b = q.tiles + r / NR * (q.width / 2) * NR + r % NR;
        turn_ahead ahead(next);
        tiles_zero<2>();
        for (int64_t d = 0; d < key.width; d += 64, b += 16 * NR) {
            _tile_loadd(6, b, NR * 4);
            _tile_loadd(4, k[0] + d, key.row);
            _tile_dpbf16ps(0, 4, 6);
            ahead.fetch();
            _tile_loadd(5, k[1] + d, key.row);
            _tile_dpbf16ps(1, 5, 6);
            ahead.fetch();
            _tile_loadd(4, k[2] + d, key.row);
            _tile_dpbf16ps(2, 4, 6);
            ahead.fetch();
            _tile_loadd(5, k[3] + d, key.row);
            _tile_dpbf16ps(3, 5, 6);
            ahead.fetch();
        }
        alignas(64) float sums[streams][16 * 16];
        store_sums(sums);
        for (int s = 0; s < streams; ++s)
            for (int i = r; i < r + 16 && i < rows; i += 4) {
                vf x[4];
                four_columns(sums[s] + i - r, x);
                for (int j = 0; j < 4 && i + j < rows; ++j)
                    store(score + (i + j) * ld + s * stride, x[j] * splat(scale));
            }
    }
}

// Scores of all rows. `next` is read afterwards.
static void score_tiles(const decode_query& q, int rows, const column_rows& key, int64_t dim,
                        const tile_columns& columns, const stream_block& next, float scale,
                        float* score, int64_t ld) {
    const int64_t turns = columns.turns(), stride = columns.stride();
    if (turns == 0) return;
    const auto turn = [&](int64_t t) AF_FLAT {
        return t < turns ? block_of(key, columns.begin + t * tile_keys, stride, 0, dim) : next;
    };
    stream_block now = turn(0);
    for (int64_t t = 0; t < turns; ++t) {
        const stream_block ahead = turn(t + 1);
        score_turn(q, rows, now, ahead, scale, score + columns.begin + t * tile_keys, ld, stride);
        now = ahead;
    }
}

// A row of values is a row of the right side as it lies in memory, but its pairs are neighbours in
// that row and not two keys. So a weight stands beside a 0 twice: once for the even elements and
// once for the odd ones. A weight is two bf16, its rounded value and the residual: 16 rows for
// each 4.
constexpr int value_rows_a_tile = 4;
constexpr int64_t value_dim_a_pass = 4 * 2 * VL;  // four tiles of sums

// Weights of up to 4 rows as words of 16: the low half of a word has the weight (rows 0 to 3) and
// the residual (4 to 7), the high half the same (8 to 15); the other half is 0. Rows without
// weights keep old contents: nobody reads their products.
static void spread_weights(const float* weight, int64_t ld, int rows, const tile_columns& columns,
                           uint32_t* words) {
    const auto rounded_words = [](vf x) AF_FLAT {
        return reinterpret_cast<vu>(
            _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(bf16_of_float(x))));
    };
    const int64_t group = value_rows_a_tile * ld;
    for (int r = 0; r < rows; ++r)
        for (int64_t c = columns.begin; c < columns.end; c += VL) {
            const vf w = load(weight + r * ld + c);
            const vu word = rounded_words(w), rest = rounded_words(w - as_float(word << 16));
            uint32_t* to = words + r * ld + c;
            store(to, word);
            store(to + group, rest);
            store(to + 2 * group, word << 16);
            store(to + 3 * group, rest << 16);
        }
}

// One pass over up to 4 rows and `dim` elements of each value from element d on, 128 at most.
// `words` begin at the first column.
static void value_pass(const uint32_t* words, int64_t ld, int rows, const tile_columns& columns,
                       const column_rows& value, int64_t d, int64_t dim, const stream_block& next,
                       float* out, int64_t width) {
    const int64_t turns = columns.turns(), stride = columns.stride();
    const auto turn = [&](int64_t t) AF_FLAT {
        return t < turns ? block_of(value, columns.begin + t * tile_keys, stride, d, dim) : next;
    };
    tiles_zero<2>();
    stream_block now = turn(0);
    for (int64_t t = 0; t < turns; ++t) {
        const stream_block after = turn(t + 1);
        turn_ahead ahead(after);
        for (int s = 0; s < streams; ++s) {
            const char* v = now.stream[s];
            _tile_loadd(4, words + t * tile_keys + s * stride, ld * 4);
            _tile_loadd(5, v, now.row);
            _tile_dpbf16ps(0, 4, 5);
            ahead.fetch();
            if (now.width > 64) {
                _tile_loadd(6, v + 64, now.row);
                _tile_dpbf16ps(1, 4, 6);
                ahead.fetch();
            }
            if (now.width > 128) {
                _tile_loadd(5, v + 128, now.row);
                _tile_dpbf16ps(2, 4, 5);
                ahead.fetch();
            }
            if (now.width > 192) {
                _tile_loadd(6, v + 192, now.row);
                _tile_dpbf16ps(3, 4, 6);
                ahead.fetch();
            }
        }
        now = after;
    }
    alignas(64) float sums[4][16 * 16];
    store_sums(sums);
    constexpr int group = value_rows_a_tile * 16;
    for (int r = 0; r < rows; ++r)
        for (int64_t i = 0; i < dim / (2 * VL); ++i) {
            const float* sum = sums[i] + r * 16;
            const vf even = load(sum) + load(sum + group);
            const vf odd = load(sum + 2 * group) + load(sum + 3 * group);
            float* to = out + r * width + i * 2 * VL;
            vf both[2];
            interleave(even, odd, both);
            store(to, load(to) + both[0]);
            store(to + VL, load(to + VL) + both[1]);
        }
}

// out[row][width] += weight[row][c] * value[c]. `words` has room for 16 rows as wide as the
// weights; `next` is what is read afterwards.
static void value_tiles(const float* weight, int64_t ld, int rows, const column_rows& value,
                        int64_t dim, const tile_columns& columns, const stream_block& next,
                        uint32_t* words, float* out, int64_t width) {
    if (columns.turns() == 0) return;
    const auto pass = [&](int64_t d) AF_FLAT { return smaller(dim - d, value_dim_a_pass); };
    for (int r = 0; r < rows; r += value_rows_a_tile) {
        const int n = static_cast<int>(smaller(rows - r, value_rows_a_tile));
        spread_weights(weight + r * ld, ld, n, columns, words);
        for (int64_t d = 0; d < dim; d += value_dim_a_pass)
            value_pass(words + columns.begin, ld, n, columns, value, d, pass(d),
                       d + value_dim_a_pass < dim
                           ? block_of(value, columns.begin, columns.stride(), d + value_dim_a_pass,
                                      pass(d + value_dim_a_pass))
                           : next,
                       out + r * width + d, width);
    }
}

}  // namespace AF_LEVEL
#endif
