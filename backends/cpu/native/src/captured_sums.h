// Sums of captured tensors' gradients, in double, added to the caller's accumulators at the end.
//
// A partial is filled by a fixed list of jobs, in their order, on one thread.
//
//   partials = 1 GiB / bytes of one partial, at least 1, at most 16 and at most the jobs in flight
//
// Each has elements of its own of every tensor, but of owned ones: jobs that add to the same
// elements of these go to the same partial, so one sum serves all. A group is such jobs. There may
// be 64 partials then if nothing else learns. A bias for each pair is owned: 16 partials of it would
// take 16 times its memory, and the time to clear and to add them.
#pragma once
#include "backward_plan.h"

namespace AF_LEVEL {

constexpr int64_t most_captured = 64;
constexpr int64_t captured_chunk = 1 << 16;  // elements
// Groups that a large bias, and a small one, must have to be owned: fewer keep threads idle.
constexpr int64_t fewest_groups = 4, plenty_of_groups = 16;
constexpr int64_t large_bias = 1 << 18;  // elements

struct captured_sums {
    int64_t partials;
    int64_t elements;  // of one partial
    int64_t owned;     // of owned tensors; 0 if they are taken as the others
    double* sums;      // [partials][elements]
    double* owned_sums;  // [owned]

    // Counts the bytes, and takes the place where `memory` has a base. `elements` are all,
    // `owned` among them.
    static captured_sums take(arena& memory, const backward_plan& plan, int64_t elements,
                              int64_t owned) {
        captured_sums found;
        const int64_t groups = plan.owner_groups();
        if (groups < (owned > large_bias ? fewest_groups : plenty_of_groups)) owned = 0;
        found.owned = owned;
        found.elements = elements - owned;
        const int64_t jobs = plan.units_in_flight * plan.partitions;
        int64_t most = most_partials;
        if (found.elements > 0) most = smaller(memory_budget / (found.elements * 8), 16);
        most = smaller(most, owned > 0 ? smaller(jobs, groups) : jobs);
        found.partials = elements > 0 ? larger(most, 1) : 0;
        found.sums = memory.take<double>(found.partials * found.elements);
        found.owned_sums = memory.take<double>(owned);
        return found;
    }

    bool is_owned(const af_backward_args& args, int64_t i) const {
        return owned > 0 && args.captured_grad_kind[i] & AF_GRAD_OWNED;
    }

    // One pointer per captured tensor into the sums of a partial; null where no gradient is wanted.
    void pointers(const af_backward_args& args, int64_t partial, double** to) const {
        double* at = sums + partial * elements;
        double* owned_at = owned_sums;
        for (int64_t i = 0; i < args.captured_count; ++i) {
            to[i] = nullptr;
            if (!args.captured_grad[i]) continue;
            double*& next = is_owned(args, i) ? owned_at : at;
            to[i] = next;
            next += args.captured_grad_elements[i];
        }
    }

    int64_t chunks() const { return ceil_div(elements + owned, captured_chunk); }

    // Clears a chunk of the owned sums.
    void clear_owned(int64_t chunk) const {
        const int64_t from = chunk * captured_chunk;
        memset(owned_sums + from, 0, smaller(captured_chunk, owned - from) * sizeof(double));
    }

    // Adds one chunk of elements, a partial after the other, to the caller's accumulators.
    void finish(const af_backward_args& args, int64_t chunk) const {
        const int64_t from = chunk * captured_chunk;
        const int64_t to = smaller(from + captured_chunk, elements + owned);
        int64_t first = 0, own_first = 0, owned_first = 0;
        for (int64_t i = 0; i < args.captured_count; ++i) {
            if (!args.captured_grad[i]) continue;
            const int64_t last = first + args.captured_grad_elements[i];
            const bool once = is_owned(args, i);
            const double* part = once ? owned_sums + owned_first : sums + own_first;
            for (int64_t j = larger(first, from); j < smaller(last, to); ++j) {
                double sum = 0;
                for (int64_t g = 0; g < (once ? 1 : partials); ++g)
                    sum += part[g * elements + j - first];
                if (args.captured_grad_kind[i] & AF_GRAD_DOUBLE)
                    static_cast<double*>(args.captured_grad[i])[j - first] += sum;
                else
                    static_cast<float*>(args.captured_grad[i])[j - first] +=
                        static_cast<float>(sum);
            }
            (once ? owned_first : own_first) += last - first;
            first = last;
        }
    }
};

}  // namespace AF_LEVEL
