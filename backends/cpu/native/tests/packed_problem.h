// A random call of packed sequences, whose results are compared with those of each sequence alone,
// bit for bit, because what a sequence computes depends on it alone; and the same call with keys in
// pages.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>

#include "coverage.h"
#include "tensors.h"

namespace native_test {

class packed_problem {
   public:
    packed_problem(int64_t number, uint64_t seed)
        : random_(seed * 1000003 + uint64_t(number)), number_(number) {}

    void run(coverage& covered) {
        draw_sequences();
        const int32_t dtype = static_cast<int32_t>(draw({AF_F32, AF_BF16, AF_F16}));
        const int64_t kv_heads = draw({1, 2}), q_heads = kv_heads * draw({1, 2, 8});
        const int64_t dim = draw({16, 40, 64, 128}), value_dim = draw({16, 33, 64, 128});
        const int64_t rows = q_offsets_.back() + draw({0, 3}), all_keys = kv_offsets_.back();
        tensor query(1, q_heads, rows, dim, dtype, heads_inside);
        tensor key(1, kv_heads, all_keys, dim, dtype, static_cast<int>(draw({0, 2, 3})));
        tensor value(1, kv_heads, all_keys, value_dim, dtype, static_cast<int>(draw({0, 2, 3})));
        for (tensor* each : {&query, &key, &value}) each->fill(random_, 0);
        if (draw({0, 0, 1}) && value.size > 0) value.fill(random_, 1);

        af_packed_args a = {};
        af_problem& p = a.args.problem;
        p.dtype = dtype;
        p.threads = static_cast<int32_t>(draw({1, 2, 4}));
        p.batch = 1;
        p.q_heads = q_heads;
        p.kv_heads = kv_heads;
        p.q_length = rows;
        p.kv_length = all_keys;
        p.head_dim = dim;
        p.value_head_dim = value_dim;
        p.query = query.view;
        p.key = key.view;
        p.value = value.view;
        p.scale = 1 / std::sqrt(double(dim));
        draw_mask(p, q_heads);
        a.sequences = int64_t(kv_lengths_.size());
        a.q_offsets = q_offsets_.data();
        a.q_starts = starts_.data();
        a.kv_lengths = kv_lengths_.data();
        a.slots = slots_.data();
        a.kv_offsets = kv_offsets_.data();
        const result packed = forward(a);
        compare_with_each_alone(a, packed);
        ++covered.packed;

        // The same keys in pages, whose other rows are NaN.
        a.page_size = draw({1, 16, 48, 64, 200});
        int64_t width = 1, used = 0;
        for (int32_t length : kv_lengths_) {
            width = std::max(width, (length + a.page_size - 1) / a.page_size);
            used += (length + a.page_size - 1) / a.page_size;
        }
        a.pages = used + 2;
        tensor keys(a.pages, kv_heads, a.page_size, dim, dtype, static_cast<int>(draw({0, 2})));
        tensor values(a.pages, kv_heads, a.page_size, value_dim, dtype,
                      static_cast<int>(draw({0, 2})));
        std::vector<int32_t> table(a.sequences * width, static_cast<int32_t>(draw({-1, 1 << 30})));
        std::vector<int32_t> ids(a.pages);
        std::iota(ids.begin(), ids.end(), 0);
        std::shuffle(ids.begin(), ids.end(), random_);
        auto id = ids.begin();
        for (int64_t i = 0; i < a.sequences; ++i)
            for (int64_t k = 0; k < kv_lengths_[i]; ++k) {
                int32_t& page = table[i * width + k / a.page_size];
                if (k % a.page_size == 0) page = *id++;
                copy_row(key, 0, kv_offsets_[i] + k, keys, page, k % a.page_size);
                copy_row(value, 0, kv_offsets_[i] + k, values, page, k % a.page_size);
            }
        p.key = keys.view;
        p.value = values.view;
        a.kv_offsets = nullptr;
        a.page_table = table.data();
        a.table_stride = a.table_width = width;
        a.table_height = a.sequences;
        if (a.sequences == 0) a.page_table = nullptr;
        const result paged = forward(a);
        // Products of rows that are no neighbours are summed in another order.
        const double limit = dtype == AF_F32 ? 2e-5 : dtype == AF_BF16 ? 4e-2 : 5e-3;
        for (size_t i = 0; i < packed.out.size(); i += bytes_of(dtype))
            compare("out in pages", number_, got(paged.out.data() + i, dtype),
                    got(packed.out.data() + i, dtype), limit);
        for (size_t i = 0; i < packed.lse.size(); ++i)
            compare("lse in pages", number_, paged.lse[i], packed.lse[i], 1e-4);
        ++covered.paged;
    }

   private:
    struct result {
        std::vector<char> out;
        std::vector<float> lse;
    };

    int64_t draw(std::vector<int64_t> from) { return from[random_() % from.size()]; }

    void draw_sequences() {
        const int64_t count = draw({0, 1, 3, 7});
        q_offsets_ = kv_offsets_ = {0};
        for (int64_t i = 0; i < count; ++i) {
            q_offsets_.push_back(q_offsets_.back() +
                                 static_cast<int32_t>(draw({0, 1, 1, 4, 17, 140})));
            kv_lengths_.push_back(static_cast<int32_t>(draw({0, 1, 33, 64, 300, 1100})));
            kv_offsets_.push_back(kv_offsets_.back() + kv_lengths_.back());
            slots_.push_back(static_cast<int32_t>(i));
            starts_.push_back(static_cast<int32_t>(draw({-3, 0, 7})));
        }
    }

    // Runs of random kinds for each row of blocks; without a mask program PARTIAL ones are live.
    void draw_mask(af_problem& p, int64_t q_heads) {
        if (draw({0, 1})) return;
        p.has_mask = 1;
        p.q_block = static_cast<int32_t>(draw({16, 64}));
        p.kv_block = 48;
        p.mask_is_per_call = 1;
        const int64_t heads = draw({1, q_heads});
        int64_t blocks = 0;
        for (size_t i = 0; i + 1 < q_offsets_.size(); ++i)
            blocks += (q_offsets_[i + 1] - q_offsets_[i] + p.q_block - 1) / p.q_block;
        for (int64_t row = 0; row < heads * blocks; ++row) {
            if (row % std::max<int64_t>(blocks, 1) == 0)
                offsets_.push_back(static_cast<int32_t>(runs_.size() / 3));
            for (int32_t at = 0; at < 24; at += 6)
                if (draw({0, 1}))
                    runs_.insert(runs_.end(), {at, at + static_cast<int32_t>(draw({1, 3})),
                                               static_cast<int32_t>(draw({1, 2}))});
            offsets_.push_back(static_cast<int32_t>(runs_.size() / 3));
        }
        if (offsets_.empty()) offsets_.assign(heads, 0);
        p.runs = {offsets_.data(), runs_.data(), 1, heads, blocks, int64_t(runs_.size() / 3)};
    }

    static void copy_row(const tensor& from, int64_t b, int64_t row, tensor& to, int64_t page,
                         int64_t at) {
        const int64_t size = bytes_of(from.dtype);
        for (int64_t h = 0; h < from.shape[1]; ++h)
            for (int64_t d = 0; d < from.shape[3]; ++d) {
                const int64_t source =
                    ((b * from.shape[1] + h) * from.shape[2] + row) * from.shape[3] + d;
                const int64_t target =
                    ((page * to.shape[1] + h) * to.shape[2] + at) * to.shape[3] + d;
                std::memcpy(to.data.data() + to.place(target) * size,
                            from.data.data() + from.place(source) * size, size);
            }
    }

    result forward(af_packed_args a) {
        const af_problem& p = a.args.problem;
        tensor out(1, p.q_heads, p.q_length, p.value_head_dim, p.dtype, heads_inside);
        result found = {{}, std::vector<float>(p.q_heads * p.q_length, 12345)};
        a.args.out = out.view;
        a.args.lse = found.lse.data();
        a.args.workspace_bytes = af_packed_workspace(&a);
        memory workspace(a.args.workspace_bytes);
        a.args.workspace = workspace.data;
        af_error error;
        compare("a packed call's status", number_, af_packed_forward(&a, &error), AF_OK, 0);
        compare("bytes past a packed call's workspace", number_, double(workspace.written_past()),
                0, 0);
        found.out = out.data;
        return found;
    }

    void compare_with_each_alone(const af_packed_args& a, const result& packed) {
        const af_problem& p = a.args.problem;
        const int64_t size = bytes_of(p.dtype), row_bytes = p.q_heads * p.value_head_dim * size;
        int64_t block = 0;
        for (int64_t i = 0; i < a.sequences; ++i) {
            af_forward_args alone = a.args;
            af_problem& q = alone.problem;
            const int64_t first = q_offsets_[i];
            q.q_length = q_offsets_[i + 1] - first;
            q.kv_length = kv_lengths_[i];
            q.query.data = static_cast<char*>(q.query.data) + first * q.query.stride[2] * size;
            q.key.data =
                static_cast<char*>(q.key.data) + kv_offsets_[i] * q.key.stride[2] * size;
            q.value.data =
                static_cast<char*>(q.value.data) + kv_offsets_[i] * q.value.stride[2] * size;
            q.runs.offsets += block;
            if (p.has_mask) block += (q.q_length + p.q_block - 1) / p.q_block;
            tensor out(1, q.q_heads, q.q_length, q.value_head_dim, q.dtype, heads_inside);
            std::vector<float> lse(q.q_heads * q.q_length);
            alone.out = out.view;
            alone.lse = lse.data();
            alone.workspace_bytes = af_forward_workspace(&q);
            memory workspace(alone.workspace_bytes);
            alone.workspace = workspace.data;
            af_error error;
            compare("a sequence's status", number_, af_forward(&alone, &error), AF_OK, 0);
            if (q.q_length == 0) continue;
            const char* begin = packed.out.data() + first * row_bytes;
            same("a sequence's out", {begin, begin + q.q_length * row_bytes}, out.data);
            for (int64_t h = 0; h < q.q_heads; ++h)
                for (int64_t row = 0; row < q.q_length; ++row)
                    compare("a sequence's lse", number_,
                            packed.lse[h * p.q_length + first + row], lse[h * q.q_length + row],
                            0);
        }
        const int64_t begin = q_offsets_.back();
        const std::vector<char> rest(packed.out.begin() + begin * row_bytes,
                                     packed.out.begin() + p.q_length * row_bytes);
        same("padding rows", rest, std::vector<char>(rest.size(), 0));
    }

    void same(const char* what, const std::vector<char>& found, const std::vector<char>& wanted) {
        int64_t differ = found.size() != wanted.size();
        for (size_t i = 0; i < std::min(found.size(), wanted.size()); ++i)
            differ += found[i] != wanted[i];
        compare(what, number_, double(differ), 0, 0);
    }

    std::mt19937_64 random_;
    int64_t number_;
    std::vector<int32_t> q_offsets_, kv_offsets_, kv_lengths_, slots_, starts_, offsets_, runs_;
};

}  // namespace native_test
