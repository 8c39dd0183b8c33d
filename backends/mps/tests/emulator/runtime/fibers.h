// Threads of a threadgroup as fibers of one CPU thread, and the switch between their stacks.
//
// A lane runs until it needs what other lanes have not given yet; then the next lane of its
// simdgroup goes on, by a direct switch of stacks, else the scheduler of `schedule.h` chooses.
#pragma once
#include <string.h>
#include <sys/mman.h>

#include <string>
#include <vector>

#include "launch.h"
#include "metal_keywords.h"

enum class waits : unsigned char { FOR_NOTHING, FOR_BOARD, FOR_PRODUCT, FOR_BARRIER, IS_DONE };

constexpr size_t STACK_BYTES = 128 << 10;
constexpr size_t PAGE = 4096;

struct simdgroup_state;

struct fiber {
    emulated_lane lane;
    void* stack_pointer;
    char* stack;
    simdgroup_state* simdgroup;
    uint calls;        // simdgroup functions, barriers and products that it has come by
    uint products;     // matrix products that it has added its elements to
    uint epoch;        // barriers of the simdgroup that order threadgroup memory
    uint device_epoch; // and those that order device memory
    uint awaited;      // number of the board or product that it waits for
    waits state;
};

// The order in which lanes of a simdgroup take turns.
struct lane_order {
    uint first;
    uint next[32];
    bool is_last[32];

    void set(const uint order[32]) {
        first = order[0];
        for (uint i = 0; i < 32; i++) {
            next[order[i]] = order[(i + 1) % 32];
            is_last[order[i]] = i == 31;
        }
    }
};

static std::vector<fiber> fibers;
static std::vector<char*> stacks;
static fiber* running;
static void* scheduler_stack;
static lane_order order;
static bool greedy; // a simdgroup goes on as far as it can
static bool failed;
static const kernel_launch* launched;
static uint alive;

extern "C" void emulated_switch(void** from, void* to);
asm(R"(.text
.globl emulated_switch
.hidden emulated_switch
emulated_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

static void resume(fiber& next, void** from) {
    next.state = waits::FOR_NOTHING;
    running = &next;
    emulated_current = &next.lane;
    emulated_switch(from, next.stack_pointer);
}

static inline bool can_go_on(const fiber& lane);
static fiber* lanes_of(simdgroup_state& simdgroup);

// The running lane waits: another lane of its simdgroup goes on, else the scheduler.
static void yield() {
    fiber& self = *running;
    if (!failed) {
        fiber* const lanes = lanes_of(*self.simdgroup);
        uint i = self.lane.lane;
        for (uint tried = 0; tried < 32; tried++) {
            if (order.is_last[i] && !greedy) break;
            i = order.next[i];
            if (i >= self.lane.lanes || i == self.lane.lane || !can_go_on(lanes[i])) continue;
            resume(lanes[i], &self.stack_pointer);
            return;
        }
    }
    emulated_switch(&self.stack_pointer, scheduler_stack);
}

static void finish_lane(fiber& lane);

static void run_lane() {
    launched->entry(launched->arguments);
    finish_lane(*running);
    running->state = waits::IS_DONE;
    alive--;
    for (;;) yield();
}

// Each stack ends, at its low end, at a page that faults.
static char* new_stack() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char* stack = (char*)mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    mprotect(stack, PAGE, PROT_NONE);
    return stack;
}

static void prepare_stack(fiber& lane, uint i) {
    while (stacks.size() <= i) stacks.push_back(new_stack());
    // Stacks at one distance from each other would share cache sets.
    const size_t offset = 64 + 320 * (i % 64);
    void** top = (void**)((size_t)(stacks[i] + STACK_BYTES - offset) & ~(size_t)15);
    *--top = nullptr;
    *--top = (void*)run_lane;
    for (int registers = 0; registers < 6; registers++) *--top = nullptr;
    lane.stack_pointer = top;
    lane.stack = stacks[i];
}
