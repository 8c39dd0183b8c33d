// Loads of captured tensors of any rank, type and stride, and the element that each index means.
//
// An index in -N..-1 counts from the end, then it is clamped: nothing outside is ever touched. A
// live pair's index outside of [-N, N) is noted in the tile's error. A tensor without elements
// reads as 0, and every live pair of it has read outside.
#pragma once
#include <stddef.h>

#include "lane_blocks.h"

namespace AF_LEVEL {

AF_INLINE bool is_live(const lane_block& t, int row, int column) {
    const af_tile& tile = *t.tile;
    if (column >= tile.cols || row >= tile.rows) return false;
    if (t.all_live || tile.live == nullptr) return true;
    return tile.live[row * tile.live_ld + column / 16] >> (column % 16) & 1;
}

// Whether the pair of this lane's value is live.
AF_INLINE bool is_live_lane(const lane_block& t, int lane) {
    switch (t.where) {
        case PAIRS:
            return is_live(t, t.first_row + t.row, t.first_column + lane);
        case ROWS:
            for (int c = 0; c < t.tile->cols; ++c)
                if (is_live(t, t.first_row + lane, c)) return true;
            return false;
        case COLUMNS:
            for (int r = 0; r < t.rows; ++r)
                if (is_live(t, t.first_row + r, t.first_column + lane)) return true;
            return false;
        default:
            for (int r = 0; r < t.tile->rows; ++r)
                for (int c = 0; c < t.tile->cols; ++c)
                    if (is_live(t, r, c)) return true;
            return false;
    }
}

AF_INLINE int lanes_in_use(const lane_block& t) {
    return t.where == UNIFORM ? 1 : t.where == ROWS ? t.rows : t.columns;
}

// One index of a load or scatter.
struct index_lanes {
    const char* lanes;
    int32_t row;   // the lane to read if it is one value
    int32_t step;  // between lanes, if it has one
    uint8_t wide;
    uint8_t shape;

    int64_t at(int lane) const {
        const int i = shape == AF_ONE ? row : lane;
        return wide ? lanes_of<int64_t>(lanes)[i] : lanes_of<int32_t>(lanes)[i];
    }
};

// Notes the first live lane whose index is outside of [-size, size).
static __attribute__((noinline)) void note_outside(const step& s, const lane_block& t, int dim,
                                                   const index_lanes& index, int64_t size) {
    af_error* error = t.tile->error;
    if (error->code != AF_OK) return;
    const int lanes = lanes_in_use(t);
    for (int i = 0; i < lanes; ++i) {
        const int64_t found = index.at(i);
        if (size > 0 && found >= -size && found < size) continue;
        if (!is_live_lane(t, i)) continue;
        error->code = AF_READ_OUTSIDE;
        error->mod = t.kind == AF_MASK;
        error->captured = s.code->immediate;
        error->dim = dim;
        error->index = found;
        return;
    }
}

AF_INLINE int64_t bounded(int64_t index, int64_t size) {
    index = index < 0 ? index + size : index;
    return index < 0 ? 0 : index >= size ? size - 1 : index;
}

// Adds an index's share to the offsets of all lanes; tells whether one was outside.
template <class O, class I>
AF_INLINE bool add_index(O* offsets, const I* index, int lanes, I size, O stride) {
    const int n = lanes & ~15;
    I beyond = 0;
    AF_LANES_APART
    for (int i = 0; i < n; ++i) {
        I x = index[i];
        beyond |= I(x < -size) | I(x >= size);
        x = x < 0 ? x + size : x;
        x = x < 0 ? 0 : x;
        x = x >= size ? size - 1 : x;
        offsets[i] += O(x) * stride;
    }
    return beyond != 0;
}

// Where the elements of the lanes are: at base + offsets[lane], or at base + lane * step.
struct places {
    int64_t base;
    int64_t step;
    bool scattered;  // offsets count, of type int32_t or int64_t
    bool narrow;
};

// `strides` and `sizes` are those of the indexed tensor; none of the sizes is 0.
static places find_places(const step& s, const lane_block& t, int rank, const int64_t* sizes,
                          const int64_t* strides, bool note) {
    constexpr int64_t MOST = 2147483647;
    places found = {0, 0, false, true};
    int64_t extent = 0;
    for (int dim = 0; dim < rank; ++dim) {
        extent += (sizes[dim] - 1) * strides[dim];
        found.narrow = found.narrow && sizes[dim] <= MOST && strides[dim] <= MOST;
    }
    found.narrow = found.narrow && extent <= MOST;
    int32_t* narrow = static_cast<int32_t*>(t.indices);
    int64_t* wide = static_cast<int64_t*>(t.indices);
    const af_operand* operand = s.list;
    for (int dim = 0; dim < rank; ++dim, ++operand) {
        const int64_t size = sizes[dim], stride = strides[dim];
        index_lanes index = {s.registers + int64_t(operand->slot) * AF_LANES * 4, t.row, 0,
                             operand->wide, operand->shape};
        if (operand->shape == AF_STEP) __builtin_memcpy(&index.step, ++operand, 4);
        const int64_t first = index.at(0);
        if (index.shape == AF_ONE) {
            if (note && (first < -size || first >= size)) note_outside(s, t, dim, index, size);
            found.base += bounded(first, size) * stride;
            continue;
        }
        if (index.shape == AF_STEP) {
            // If both ends are inside, all between them are: no lane wraps.
            const int64_t last = first + int64_t(index.step) * (t.lanes - 1);
            if (first >= 0 && first < size && last >= 0 && last < size) {
                found.base += first * stride;
                found.step += index.step * stride;
                continue;
            }
        }
        if (!found.scattered) {
            __builtin_memset(t.indices, 0, AF_LANES * 8);
            found.scattered = true;
        }
        bool beyond;
        if (found.narrow && !index.wide) {
            beyond = add_index(narrow, lanes_of<int32_t>(index.lanes), t.lanes, int32_t(size),
                               int32_t(stride));
        } else {
            beyond = false;
            for (int i = 0; i < t.lanes; ++i) {
                const int64_t x = index.at(i), share = bounded(x, size) * stride;
                beyond |= x < -size || x >= size;
                if (found.narrow)
                    narrow[i] += int32_t(share);
                else
                    wide[i] += share;
            }
        }
        if (beyond && note) note_outside(s, t, dim, index, size);
    }
    if (found.scattered && found.step != 0) {
        for (int i = 0; i < t.lanes; ++i) {
            if (found.narrow)
                narrow[i] += int32_t(i * found.step);
            else
                wide[i] += i * found.step;
        }
    }
    return found;
}

// Conversions of a tensor's elements to lanes.
template <class S>
struct stored {
    typedef S type;
    template <class D>
    AF_INLINE D lane(S x) {
        return D(x);
    }
};
struct bf16_bits {
    uint16_t bits;
};
template <>
struct stored<bf16_bits> {
    typedef uint16_t type;
    template <class D>
    AF_INLINE D lane(uint16_t x) {
        const uint32_t u = uint32_t(x) << 16;
        float f;
        __builtin_memcpy(&f, &u, 4);
        return f;
    }
};
struct half_bits {
    uint16_t bits;
};
template <>
struct stored<half_bits> {
    typedef uint16_t type;
    template <class D>
    AF_INLINE D lane(uint16_t x) {
        // Shifted into place and multiplied by 2^112: exact, subnormals included.
        const uint32_t size = uint32_t(x & 0x7fff) << 13;
        float f;
        __builtin_memcpy(&f, &size, 4);
        f *= 0x1p112f;
        uint32_t u;
        __builtin_memcpy(&u, &f, 4);
        u = size >= 0x0f800000u ? size | 0x7f800000u : u;
        u |= uint32_t(x & 0x8000) << 16;
        __builtin_memcpy(&f, &u, 4);
        return f;
    }
};

// Lanes of type D from elements of type S.
template <class S, class D>
static void gather(D* d, const char* data, const places& at, const lane_block& t) {
    typedef typename stored<S>::type element;
    const element* from = reinterpret_cast<const element*>(data) + at.base;
    const int n = t.lanes & ~15;
    if (at.scattered && at.narrow) {
        const int32_t* offsets = static_cast<const int32_t*>(t.indices);
        AF_LANES_APART
        for (int i = 0; i < n; ++i) d[i] = stored<S>::template lane<D>(from[offsets[i]]);
    } else if (at.scattered) {
        const int64_t* offsets = static_cast<const int64_t*>(t.indices);
        for (int i = 0; i < n; ++i) d[i] = stored<S>::template lane<D>(from[offsets[i]]);
    } else if (at.step == 0) {
        const D value = stored<S>::template lane<D>(from[0]);
        for (int i = 0; i < n; ++i) d[i] = value;
    } else if (at.step == 1) {
        AF_LANES_APART
        for (int i = 0; i < n; ++i) d[i] = stored<S>::template lane<D>(from[i]);
    } else if (at.step == -1) {
        AF_LANES_APART
        for (int i = 0; i < n; ++i) d[i] = stored<S>::template lane<D>(from[-i]);
    } else {
        for (int i = 0; i < n; ++i) d[i] = stored<S>::template lane<D>(from[i * at.step]);
    }
}

AF_INLINE void note_empty(const step& s, const lane_block& t, const af_captured& tensor) {
    const af_operand* operand = s.list;
    for (int dim = 0; dim < tensor.rank; ++dim, ++operand) {
        const index_lanes index = {s.registers + int64_t(operand->slot) * AF_LANES * 4, t.row, 0,
                                   operand->wide, operand->shape};
        if (tensor.size[dim] == 0) return note_outside(s, t, dim, index, 0);
        if (operand->shape == AF_STEP) ++operand;
    }
}

// Fills the lanes of one load. K is the kind of the register.
template <char K>
static void load_lanes(const step& s, const lane_block& t) {
    const af_captured& tensor = t.tile->inputs->captured[s.code->immediate];
    bool empty = false;
    for (int dim = 0; dim < tensor.rank; ++dim) empty |= tensor.size[dim] == 0;
    if (empty) {
        note_empty(s, t, tensor);
        if constexpr (K == 'p')
            fill_bits(s.d, false, t.lanes);
        else
            __builtin_memset(s.d, 0, size_t(t.lanes) * (K == 'l' || K == 'd' ? 8 : 4));
        return;
    }
    const places at = find_places(s, t, tensor.rank, tensor.size, tensor.stride, true);
    const char* data = static_cast<const char*>(tensor.data);
    if constexpr (K == 'p') {
        alignas(64) int32_t lane[AF_LANES];
        gather<uint8_t>(lane, data, at, t);
        uint16_t* d = lanes_of<uint16_t>(s.d);
        for (int i = 0; i < t.lanes; i += 16) {
            uint32_t word = 0;
            for (int j = 0; j < 16; j += VL)
                word |= bits_of(vector_at(lane + i + j) != 0) << j;
            d[i / 16] = uint16_t(word);
        }
    } else if constexpr (K == 'i') {
        int32_t* d = lanes_of<int32_t>(s.d);
        switch (tensor.type) {
            case AF_T_U8:
                return gather<uint8_t>(d, data, at, t);
            case AF_T_I8:
                return gather<int8_t>(d, data, at, t);
            case AF_T_I16:
                return gather<int16_t>(d, data, at, t);
            default:
                return gather<int32_t>(d, data, at, t);
        }
    } else if constexpr (K == 'l') {
        gather<int64_t>(lanes_of<int64_t>(s.d), data, at, t);
    } else if constexpr (K == 'f') {
        float* d = lanes_of<float>(s.d);
        switch (tensor.type) {
            case AF_T_F16:
                return gather<half_bits>(d, data, at, t);
            case AF_T_BF16:
                return gather<bf16_bits>(d, data, at, t);
            default:
                return gather<float>(d, data, at, t);
        }
    } else {
        gather<double>(lanes_of<double>(s.d), data, at, t);
    }
}

}  // namespace AF_LEVEL
