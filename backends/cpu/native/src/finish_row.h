// The end of a query row: from sums over its keys to out, lse and max_scores.
#pragma once
#include "softmax.h"

namespace AF_LEVEL {

// A row's softmax.
struct row_sums {
    float row_max;     // largest stored score
    float row_sum;     // sum of the weights relative to it
    bool nan;          // a NaN score beside an infinite one; any other NaN is in row_sum
    const float* out;  // [value width]: weighted values
};

static void finish_row(const af_forward_args& args, const score_scale& scale, int64_t b,
                       int64_t h, int64_t q, const row_sums& row) {
    const af_problem& p = args.problem;
    const int64_t size = p.dtype == AF_F32 ? 4 : 2;
    const int64_t rows = p.packed_rows ? p.packed_rows : p.q_length;
    const int64_t index = (b * p.q_heads + h) * rows + q;
    const float kept = p.dropout_threshold != 0 ? p.dropout_scale : 1.0f;
    float whole = row.row_sum;
    if (p.sinks && whole != 0.0f)
        whole += static_cast<float>(__builtin_exp(p.sinks[h] - natural_base(row.row_max, scale)));
    const float inverse = row.row_sum == 0.0f ? 0.0f : kept / whole;
    if (p.value_head_dim > 0) {
        const af_tensor& out = args.out;
        char* to = static_cast<char*>(out.data) +
                   (b * out.stride[0] + h * out.stride[1] + q * out.stride[2]) * size;
        store_row(row.out, p.value_head_dim, inverse, p.dtype, to);
        if (args.unrounded_out)
            store_row(row.out, p.value_head_dim, inverse, AF_F32,
                      args.unrounded_out + index * p.value_head_dim);
    }
    const bool none = row.row_sum == 0.0f;
    if (args.lse) args.lse[index] = none ? -infinity : log_of_sum(row.row_max, row.row_sum, scale);
    if (args.max_scores) {
        const bool nan = row.row_sum != row.row_sum && (row.row_max != infinity || row.nan);
        const float natural = static_cast<float>(row.row_max * scale.natural);
        args.max_scores[index] = nan ? __builtin_nanf("") : natural;
    }
}

}  // namespace AF_LEVEL
