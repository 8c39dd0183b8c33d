// One instruction-set level of the kernels. Every source file that includes simd.h is compiled
// once a level, in namespace AF_LEVEL (a macro that CMake sets), and reaches the rest of the
// library only through this table. A level that the compiler can't build has no functions.
#pragma once
#include "anyflex_cpu.h"

struct af_level {
    const char* name;
    bool (*supported)();  // by processor and operating system; baseline code
    int64_t (*forward_workspace)(const af_problem&);
    int32_t (*forward)(const af_forward_args&, af_error*);
    // Decoding takes several problems at once, of one number of threads, in a workspace of
    // decode_workspace(count), decode_workspace_of of each, and the buffers that the latter finds.
    int64_t (*decode_workspace)(int64_t count);
    int64_t (*decode_workspace_of)(const af_problem&, int64_t* buffers);
    int32_t (*decode)(const af_forward_args*, int64_t count, void* workspace, af_error*);
    int64_t (*backward_workspace)(const af_problem&, int64_t captured_elements,
                                  int64_t owned_elements);
    int32_t (*backward)(const af_backward_args&, af_error*);
    void (*interpret)(const af_program*, const af_tile*);
};

// Elements of the captured tensors that get gradients and whose kind has these bits.
static inline int64_t af_captured_elements(const af_backward_args& args, int32_t kind) {
    int64_t elements = 0;
    for (int64_t i = 0; args.captured_grad && i < args.captured_count; ++i)
        if (args.captured_grad[i] && (args.captured_grad_kind[i] & kind) == kind)
            elements += args.captured_grad_elements[i];
    return elements;
}

// The level in use.
const af_level& af_chosen_level();

// True if a workspace of `bytes` is aligned and has the bytes that are needed.
bool af_fits(const void* workspace, int64_t bytes, int64_t needed);

// True if decode, not forward, takes this problem. The same for every level.
bool af_is_decode(const af_problem& problem);

// True if this processor reads memory fastest in whole rows, one after the other (measured: AMD's
// Zen 4); false if lines have to be prefetched (Intel's Sapphire Rapids; others weren't measured).
bool af_reads_best_in_order();

// True if prefetching a later row whenever a row is found in L1 is faster still (AMD's Zen 5; on
// Zen 4 such instructions wait for one another).
bool af_asks_ahead_in_order();
