// Runs kernels: threadgroups one after the other, their threads as fibers, in one of five orders.
// Compiled once; the library of a kernel links to it.
#include <immintrin.h>

#include "races.h"

extern "C" {
emulated_lane* emulated_current;
int emulated_ulps;
}

namespace {

uint random_state;

uint random_below(uint n) {
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % n;
}

bool backwards() { return launched->schedule == REVERSE || launched->schedule == GREEDY_REVERSE; }

void choose_lane_order() {
    uint lanes[32];
    for (uint i = 0; i < 32; i++) lanes[i] = backwards() ? 31 - i : i;
    if (launched->schedule == RANDOM)
        for (uint i = 31; i > 0; i--) std::swap(lanes[i], lanes[random_below(i + 1)]);
    order.set(lanes);
}

// Metal documents no layout; kernels assume Apple's. The other one proves that a self-test of the
// layout rejects what it doesn't know.
int element_of(uint lane) {
    if (launched->layout == ROWS_LAYOUT) return (int)(lane * 2);
    const uint quad = lane / 4;
    const uint row = (quad & 4) + lane / 2 % 4, column = (quad & 2) * 2 + lane % 2 * 2;
    return (int)(row * 8 + column);
}

struct grid_place {
    uint groups[3], group[3], size[3];
};

void prepare_simdgroup(uint index, uint threads) {
    while (simdgroups.size() <= index) {
        auto* s = new simdgroup_state;
        s->queue = (queued_product*)aligned_alloc(64, QUEUED_PRODUCTS * sizeof(queued_product));
        s->results = (float (*)[64])aligned_alloc(64, KEPT_RESULTS * sizeof(float[64]));
        simdgroups.push_back(s);
    }
    simdgroup_state& s = *simdgroups[index];
    s.first = index * 32;
    s.lanes = std::min(32u, threads - s.first);
    s.boards = s.arrived = s.calls = s.products = s.at_barrier = s.finished = 0;
    s.checked_accesses = 0;
    for (uint i = 0; i < QUEUED_PRODUCTS; i++) s.queue[i].arrived = 0;
}

void prepare_thread(uint i, uint threads, const grid_place& place) {
    const uint* size = place.size;
    const uint x = i % size[0], y = i / size[0] % size[1], z = i / (size[0] * size[1]);
    fiber& f = fibers[i];
    f = {};
    f.simdgroup = simdgroups[i / 32];
    emulated_lane& lane = f.lane;
    lane.thread_index = i;
    lane.lane = i % 32;
    lane.simdgroup = i / 32;
    lane.lanes = f.simdgroup->lanes;
    lane.simdgroups = (threads + 31) / 32;
    lane.element = element_of(lane.lane);
    lane.position_in_threadgroup = uint3{x, y, z};
    lane.group_position = uint3{place.group[0], place.group[1], place.group[2]};
    const uint* full = launched->group;
    lane.position_in_grid =
        lane.group_position * uint3{full[0], full[1], full[2]} + lane.position_in_threadgroup;
    lane.groups = uint3{place.groups[0], place.groups[1], place.groups[2]};
    lane.threads_per_group = uint3{size[0], size[1], size[2]};
    lane.threads_per_grid =
        uint3{launched->threads[0], launched->threads[1], launched->threads[2]};
    prepare_stack(f, i);
}

// Bytes of all ones: NaN for floats, -1 for integers.
void poison_threadgroup_memory() {
    const size_t bytes = launched->threadgroup_end - launched->threadgroup_begin;
    memset(launched->threadgroup_begin, 0xFF, bytes);
}

// Memory between threadgroup variables is still poisoned, or one of them was overrun.
void check_redzones() {
    const auto* end = (const emulated_variable*)launched->variables_end;
    for (const auto* v = (const emulated_variable*)launched->variables; v < end; v++) {
        const char* after = (const char*)v->at + v->bytes;
        for (int i = 0; i < 64; i++) {
            if (after + i >= launched->threadgroup_end || races::variable_near(after + i) != v)
                break;
            if (after[i] != (char)0xFF)
                return fail("a write past the end of the threadgroup variable " +
                            std::string(v->name) + ": at byte " + std::to_string(v->bytes + i) +
                            " of " + std::to_string(v->bytes));
        }
    }
}

// The first lane, in turn, that can go on, or null.
fiber* lane_to_run(simdgroup_state& s) {
    if (s.at_barrier + s.finished >= s.lanes) return nullptr;
    uint i = order.first;
    for (uint tried = 0; tried < 32; tried++, i = order.next[i])
        if (i < s.lanes && can_go_on(fibers[s.first + i])) return &fibers[s.first + i];
    return nullptr;
}

void fail_deadlock(uint threads) {
    uint at_barrier = 0, in_call = 0, returned = 0;
    for (uint i = 0; i < threads; i++) {
        const waits state = fibers[i].state;
        at_barrier += state == waits::FOR_BARRIER;
        in_call += state == waits::FOR_BOARD || state == waits::FOR_PRODUCT;
        returned += state == waits::IS_DONE;
    }
    std::string text =
        "deadlock, by a divergent barrier or simdgroup function: " + std::to_string(at_barrier) +
        " threads wait in threadgroup_barrier, " + std::to_string(in_call) +
        " in a simdgroup function, " + std::to_string(returned) + " have returned, of " +
        std::to_string(threads);
    if (at_barrier) text += ", " + at_code(barrier.site);
    for (simdgroup_state* s : simdgroups)
        if (in_call && s->calls && s->finished + s->at_barrier < s->lanes) {
            text += ", " + at_code(s->sites[(s->calls - 1) % KEPT_SITES]);
            break;
        }
    fail(text);
}

// All threads that are left wait at the barrier: they go on.
void open_barrier(uint threads) {
    if (alive != threads)
        return fail("a barrier is reached by only " + std::to_string(alive) + " of " +
                    std::to_string(threads) + " threads, the others have returned, " +
                    at_code(barrier.site));
    for (uint i = 0; i < threads; i++) fibers[i].state = waits::FOR_NOTHING;
    for (simdgroup_state* s : simdgroups) s->at_barrier = 0;
    barrier.arrived = 0;
    if (barrier.flags & (int)metal::mem_flags::mem_threadgroup) races::next_threadgroup_epoch();
    if (barrier.flags & (int)metal::mem_flags::mem_device) races::next_device_epoch();
}

void run_threads(uint threads) {
    const uint count = (threads + 31) / 32;
    const bool random = launched->schedule == RANDOM;
    const uint patience = random ? 64 * count : 2 * count;
    uint turn = backwards() ? count - 1 : 0, idle = 0;
    while (alive && !failed) {
        if (random) {
            turn = random_below(count);
            if (!random_below(4)) choose_lane_order();
        }
        simdgroup_state& s = *simdgroups[turn];
        fiber* next = lane_to_run(s);
        if (next) {
            resume(*next, &scheduler_stack);
            emulated_current = nullptr;
            idle = 0;
            if (greedy && s.at_barrier + s.finished < s.lanes && !failed) continue;
        } else {
            idle++;
        }
        if (failed) break;
        if (barrier.arrived && barrier.arrived == alive) {
            open_barrier(threads);
            idle = 0;
        }
        if (idle > patience) fail_deadlock(threads);
        turn = backwards() ? (turn + count - 1) % count : (turn + 1) % count;
    }
}

void run_threadgroup(const grid_place& place) {
    const uint threads = place.size[0] * place.size[1] * place.size[2];
    if (fibers.size() < threads) fibers.resize(threads);
    for (simdgroup_state* s : simdgroups) s->lanes = s->calls = 0;
    for (uint i = 0; i * 32 < threads; i++) prepare_simdgroup(i, threads);
    for (uint i = 0; i < threads; i++) prepare_thread(i, threads, place);
    poison_threadgroup_memory();
    alive = threads;
    barrier.arrived = 0;
    races::serial++;
    races::next_threadgroup_epoch();
    races::next_device_epoch();
    run_threads(threads);
    // The race build has checked each access.
    if (!failed && !launched->races) check_redzones();
}

// The size of the threadgroup at a place: those at the grid's edges are smaller.
void run_grid() {
    grid_place place;
    const uint* threads = launched->threads;
    const uint* full = launched->group;
    for (int i = 0; i < 3; i++) place.groups[i] = (threads[i] + full[i] - 1) / full[i];
    uint& x = place.group[0];
    uint& y = place.group[1];
    uint& z = place.group[2];
    for (z = 0; z < place.groups[2]; z++)
        for (y = 0; y < place.groups[1]; y++)
            for (x = 0; x < place.groups[0]; x++) {
                for (int i = 0; i < 3; i++)
                    place.size[i] = std::min(full[i], threads[i] - place.group[i] * full[i]);
                run_threadgroup(place);
                if (failed) return;
            }
}

} // namespace

extern "C" {

float emulated_inexact(float y) {
    uint bits;
    memcpy(&bits, &y, 4);
    const uint exponent = bits >> 23 & 255;
    // Zeros, subnormal numbers, infinities and NaN are specified exactly.
    if (exponent == 0 || exponent >= 254) return y;
    const uint ulps = 1 + random_below((uint)emulated_ulps);
    bits = random_below(2) ? bits + ulps : bits - ulps;
    memcpy(&y, &bits, 4);
    return y;
}

bool emulated_spurious() { return random_below(4) == 0; }

// Debian's libgcc has no __truncsfbf2.
__bf16 __truncsfbf2(float x) {
    x = rounded(x, 2);
    uint bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) bits |= 0x400000;
    const ushort high = (ushort)(bits >> 16);
    __bf16 result;
    memcpy(&result, &high, 2);
    return result;
}

// The pages that a loaded library's code and data stand in.
void emulated_library_range(const void* symbol, const char** begin, const char** end) {
    Dl_info info;
    *begin = *end = nullptr;
    if (!dladdr(symbol, &info)) return;
    *begin = (const char*)info.dli_fbase;
    *end = *begin + (4 << 20);
}

// Returns 1, and a message, at the first fault.
int emulated_launch(const kernel_launch* launch, char* text, size_t text_bytes) {
    constexpr uint FLUSH_TO_ZERO = 1 << 15, DENORMALS_ARE_ZERO = 1 << 6;
    launched = launch;
    failed = false;
    message.clear();
    greedy = launch->schedule >= GREEDY;
    random_state = launch->seed * 2654435761u + 1;
    emulated_ulps = launch->ulps;
    choose_lane_order();
    races::begin_launch();
    for (uint lane = 0; lane < 32; lane++)
        for (int j = 0; j < 2; j++) races::set_lanes(element_of(lane) + j, lane);
    signals::catch_all();
    const uint control = _mm_getcsr();
    if (launch->flushes_denormals) _mm_setcsr(control | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO);
    run_grid();
    _mm_setcsr(control);
    signals::release_all();
    races::end_launch();
    emulated_current = nullptr;
    emulated_ulps = 0;
    if (failed) snprintf(text, text_bytes, "%s", message.c_str());
    return failed;
}
}
