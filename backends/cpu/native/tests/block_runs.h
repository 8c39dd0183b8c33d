// The block mask of a problem's live pairs, as runs of q blocks and, transposed, of kv blocks.
#pragma once
#include "mods.h"
#include "oracle.h"

namespace native_test {

struct block_runs {
    // `heads`: 1, or those of the queries.
    block_runs(const shape& n, const mods& m, int64_t heads, int64_t q_block, int64_t kv_block)
        : heads(heads), rows((n.q_length + q_block - 1) / q_block),
          columns((n.kv_length + kv_block - 1) / kv_block) {
        for (int64_t h = 0; h < heads; ++h) {
            std::vector<int> kind(rows * columns);
            for (int64_t q = 0; q < n.q_length; ++q)
                for (int64_t k = 0; k < n.kv_length; ++k)
                    kind[q / q_block * columns + k / kv_block] |= m.live(h, q, k) ? 1 : 2;
            // 1: all live, 3: some, 2: none.
            for (int& each : kind) each = each == 3 ? 2 : each == 1 ? 1 : 0;
            forward.add(kind, rows, columns, columns, 1);
            backward.add(kind, columns, rows, 1, columns);
        }
    }
    af_runs of_queries() const {
        return {forward.offsets.data(), forward.runs.data(), 1, heads, rows, forward.count()};
    }
    af_runs of_keys() const {
        return {backward.offsets.data(), backward.runs.data(), 1, heads, columns,
                backward.count()};
    }

    struct side {
        void add(const std::vector<int>& kind, int64_t rows, int64_t columns, int64_t by_row,
                 int64_t by_column) {
            offsets.push_back(count());
            for (int64_t r = 0; r < rows; ++r) {
                for (int32_t c = 0; c < columns; ++c) {
                    const int k = kind[r * by_row + c * by_column];
                    if (k == 0) continue;
                    const bool first = count() == offsets.back();
                    const bool beside = !first && runs[runs.size() - 2] == c;
                    gaps |= !first && !beside;
                    mixed |= !first && runs.back() != k;
                    if (beside && runs.back() == k)
                        runs[runs.size() - 2] = c + 1;
                    else
                        runs.insert(runs.end(), {c, c + 1, k});
                }
                offsets.push_back(count());
            }
        }
        int32_t count() const { return static_cast<int32_t>(runs.size() / 3); }
        std::vector<int32_t> offsets, runs;
        // Whether some row has runs that are apart, or runs of both kinds.
        bool gaps = false, mixed = false;
    };
    int64_t heads, rows, columns;
    side forward, backward;
};

}  // namespace native_test
