// Sums of captured tensors' gradients: at most 16 partials in double, added in order at the end.
//
//   partials = 1 GiB / bytes of one partial, at least 1, at most 16 and at most the jobs in flight
//
// A partial is filled by a fixed list of jobs, in their order, on one thread.
#pragma once
#include "backward_plan.h"

namespace AF_LEVEL {

constexpr int64_t most_captured = 64;
constexpr int64_t most_partials = 16;
constexpr int64_t captured_chunk = 1 << 16;  // elements

inline int64_t captured_partials(const backward_plan& plan, int64_t elements) {
    if (elements == 0) return 0;
    const int64_t affordable = memory_budget / (elements * 8);
    const int64_t jobs = plan.units_in_flight * plan.partitions;
    return larger(smaller(smaller(affordable, most_partials), jobs), 1);
}

struct captured_sums {
    int64_t partials;
    int64_t elements;  // of one partial
    double* sums;      // [partials][elements]

    // Counts the bytes, and takes the place where `memory` has a base.
    static captured_sums take(arena& memory, const backward_plan& plan, int64_t elements) {
        const int64_t partials = captured_partials(plan, elements);
        return {partials, elements, memory.take<double>(partials * elements)};
    }

    // One pointer per captured tensor into a partial; null where no gradient is wanted.
    void pointers(const af_backward_args& args, int64_t partial, double** to) const {
        double* at = sums + partial * elements;
        for (int64_t i = 0; i < args.captured_count; ++i) {
            to[i] = args.captured_grad[i] ? at : nullptr;
            if (args.captured_grad[i]) at += args.captured_grad_elements[i];
        }
    }

    // Adds the partials of one chunk of elements, in order, to the caller's accumulators.
    void finish(const af_backward_args& args, int64_t chunk) const {
        const int64_t from = chunk * captured_chunk;
        const int64_t to = smaller(from + captured_chunk, elements);
        int64_t first = 0;
        for (int64_t i = 0; i < args.captured_count; ++i) {
            if (!args.captured_grad[i]) continue;
            const int64_t last = first + args.captured_grad_elements[i];
            for (int64_t j = larger(first, from); j < smaller(last, to); ++j) {
                double sum = 0;
                for (int64_t g = 0; g < partials; ++g) sum += sums[g * elements + j];
                if (args.captured_grad_f64[i])
                    static_cast<double*>(args.captured_grad[i])[j - first] += sum;
                else
                    static_cast<float*>(args.captured_grad[i])[j - first] +=
                        static_cast<float>(sum);
            }
            first = last;
        }
    }
};

}  // namespace AF_LEVEL
