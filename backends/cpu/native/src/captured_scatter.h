// Additions to the gradients of captured tensors.
#pragma once
#include "captured_loads.h"

namespace AF_LEVEL {

// 16 values as doubles; dead ones are 0, even if they are non-finite.
template <class T, bool ONE>
AF_INLINE void keep_live(double* kept, const T* values, uint32_t live) {
    typedef T part __attribute__((vector_size(VD * sizeof(T)), aligned(sizeof(T)), may_alias));
    for (int j = 0; j < 16; j += VD) {
        vd v;
        if constexpr (ONE)
            v = double(*values) - vd{};
        else
            v = __builtin_convertvector(*reinterpret_cast<const part*>(values + j), vd);
        const vl m = mask_of(live >> j & ((1u << VD) - 1), vl{});
        *reinterpret_cast<vd*>(kept + j) = reinterpret_cast<vd>(reinterpret_cast<vl>(v) & m);
    }
}

// Adds 16 values (dead ones are 0) at the places of the lanes from `lane` on. Only the first
// `columns` lanes are columns of the tile.
AF_INLINE void add_sixteen(double* grad, double* sums, const double* kept, const places& at,
                           const void* indices, int lane, int columns, uint32_t live) {
    if (at.scattered) {
        const int32_t* narrow = static_cast<const int32_t*>(indices);
        const int64_t* wide = static_cast<const int64_t*>(indices);
        for (; live != 0; live &= live - 1) {
            const int j = __builtin_ctz(live);
            grad[at.narrow ? narrow[lane + j] : wide[lane + j]] += kept[j];
        }
    } else if (at.step == 0) {
        for (int j = 0; j < 16; ++j) sums[j] += kept[j];
    } else if (at.step == 1 && columns == 16) {
        for (int j = 0; j < 16; ++j) grad[lane + j] += kept[j];
    } else {
        for (int j = 0; j < columns; ++j) grad[(lane + j) * at.step] += kept[j];
    }
}

// Adds the values of live pairs to a captured tensor's gradient, dense and row-major, in a fixed
// order.
template <class T, bool ONE>
static void scatter_lanes(const step& s, const lane_block& t) {
    constexpr int MOST_DIMS = 64;  // torch's
    const af_captured& tensor = t.tile->inputs->captured[s.code->immediate];
    double* const* grads = t.tile->captured_grad;
    double* grad = grads == nullptr ? nullptr : grads[s.code->immediate];
    if (grad == nullptr || tensor.rank > MOST_DIMS) return;
    int64_t strides[MOST_DIMS];
    int64_t elements = 1;
    for (int dim = tensor.rank - 1; dim >= 0; --dim) {
        strides[dim] = elements;
        elements *= tensor.size[dim];
    }
    if (elements == 0) return;
    const places at = find_places(s, t, tensor.rank, tensor.size, strides, false);
    const T* values = lanes_of<T>(s.a);
    const uint16_t* live = t.tile->live;
    if (live != nullptr)
        live += (t.first_row + t.row) * t.tile->live_ld + t.first_column / 16;
    grad += at.base;
    alignas(64) double sums[16] = {};
    for (int i = 0; i < t.lanes; i += 16) {
        const int columns = t.columns - i < 16 ? t.columns - i : 16;
        uint32_t word = live == nullptr ? 0xffffu : live[i / 16];
        word &= (1u << columns) - 1;
        if (word == 0) continue;
        alignas(64) double kept[16];
        keep_live<T, ONE>(kept, values + (ONE ? t.row : i), word);
        add_sixteen(grad, sums, kept, at, t.indices, i, columns, word);
    }
    if (!at.scattered && at.step == 0)
        for (int j = 0; j < 16; ++j) grad[0] += sums[j];
}

}  // namespace AF_LEVEL
