// One score and mask function with captured tensors, drawn at random: for the formula, and as
// native functions on tiles, as compiled mods are. bytecode_mods.h has the same for the
// interpreter.
//
//   score = cap * tanh(s / cap) + slope * (kv - q) + table[h][index[kv] + (q & 3)]
//   live  = (kept[kv] or q & stripe) and 0 <= q + shift - kv < window + 7 * (h & 1)
//
// with any of the terms left out. Keys that no row keeps may have an index far outside.
#pragma once
#include <atomic>
#include <cmath>
#include <functional>
#include <thread>

#include "tensors.h"

namespace native_test {

// A captured tensor of up to two dimensions; each stride is `gap` times what it would be.
struct captured_tensor {
    void make(int32_t of_type, std::vector<int64_t> of_size, int64_t gap) {
        type = of_type;
        size = of_size;
        stride.assign(size.size(), gap);
        int64_t elements = 1;
        for (size_t dim = size.size(); dim-- > 0;) {
            stride[dim] = elements * gap;
            elements *= size[dim];
        }
        data.assign(elements == 0 ? 1 : ((elements - 1) * gap + 1) * bytes(), 0);
        view = {data.data(), size.data(), stride.data(), type, int32_t(size.size())};
    }
    int64_t bytes() const {
        const int64_t of_type[] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8};
        return of_type[type];
    }
    void set(int64_t place, double x) {
        char* to = data.data() + place * bytes();
        const int64_t whole = static_cast<int64_t>(x);
        const float f = static_cast<float>(x);
        if (type == AF_T_F64) std::memcpy(to, &x, 8);
        else if (type == AF_T_F32) put(to, AF_F32, f);
        else if (type == AF_T_BF16) put(to, AF_BF16, f);
        else if (type == AF_T_F16) put(to, AF_F16, f);
        else std::memcpy(to, &whole, bytes());  // little-endian, as all that we test on
    }
    double at(int64_t place) const {
        const char* from = data.data() + place * bytes();
        const auto as = [&](auto x) {
            std::memcpy(&x, from, sizeof x);
            return double(x);
        };
        switch (type) {
            case AF_T_BOOL: case AF_T_U8: return as(uint8_t());
            case AF_T_I8: return as(int8_t());
            case AF_T_I16: return as(int16_t());
            case AF_T_I32: return as(int32_t());
            case AF_T_I64: return as(int64_t());
            case AF_T_F16: return got(from, AF_F16);
            case AF_T_BF16: return got(from, AF_BF16);
            case AF_T_F32: return as(float());
            default: return as(double());
        }
    }
    int32_t type = AF_T_F32;
    std::vector<int64_t> size, stride;
    std::vector<char> data;
    af_captured view = {};
};

enum { SLOPE, TABLE, INDEX, KEPT, CAPTURED };
enum { WINDOW, SHIFT, STRIPE, INTS };

struct mods {
    double cap = 0;  // 0: none
    bool sloped = false, tabled = false, masked = false;
    bool by_head = false;
    int64_t ints[INTS] = {};
    captured_tensor slope, table, index, kept;
    // Results of the formula: gradients of slope and table, and the sum of the absolute terms,
    // which rounding is relative to.
    std::vector<double> slope_grad{0}, slope_size{0}, table_grad, table_size;
    // Whether several threads have run the native functions below.
    mutable std::atomic<size_t> first_thread{0};
    mutable std::atomic<bool> several_threads{false};

    bool modified() const { return cap > 0 || sloped || tabled; }
    int64_t entries() const { return table.size[1]; }

    bool live(int64_t h, int64_t q, int64_t k) const {
        if (!masked) return true;
        const int64_t wide = ints[WINDOW] + (by_head ? 7 * (h & 1) : 0);
        const int64_t behind = q + ints[SHIFT] - k;
        if (behind < 0 || behind >= wide) return false;
        return (q & ints[STRIPE]) != 0 || kept.at(k * kept.stride[0]) != 0;
    }
    int64_t position(int64_t q, int64_t k) const {
        return static_cast<int64_t>(index.at(k * index.stride[0])) + (q & 3);
    }
    bool outside(int64_t q, int64_t k) const {
        const int64_t p = position(q, k);
        return p < -entries() || p >= entries();
    }
    int64_t entry(int64_t q, int64_t k) const {
        const int64_t p = position(q, k) + (position(q, k) < 0 ? entries() : 0);
        return p < 0 ? 0 : p >= entries() ? entries() - 1 : p;
    }
    double value(double s, int64_t h, int64_t q, int64_t k) const {
        if (cap > 0) s = cap * std::tanh(s / cap);
        if (sloped) s += slope.at(0) * double(k - q);
        if (tabled) s += table.at(h * table.stride[0] + entry(q, k) * table.stride[1]);
        return s;
    }
    double derivative(double s) const {
        if (cap == 0) return 1;
        const double t = std::tanh(s / cap);
        return 1 - t * t;
    }
    // `size`: absolute terms of the difference that `grad` is.
    void learn(double grad, double size, int64_t h, int64_t q, int64_t k) {
        slope_grad[0] += grad * double(k - q);
        slope_size[0] += size * std::fabs(double(k - q));
        if (!tabled) return;
        table_grad[h * entries() + entry(q, k)] += grad;
        table_size[h * entries() + entry(q, k)] += size;
    }
    void note_thread() const {
        const size_t mine = std::hash<std::thread::id>()(std::this_thread::get_id()) | 1;
        size_t found = 0;
        if (!first_thread.compare_exchange_strong(found, mine) && found != mine)
            several_threads = true;
    }
};

// The mods of a program: its code.
// As compiled code and the interpreter do for a live pair.
inline void note_outside(const af_tile* t, int64_t index) {
    if (t->error->code == AF_OK) *t->error = {AF_READ_OUTSIDE, 0, TABLE, 1, index};
}

inline const mods& mods_of(const af_program* program) {
    const mods& m = *static_cast<const mods*>(program->code);
    m.note_thread();
    return m;
}
inline bool is_live(const af_tile* t, int r, int c) {
    return !t->live || (t->live[r * t->live_ld + c / 16] >> (c % 16) & 1) != 0;
}

inline void native_mask(const af_program* program, const af_tile* t) {
    const mods& m = mods_of(program);
    for (int r = 0; r < t->rows; ++r)
        for (int word = 0; word < (t->cols + 15) / 16; ++word) {
            uint16_t bits = 0;
            for (int i = 0; i < 16; ++i) {
                const int c = word * 16 + i;
                if (c < t->cols && m.live(t->h, t->q + r, t->kv + c))
                    bits = static_cast<uint16_t>(bits | 1u << i);
            }
            t->live[r * t->live_ld + word] = bits;
        }
}

inline void native_score(const af_program* program, const af_tile* t) {
    const mods& m = mods_of(program);
    for (int r = 0; r < t->rows; ++r)
        for (int c = 0; c < t->cols; ++c) {
            float& s = t->score[r * t->ld + c];
            const int64_t q = t->q + r, k = t->kv + c;
            s = static_cast<float>(m.value(s, t->h, q, k));
            if (m.tabled && m.outside(q, k) && is_live(t, r, c))
                note_outside(t, m.position(q, k));
        }
}

inline void native_backward(const af_program* program, const af_tile* t) {
    const mods& m = mods_of(program);
    double* const* sums = t->captured_grad;
    for (int r = 0; r < t->rows; ++r)
        for (int c = 0; c < t->cols; ++c) {
            float& grad = t->grad[r * t->ld + c];
            if (!is_live(t, r, c)) {
                grad = 0;
                continue;
            }
            const int64_t q = t->q + r, k = t->kv + c;
            if (sums && sums[SLOPE]) sums[SLOPE][0] += grad * double(k - q);
            if (sums && sums[TABLE]) sums[TABLE][t->h * m.entries() + m.entry(q, k)] += grad;
            grad *= static_cast<float>(m.derivative(t->score[r * t->ld + c]));
        }
}

}  // namespace native_test
