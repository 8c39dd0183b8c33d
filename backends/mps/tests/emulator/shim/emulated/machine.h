// Interface between a kernel and the runtime that executes it, and the barriers.
#pragma once
#include "traits.h"

// One thread of the grid, as its kernel sees it.
struct emulated_lane {
    uint thread_index;    // thread_index_in_threadgroup
    uint lane;            // thread_index_in_simdgroup
    uint simdgroup;       // simdgroup_index_in_threadgroup
    uint lanes;           // threads of this simdgroup: fewer than 32 at a threadgroup's end
    uint simdgroups;      // simdgroups_per_threadgroup
    uint matrix_accesses; // loads and stores of simdgroup matrices that the lane has made
    int element;          // first of the lane's two elements of an 8x8 matrix
    uint3 position_in_threadgroup, position_in_grid, group_position;
    uint3 groups, threads_per_group, threads_per_grid;
};

// Threadgroup variables stand in one section, their descriptions in another.
struct emulated_variable {
    const char* kernel_name;
    const char* name;
    void* at;
    size_t bytes;
};
#define EMULATED_THREADGROUP_SECTION __attribute__((section("emulated_tg"), used, aligned(16)))
#define EMULATED_VARIABLE_SECTION __attribute__((section("emulated_tgv"), used))

extern "C" {
extern emulated_lane EMULATED_OWN* EMULATED_OWN emulated_current;
// Largest error of the functions that Metal specifies by ulps.
extern EMULATED_OWN int emulated_ulps;
float emulated_inexact(float);

void emulated_threadgroup_barrier(int flags) EMULATED_TOGETHER;
void emulated_simdgroup_barrier(int flags) EMULATED_TOGETHER;
// Shares `bytes` of each lane: returns a board of 32 slots.
const EMULATED_OWN void* emulated_exchange(const void* value, uint bytes) EMULATED_TOGETHER;
// Joins the simdgroup's queue of matrix products: nobody waits until a result is read. Returns the
// product's number. `chained` is the product whose result is added, or 0 for c0 and c1.
uint emulated_multiply(float a0, float a1, float b0, float b1, uint chained, float c0, float c1,
                       int type) EMULATED_TOGETHER;
float2 emulated_product(uint number) EMULATED_TOGETHER;
// Announces a matrix in memory, of which each lane loads or stores two elements, to the race
// build.
void emulated_matrix(const void* first, size_t row_bytes, size_t column_bytes, uint element_bytes,
                     bool write);
// Announces an atomic operation to the race build.
void emulated_atomic(void* at, uint bytes);
// True now and then: a weak compare and exchange may fail without a reason.
bool emulated_spurious();
}

namespace emulated {

// A kernel's argument: converts to the parameter's type, whatever that is.
struct pointer {
    void* at;
    template <class T> operator T() const { return (T)at; }
};
struct reference {
    void* at;
    template <class T> operator T&() const { return *(T*)at; }
};

} // namespace emulated

namespace metal {

enum class mem_flags {
    mem_none = 0,
    mem_device = 1,
    mem_threadgroup = 2,
    mem_texture = 4,
    mem_device_and_threadgroup = 3
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

EMULATED_INLINE EMULATED_TOGETHER void threadgroup_barrier(mem_flags flags) {
    emulated_threadgroup_barrier(int(flags));
}
EMULATED_INLINE EMULATED_TOGETHER void simdgroup_barrier(mem_flags flags) {
    emulated_simdgroup_barrier(int(flags));
}

} // namespace metal
