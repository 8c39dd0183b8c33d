// Random problems: their lengths, mods and blocks.
#pragma once
#include <algorithm>
#include <random>

#include "mods.h"
#include "oracle.h"

namespace native_test {

enum { QUERY, KEY, VALUE, DOUT, INPUTS };

class drawing {
   protected:
    explicit drawing(uint64_t seed) : random_(seed) {
        const int64_t kind = draw({MANY_ROWS, STRIPES, NONFINITE_KEYS, ANY, ANY, ANY, ANY, ANY});
        draw_shape(kind);
        draw_mods(kind);
        nonfinite_ = INPUTS;
        if (draw({0, 0, 0, 1})) nonfinite_ = draw({QUERY, KEY, VALUE, DOUT});
        if (kind == NONFINITE_KEYS) nonfinite_ = draw({KEY, VALUE});
        dropped_ = {{uint32_t(random_()), uint32_t(random_())}, 0, 1};
        if (draw({0, 0, 0, 1})) {  // a quarter of the pairs
            dropped_.threshold = 1u << 30;
            dropped_.scale = 4.0f / 3;
        }
    }

    int64_t draw(std::vector<int64_t> from) { return from[random_() % from.size()]; }
    // Half of the tensors are contiguous.
    int layout_of(int count) {
        return draw({0, 1}) ? static_cast<int>(random_() % uint64_t(count)) : contiguous;
    }

   private:
    // Kinds of problems: chance alone would seldom combine all the properties that some cases
    // need.
    enum { ANY, MANY_ROWS, STRIPES, NONFINITE_KEYS };

    void draw_shape(int64_t kind) {
        n_.batch = draw({1, 2});
        n_.kv_heads = draw({1, 2});
        n_.q_heads = n_.kv_heads * draw({1, 1, 2, 4, 8});
        n_.q_length = draw({0, 1, 1, 3, 4, 9, 17, 40, 65, 130});
        n_.kv_length = draw({0, 1, 31, 32, 33, 70, 129, 300, 520});
        if (kind == STRIPES) {
            n_.q_heads = n_.kv_heads;
            n_.q_length = draw({40, 65});
        }
        if (kind == MANY_ROWS || kind == STRIPES) n_.kv_length = 300;
        if (kind == MANY_ROWS) {  // decoding: more than a panel's 32 lanes
            const int64_t group = draw({1, 2, 4});
            n_.q_heads = n_.kv_heads * group;
            n_.q_length = 40 / group;
        }
        n_.head_dim = draw({1, 7, 16, 33, 64, 96, 100, 128});
        n_.value_head_dim = draw({1, 8, 20, 64, 96, 100, 128, 160, n_.head_dim});
        // The formula is slow.
        if (n_.q_length > 17 && n_.q_heads > 4) n_.q_heads = n_.kv_heads;
        if (n_.batch * n_.q_heads * n_.q_length <= 40)
            n_.kv_length = draw({n_.kv_length, 1100, 2100});
        shared_ = draw({0, 0, 1});
    }

    void draw_mods(int64_t kind) {
        mods_.cap = double(draw({0, 0, 3}));
        mods_.sloped = draw({0, 1});
        mods_.tabled = draw({0, 1});
        mods_.masked = kind == STRIPES || kind == NONFINITE_KEYS || draw({0, 1});
        mods_.by_head = mods_.masked && draw({0, 0, 1});
        mods_.ints[WINDOW] = draw({1, 20, 200, 3000, 3000});
        // The last query sees the last key, or the one of its own number.
        const int64_t longer = std::max<int64_t>(n_.kv_length - n_.q_length, 0);
        mods_.ints[SHIFT] = draw({0, longer, longer});
        q_block_ = draw({16, 32, 48, 128});
        kv_block_ = draw({16, 48, 64, 128});
        int64_t stretch = draw({1, 1, 40, 200});
        if (kind == STRIPES || kind == NONFINITE_KEYS) {
            mods_.ints[WINDOW] = 3000;
            mods_.ints[SHIFT] = longer;
        }
        if (kind == STRIPES) {
            // Keys that are kept, or not, together give rows of the mask gaps and FULL blocks, and
            // rows that see all keys give the same to columns.
            mods_.ints[STRIPE] = draw({8, 16});
            stretch = 40;
            q_block_ = 8;
            kv_block_ = 16;
        }
        // Half of the non-finite ones are dead among live ones.
        if (kind == NONFINITE_KEYS) stretch = 1;
        const bool half = kind == NONFINITE_KEYS || stretch > 1;
        const std::vector<int64_t> floats = {AF_T_F16, AF_T_BF16, AF_T_F32, AF_T_F64};
        const std::vector<int64_t> integers = {AF_T_I8, AF_T_I16, AF_T_I32, AF_T_I64};
        const int64_t entries = draw({5, 16, 40});
        mods_.slope.make(static_cast<int32_t>(draw(floats)), {}, 1);
        mods_.slope.set(0, 0.03);
        mods_.table.make(static_cast<int32_t>(draw(floats)), {n_.q_heads, entries},
                         draw({1, 1, 3}));
        mods_.index.make(static_cast<int32_t>(draw(integers)), {n_.kv_length}, draw({1, 1, 2}));
        mods_.kept.make(AF_T_BOOL, {n_.kv_length}, draw({1, 2}));
        std::normal_distribution<double> normal;
        for (int64_t i = 0; i < n_.q_heads * entries; ++i)
            mods_.table.set(i * mods_.table.stride[1], normal(random_));
        // In -N..N-4, to which up to 3 is added; far outside where nobody looks.
        int64_t wrong = -1;
        if (draw({0, 0, 0, 0, 1}) && n_.kv_length > 0) wrong = draw({0, n_.kv_length / 2});
        const int64_t far = mods_.index.type == AF_T_I8    ? 100
                            : mods_.index.type == AF_T_I16 ? 30000
                                                           : 1 << 30;
        bool kept = true;
        for (int64_t k = 0; k < n_.kv_length; ++k) {
            if (k % stretch == 0) kept = half ? draw({0, 1}) : draw({0, 1, 1, 1, 1, 1});
            int64_t index = int64_t(random_() % uint64_t(2 * entries - 3)) - entries;
            const bool dead = mods_.masked && !kept && mods_.ints[STRIPE] == 0;
            if (dead || k == wrong) index = draw({-far, far});
            mods_.kept.set(k * mods_.kept.stride[0], kept);
            mods_.index.set(k * mods_.index.stride[0], double(index));
        }
        mods_.table_grad.assign(n_.q_heads * entries, 0);
        mods_.table_size.assign(n_.q_heads * entries, 0);
    }

   protected:
    std::mt19937_64 random_;
    shape n_;
    bool shared_;
    int64_t nonfinite_;  // which input isn't finite everywhere; INPUTS: none
    int64_t q_block_, kv_block_;
    dropout dropped_;
    mods mods_;
};

}  // namespace native_test
