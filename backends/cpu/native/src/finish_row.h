// The end of a query row: from sums over its keys to out, lse and max_scores.
#pragma once
#include "softmax.h"

namespace AF_LEVEL {

// A row's softmax: weights are relative to `top`, which is natural.
struct row_sums {
    float top, sum;
    bool nan;          // a NaN score beside an infinite one; any other NaN is in the sum
    const float* out;  // [value width]: weighted values
};

static void finish_row(const af_forward_args& args, int64_t b, int64_t h, int64_t q,
                       const row_sums& row) {
    const af_problem& p = args.problem;
    const int64_t size = p.dtype == AF_F32 ? 4 : 2;
    const int64_t index = (b * p.q_heads + h) * p.q_length + q;
    const float inverse = row.sum == 0.0f ? 0.0f : 1.0f / row.sum;
    if (p.value_head_dim > 0) {
        const af_tensor& out = args.out;
        char* to = static_cast<char*>(out.data) +
                   (b * out.stride[0] + h * out.stride[1] + q * out.stride[2]) * size;
        store_row(row.out, p.value_head_dim, inverse, p.dtype, to);
        if (args.unrounded_out)
            store_row(row.out, p.value_head_dim, inverse, AF_F32,
                      args.unrounded_out + index * p.value_head_dim);
    }
    if (args.lse)
        args.lse[index] = row.sum == 0.0f ? -infinity : row.top + __builtin_logf(row.sum);
    if (args.max_scores) {
        const bool nan = row.sum != row.sum && (row.top != infinity || row.nan);
        args.max_scores[index] = nan ? __builtin_nanf("") : row.top;
    }
}

}  // namespace AF_LEVEL
