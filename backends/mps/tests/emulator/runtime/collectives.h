// Cooperation of threads: barriers, exchanges between a simdgroup's lanes and matrix products.
//
// Products are queued: a lane adds its elements of the operands and goes on; the lane that adds
// the last ones multiplies, 8x8x8 in vector registers, and only who reads a result waits.
#pragma once
#include <stdlib.h>

#include "faults.h"

constexpr uint QUEUED_PRODUCTS = 64;
constexpr uint KEPT_RESULTS = 1024;
constexpr uint KEPT_SITES = 4096;

struct queued_product {
    alignas(32) float a[64], b[64], c[64];
    uint chained; // number of the product whose result is added, or 0 for c
    uint arrived;
    uint matrix_accesses; // of the first lane that came
    int type;
};

struct simdgroup_state {
    uint first, lanes;
    uint boards;  // completed exchanges
    uint arrived; // lanes at the current one
    uint matrix_accesses;
    uint calls;    // the most that a lane has come by
    uint products; // completed products
    uint at_barrier, finished;
    uint calls_of_finished, accesses_of_finished;
    uint checked_accesses;         // of matrices, by the lane that came first
    const void* sites[KEPT_SITES]; // of the last calls
    alignas(64) char board[2][32 * 64];
    queued_product* queue;
    float (*results)[64];
};

static std::vector<simdgroup_state*> simdgroups;

static struct {
    uint arrived;
    const void* site;
    int flags;
} barrier;

static fiber* lanes_of(simdgroup_state& simdgroup) { return &fibers[simdgroup.first]; }

static inline bool can_go_on(const fiber& lane) {
    const simdgroup_state& simdgroup = *lane.simdgroup;
    switch (lane.state) {
    case waits::FOR_NOTHING: return true;
    case waits::FOR_BOARD: return simdgroup.boards >= lane.awaited;
    case waits::FOR_PRODUCT: return simdgroup.products >= lane.awaited;
    default: return false;
    }
}

RARE static void fail_different_calls(const void* one, const void* other) {
    fail("lanes of one simdgroup are in different simdgroup functions: " + at_code(one) + " and " +
         at_code(other));
}
RARE static void fail_different_products(const void* site) {
    fail("lanes of one simdgroup add a product to different matrices, " + at_code(site));
}
RARE static void fail_partial_access(const void* site) {
    fail("a part of a simdgroup called simdgroup_load or simdgroup_store before " + at_code(site));
}
RARE static void fail_partial_calls() {
    fail("threads of one simdgroup finished after different numbers of simdgroup functions");
}
RARE static void fail_small_simdgroup(const void* site) {
    fail("a matrix product in a simdgroup of fewer than 32 threads, " + at_code(site));
}
RARE static void fail_old_product() {
    fail("emulator: a matrix product is read after " + std::to_string(KEPT_RESULTS / 2) +
         " further ones");
}
RARE static void fail_different_barriers(const void* site) {
    fail("threads of one threadgroup wait at different barriers: " + at_code(barrier.site) +
         " and " + at_code(site));
}

// Lanes of a simdgroup come by the same calls in the same order.
static inline __attribute__((always_inline)) void same_call(simdgroup_state& s, const void* site) {
    const uint call = running->calls++;
    if (call == s.calls) {
        s.sites[call % KEPT_SITES] = site;
        s.calls++;
    } else if (__builtin_expect(s.sites[call % KEPT_SITES] != site, 0)) {
        fail_different_calls(s.sites[call % KEPT_SITES], site);
    }
}

// A lane is done: the simdgroup's lanes have made the same calls.
static void finish_lane(fiber& lane) {
    simdgroup_state& s = *lane.simdgroup;
    if (!s.finished++) {
        s.calls_of_finished = lane.calls;
        s.accesses_of_finished = lane.lane.matrix_accesses;
    } else if (lane.calls != s.calls_of_finished ||
               lane.lane.matrix_accesses != s.accesses_of_finished) {
        fail_partial_calls();
    }
}

static void wait_for_board(simdgroup_state& s) {
    if (++s.arrived == s.lanes) {
        s.arrived = 0;
        s.boards++;
        return;
    }
    running->state = waits::FOR_BOARD;
    running->awaited = s.boards + 1;
    yield();
}

static inline float rounded(float x, int type) {
    if (type == 1) return (float)(half)x;
    if (type == 2) {
        uint bits;
        memcpy(&bits, &x, 4);
        const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
        if (!is_nan) bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
        memcpy(&x, &bits, 4);
    }
    return x;
}

static __attribute__((noinline)) void multiply(simdgroup_state& s, queued_product& q, uint number,
                                               const void* site) {
    typedef float row __attribute__((ext_vector_type(8)));
    if (s.lanes < 32) fail_small_simdgroup(site);
    const float* c = q.chained ? s.results[q.chained % KEPT_RESULTS] : q.c;
    float* result = s.results[number % KEPT_RESULTS];
    row b[8];
    memcpy(b, q.b, sizeof b);
    const int backwards = launched->reversed_sums ? 7 : 0;
    for (int i = 0; i < 8; i++) {
        row x;
        memcpy(&x, c + 8 * i, sizeof x);
        for (int k = 0; k < 8; k++) x = x + q.a[8 * i + (k ^ backwards)] * b[k ^ backwards];
        memcpy(result + 8 * i, &x, sizeof x);
    }
    if (q.type)
        for (int i = 0; i < 64; i++) result[i] = rounded(result[i], q.type);
    q.arrived = 0;
    s.products = number;
}

extern "C" {

// Ends the kernel with what the shim says of this thread: "asks ...".
RARE void emulated_fault(const char* text) {
    fail(this_thread() + " " + text + ", " + at_code(__builtin_return_address(0)));
}

void emulated_threadgroup_barrier(int flags) {
    const void* site = __builtin_return_address(0);
    if (!barrier.arrived) {
        barrier.site = site;
        barrier.flags = flags;
    } else if (barrier.site != site) {
        fail_different_barriers(site);
    }
    running->state = waits::FOR_BARRIER;
    running->simdgroup->at_barrier++;
    barrier.arrived++;
    yield();
}

void emulated_simdgroup_barrier(int flags) {
    simdgroup_state& s = *running->simdgroup;
    same_call(s, __builtin_return_address(0));
    wait_for_board(s);
    if (flags & (int)metal::mem_flags::mem_threadgroup) running->epoch++;
    if (flags & (int)metal::mem_flags::mem_device) running->device_epoch++;
}

const void* emulated_exchange(const void* value, uint bytes) {
    simdgroup_state& s = *running->simdgroup;
    const void* site = __builtin_return_address(0);
    same_call(s, site);
    if (!s.arrived)
        s.matrix_accesses = running->lane.matrix_accesses;
    else if (s.matrix_accesses != running->lane.matrix_accesses)
        fail_partial_access(site);
    // Every lane sees the same number: the board is completed when the last lane has come. Two
    // boards suffice: no lane is at the second next one before all have left this one.
    char* board = s.board[s.boards & 1];
    memcpy(board + (size_t)running->lane.lane * bytes, value, bytes);
    if (s.arrived + 1 == s.lanes && s.lanes < 32)
        memset(board + (size_t)s.lanes * bytes, 0xFF, (32 - s.lanes) * bytes);
    wait_for_board(s);
    return board;
}

uint emulated_multiply(float a0, float a1, float b0, float b1, uint chained, float c0, float c1,
                       int type) {
    fiber& self = *running;
    simdgroup_state& s = *self.simdgroup;
    const void* site = __builtin_return_address(0);
    same_call(s, site);
    if (__builtin_expect(chained && (int)(s.products - chained) > (int)KEPT_RESULTS / 2, 0))
        fail_old_product();
    const uint number = ++self.products;
    queued_product& q = s.queue[number % QUEUED_PRODUCTS];
    while (__builtin_expect(number - s.products > QUEUED_PRODUCTS, 0)) {
        self.state = waits::FOR_PRODUCT;
        self.awaited = number - QUEUED_PRODUCTS;
        yield();
    }
    if (q.arrived == 0) {
        q.chained = chained;
        q.type = type;
        q.matrix_accesses = self.lane.matrix_accesses;
    } else if (__builtin_expect(q.chained != chained, 0)) {
        fail_different_products(site);
    } else if (__builtin_expect(q.matrix_accesses != self.lane.matrix_accesses, 0)) {
        fail_partial_access(site);
    }
    typedef float pair __attribute__((ext_vector_type(2), aligned(4)));
    const int at = self.lane.element;
    *(pair*)(q.a + at) = pair{a0, a1};
    *(pair*)(q.b + at) = pair{b0, b1};
    if (!chained) *(pair*)(q.c + at) = pair{c0, c1};
    if (++q.arrived == s.lanes) multiply(s, q, number, site);
    return number;
}

float2 emulated_product(uint number) {
    simdgroup_state& s = *running->simdgroup;
    while (s.products < number) {
        running->state = waits::FOR_PRODUCT;
        running->awaited = number;
        yield();
    }
    if (__builtin_expect(s.products - number >= KEPT_RESULTS, 0)) fail_old_product();
    const float* result = s.results[number % KEPT_RESULTS] + running->lane.element;
    return float2{result[0], result[1]};
}
}
