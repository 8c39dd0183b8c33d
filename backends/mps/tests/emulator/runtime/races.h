// The race build: the kernel is compiled with -fsanitize=thread, and these are the sanitizer.
//
// The race checks keep the last write and the last reads of each granule of threadgroup memory and of
// writable device memory. Two accesses race if one writes and no barrier that orders the memory lies
// between. Between threadgroups nothing orders device memory, so any second one races.
#pragma once
#include <dlfcn.h>

#include <algorithm>

#include "collectives.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace races {

// An access: the threadgroup's epoch << 20 | the simdgroup's << 10 | the thread.
typedef uint access;

struct granule {
    access written, read, read_before;
    uint readers;               // simdgroups that read in this epoch, by bits
    access added, added_before; // by atomics
};
constexpr access REDZONE = ~0u;
constexpr uint EPOCHS = 4095;

struct granule_view {
    access &written, &read, &read_before;
    uint& readers;
    access &added, &added_before;
};
static ALWAYS_INLINE granule_view view(granule& g) {
    return {g.written, g.read, g.read_before, g.readers, g.added, g.added_before};
}

// Granules of threadgroup memory, an array for each member: matrices are checked eight at a time.
struct granule_arrays {
    std::vector<access> written, read, read_before;
    std::vector<uint> readers;
    std::vector<access> added, added_before;

    ALWAYS_INLINE granule_view operator[](size_t i) {
        return {written[i], read[i], read_before[i], readers[i], added[i], added_before[i]};
    }
    void clear(size_t i) {
        written[i] = read[i] = read_before[i] = readers[i] = added[i] = added_before[i] = 0;
    }
    void make_redzone(size_t count) {
        for (auto* member : {&written, &read, &read_before, &readers, &added, &added_before})
            member->assign(count, 0);
        written.assign(count, REDZONE);
    }
};

// Accesses of this threadgroup, and the serial numbers, from 1, of others that made any.
struct device_granule {
    granule own;
    uint writer, reader, reader_before, adder, adder_before;
};

struct tracked_buffer {
    launch_buffer buffer;
    device_granule* granules;
    size_t count;
};

static granule_arrays threadgroup_granules;
static std::vector<tracked_buffer> buffers;
static unsigned char buffer_of_page[256];
static uint threadgroup_epoch, device_epoch, serial;
static int shift;
static uint lane_of[64]; // which lane holds an element of an 8x8 matrix

// An access to threadgroup memory, or else to device memory, by a thread.
static ALWAYS_INLINE access now(bool threadgroup, uint thread) {
    const uint epoch = threadgroup ? threadgroup_epoch : device_epoch;
    const uint of_simdgroup = threadgroup ? running->epoch : running->device_epoch;
    return epoch << 20 | (of_simdgroup & 1023) << 10 | thread;
}
static uint thread_of(access a) { return a & 1023; }

// Whether two accesses are of one epoch, by different threads, and not ordered by a barrier of a
// simdgroup that both threads are in.
static ALWAYS_INLINE bool unordered(access then, access now) {
    const access differences = then ^ now;
    if (then >> 20 != now >> 20 || !(differences & 1023)) return false;
    const bool one_simdgroup = !(differences & (31 << 5));
    return !(one_simdgroup && (differences & (1023 << 10)));
}

RARE static void fail_race(const char* memory, const char* does, access then, const char* did,
                           const void* pc) {
    fail("data race on " + std::string(memory) + ": " + this_thread() + " " + does +
         " what thread " + std::to_string(thread_of(then)) + " " + did +
         " with no barrier between, " + at_code(pc));
}

// The last change of a granule that races with an access, or 0.
static ALWAYS_INLINE access racing_change(const granule_view& g, access now) {
    if (unordered(g.written, now)) return g.written;
    if (__builtin_expect(g.added >> 20 != now >> 20, 1)) return 0;
    if (unordered(g.added, now)) return g.added;
    return unordered(g.added_before, now) ? g.added_before : 0;
}

// A read of a granule that races with a change, or 0.
static ALWAYS_INLINE access racing_read(const granule_view& g, access now, uint simdgroup) {
    if (g.read >> 20 != now >> 20) return 0;
    if (unordered(g.read, now)) return g.read;
    if (unordered(g.read_before, now)) return g.read_before;
    const uint others = g.readers & ~simdgroup;
    return others ? (g.read & ~1023u) | (access)__builtin_ctz(others) * 32 : 0;
}

RARE static void fail_change(const granule_view& g, access then, const char* memory, const char* does,
                             const void* pc) {
    fail_race(memory, does, then, then == g.written ? "wrote" : "changed by an atomic", pc);
}

static ALWAYS_INLINE bool may_write(granule_view g, access now, uint simdgroup, const char* memory,
                                    const void* pc) {
    if (const access then = racing_change(g, now)) {
        fail_change(g, then, memory, "writes", pc);
        return false;
    }
    if (const access then = racing_read(g, now, simdgroup)) {
        fail_race(memory, "overwrites", then, "read", pc);
        return false;
    }
    g.written = now;
    return true;
}

static ALWAYS_INLINE bool may_read(granule_view g, access now, uint simdgroup, const char* memory,
                                   const void* pc) {
    if (const access then = racing_change(g, now)) {
        fail_change(g, then, memory, "reads", pc);
        return false;
    }
    if (g.read == now) return true;
    if (g.read >> 20 != now >> 20) {
        g.read_before = 0;
        g.readers = simdgroup;
    } else {
        if (thread_of(g.read ^ now)) g.read_before = g.read;
        g.readers |= simdgroup;
    }
    g.read = now;
    return true;
}

// Atomic changes don't race with each other.
static bool may_add(granule_view g, access now, uint simdgroup, const char* memory, const void* pc) {
    if (unordered(g.written, now)) {
        fail_race(memory, "changes by an atomic", g.written, "wrote", pc);
        return false;
    }
    if (const access then = racing_read(g, now, simdgroup)) {
        fail_race(memory, "changes by an atomic", then, "read", pc);
        return false;
    }
    if (thread_of(g.added ^ now)) g.added_before = g.added;
    g.added = now;
    return true;
}

static const emulated_variable* variable_near(const char* p) {
    const auto* end = (const emulated_variable*)launched->variables_end;
    const emulated_variable* nearest = nullptr;
    for (const auto* v = (const emulated_variable*)launched->variables; v < end; v++)
        if ((char*)v->at <= p && (!nearest || v->at > nearest->at)) nearest = v;
    return nearest;
}

RARE static void fail_threadgroup_bounds(const char* p, bool write, const void* pc) {
    const emulated_variable* v = variable_near(p);
    fail(this_thread() + (write ? " writes" : " reads") +
         " past the end of the threadgroup variable " + (v ? v->name : "?") +
         (v ? ": at byte " + std::to_string(p - (char*)v->at) + " of " + std::to_string(v->bytes)
            : "") +
         ", " + at_code(pc));
}

static ALWAYS_INLINE bool touch_threadgroup(const char* p, uint bytes, bool write, uint thread,
                                            const void* pc) {
    const access access_now = now(true, thread);
    const uint simdgroup = 1u << running->lane.simdgroup;
    const size_t at = p - launched->threadgroup_begin;
    for (size_t k = at >> shift; k <= (at + bytes - 1) >> shift; k++) {
        const granule_view g = threadgroup_granules[k];
        if (__builtin_expect(g.written == REDZONE, 0)) {
            fail_threadgroup_bounds(p, write, pc);
            return false;
        }
        const bool fine = write ? may_write(g, access_now, simdgroup, "threadgroup memory", pc)
                                : may_read(g, access_now, simdgroup, "threadgroup memory", pc);
        if (!fine) return false;
    }
    return true;
}

static void touch_threadgroup_atomically(const char* p, uint bytes, const void* pc) {
    const access access_now = now(true, running->lane.thread_index);
    const uint simdgroup = 1u << running->lane.simdgroup;
    const size_t at = p - launched->threadgroup_begin;
    for (size_t k = at >> shift; k <= (at + bytes - 1) >> shift; k++) {
        const granule_view g = threadgroup_granules[k];
        if (g.written == REDZONE) return fail_threadgroup_bounds(p, true, pc);
        if (!may_add(g, access_now, simdgroup, "threadgroup memory", pc)) return;
    }
}

RARE static void fail_groups(const char* does, uint other, const char* did,
                             const tracked_buffer& b, const void* pc) {
    fail("data race between threadgroups on " + std::string(b.buffer.name) + ": " + this_thread() +
         " " + does + " what the " + std::to_string(other) + ". threadgroup " + did + ", " +
         at_code(pc));
}

static inline bool other(uint group) { return group && group != serial; }

static inline void remember(uint& last, uint& before) {
    if (last == serial) return;
    before = last;
    last = serial;
}

static void touch_device(tracked_buffer& b, size_t at, uint bytes, bool write, uint thread,
                         const void* pc) {
    const access access_now = now(false, thread);
    const uint simdgroup = 1u << running->lane.simdgroup;
    for (size_t k = at >> shift; k <= (at + bytes - 1) >> shift; k++) {
        device_granule& g = b.granules[k];
        const char* does = write ? "writes" : "reads";
        if (other(g.writer)) return fail_groups(does, g.writer, "wrote", b, pc);
        if (other(g.adder)) return fail_groups(does, g.adder, "changed by an atomic", b, pc);
        if (other(g.adder_before))
            return fail_groups(does, g.adder_before, "changed by an atomic", b, pc);
        if (write) {
            if (other(g.reader)) return fail_groups(does, g.reader, "read", b, pc);
            if (other(g.reader_before)) return fail_groups(does, g.reader_before, "read", b, pc);
            if (!may_write(view(g.own), access_now, simdgroup, b.buffer.name, pc)) return;
            g.writer = serial;
        } else {
            if (!may_read(view(g.own), access_now, simdgroup, b.buffer.name, pc)) return;
            remember(g.reader, g.reader_before);
        }
    }
}

static void touch_atomically(tracked_buffer& b, size_t at, uint bytes, const void* pc) {
    for (size_t k = at >> shift; k <= (at + bytes - 1) >> shift; k++) {
        device_granule& g = b.granules[k];
        const char* does = "changes by an atomic";
        if (other(g.writer)) return fail_groups(does, g.writer, "wrote", b, pc);
        if (other(g.reader)) return fail_groups(does, g.reader, "read", b, pc);
        if (other(g.reader_before)) return fail_groups(does, g.reader_before, "read", b, pc);
        const access access_now = now(false, running->lane.thread_index);
        const uint simdgroup = 1u << running->lane.simdgroup;
        if (!may_add(view(g.own), access_now, simdgroup, b.buffer.name, pc)) return;
        remember(g.adder, g.adder_before);
    }
}

static tracked_buffer* buffer_at(const char* p, uint bytes) {
    // A buffer's pages are its own.
    unsigned char& guess = buffer_of_page[(size_t)p >> 12 & 255];
    size_t i = guess;
    for (size_t tried = 0; tried < buffers.size(); tried++) {
        const launch_buffer& b = buffers[i].buffer;
        if (p >= b.at && p + bytes <= b.at + b.bytes) {
            guess = (unsigned char)i;
            return &buffers[i];
        }
        if (++i == buffers.size()) i = 0;
    }
    return nullptr;
}

RARE static void fail_bounds(const char* p, bool write, const void* pc) {
    if (const launch_buffer* buffer = signals::guard_of(p))
        fail(signals::wrong_access(*buffer, p, write) + ", " + at_code(pc));
    else
        fail(this_thread() + (write ? " writes" : " reads") + " out of bounds of every buffer, " +
             at_code(pc));
}

static __attribute__((noinline)) void touch_buffer(const char* p, uint bytes, bool write,
                                                   uint thread, const void* pc) {
    if (tracked_buffer* b = buffer_at(p, bytes)) {
        if (b->granules)
            touch_device(*b, p - b->buffer.at, bytes, write, thread, pc);
        else if (write && b->buffer.kind != UNTRACKED)
            fail(signals::wrong_access(b->buffer, p, true) + ", " + at_code(pc));
        return;
    }
    // Tables of constants stand in the library.
    if (write || p < launched->code_begin || p >= launched->code_end) fail_bounds(p, write, pc);
}

static ALWAYS_INLINE void touch(const void* address, uint bytes, bool write, const void* pc) {
    const char* p = (const char*)address;
    if ((size_t)(p - running->stack) < STACK_BYTES) return;
    const uint thread = running->lane.thread_index;
    if (p >= launched->threadgroup_begin && p + bytes <= launched->threadgroup_end)
        touch_threadgroup(p, bytes, write, thread, pc);
    else
        touch_buffer(p, bytes, write, thread, pc);
}

// A vector of the members of eight neighbouring granules.
typedef uint eight __attribute__((ext_vector_type(8)));
typedef uint eight_anywhere __attribute__((ext_vector_type(8), aligned(4)));

// The lane that holds each granule of an 8x8 matrix: by whether rows or columns lie together in
// memory, by the exponent of an element's granules, and by row or column.
static uint lanes_of_rows[2][3][8][32];

static void set_lanes(uint element, uint lane) {
    lane_of[element] = lane;
    const uint row = element / 8, column = element % 8;
    for (uint x = 0; x < 3; x++)
        for (uint k = 0; k < 1u << x; k++) {
            lanes_of_rows[0][x][row][(column << x) + k] = lane;
            lanes_of_rows[1][x][column][(row << x) + k] = lane;
        }
}

// Checks and notes accesses of eight neighbouring granules; false, and none of them noted, where
// there may be a fault.
static ALWAYS_INLINE bool touch_eight(size_t k, eight lanes, bool write) {
    granule_arrays& g = threadgroup_granules;
    const eight here = now(true, running->lane.thread_index & ~31u) | lanes;
    const eight written = *(eight_anywhere*)&g.written[k], added = *(eight_anywhere*)&g.added[k];
    const eight read = *(eight_anywhere*)&g.read[k];
    const auto written_now = (written >> 20 == here >> 20) & (((written ^ here) & 1023) != 0);
    const auto changed = written_now | (written == REDZONE) | (added >> 20 == here >> 20);
    const auto read_now = read >> 20 == here >> 20;
    if (__builtin_reduce_or(write ? changed | read_now : changed)) return false;
    if (write) {
        *(eight_anywhere*)&g.written[k] = here;
        return true;
    }
    const uint simdgroup = 1u << running->lane.simdgroup;
    eight_anywhere& before = *(eight_anywhere*)&g.read_before[k];
    eight_anywhere& readers = *(eight_anywhere*)&g.readers[k];
    before = read_now ? (((read ^ here) & 1023) != 0 ? read : before) : eight(0);
    readers = (read_now ? readers : eight(0)) | simdgroup;
    *(eight_anywhere*)&g.read[k] = here;
    return true;
}

// The lane that comes first checks all elements, each as an access of the lane that holds it.
static void touch_matrix(const char* first, size_t row_bytes, size_t column_bytes, uint bytes,
                         bool write, const void* pc) {
    const uint base = running->lane.thread_index & ~31u;
    const char* last = first + 7 * row_bytes + 7 * column_bytes + bytes;
    const bool shared = first >= launched->threadgroup_begin && last <= launched->threadgroup_end;
    const bool by_column = row_bytes == bytes;
    const int exponent = __builtin_ctz(bytes) - shift;
    const bool by_eight =
        shared && (by_column || column_bytes == bytes) && exponent >= 0 && exponent < 3;
    for (uint line = 0; line < 8; line++) {
        const char* begin = first + line * (by_column ? column_bytes : row_bytes);
        const size_t k = (begin - launched->threadgroup_begin) >> shift;
        const uint* lanes = by_eight ? lanes_of_rows[by_column][exponent][line] : nullptr;
        uint checked = 0;
        while (by_eight && checked < 8u << exponent &&
               touch_eight(k + checked, *(eight_anywhere*)(lanes + checked), write))
            checked += 8;
        for (uint i = by_eight ? checked >> exponent : 0; i < 8; i++) {
            const uint element = by_column ? i * 8 + line : line * 8 + i;
            const char* p = begin + i * (by_column ? row_bytes : column_bytes);
            if (!shared)
                touch_buffer(p, bytes, write, base + lane_of[element], pc);
            else if (!touch_threadgroup(p, bytes, write, base + lane_of[element], pc))
                return;
        }
    }
}

static void next_threadgroup_epoch() {
    if (++threadgroup_epoch < EPOCHS) return;
    threadgroup_epoch = 1;
    for (size_t i = 0; i < threadgroup_granules.written.size(); i++)
        if (threadgroup_granules.written[i] != REDZONE) threadgroup_granules.clear(i);
}

static void next_device_epoch() {
    if (++device_epoch < EPOCHS) return;
    device_epoch = 1;
    for (tracked_buffer& b : buffers)
        for (size_t i = 0; i < b.count; i++) b.granules[i].own = {};
}

static void begin_launch() {
    shift = launched->granule_shift;
    threadgroup_epoch = device_epoch = serial = 0;
    const size_t bytes = launched->threadgroup_end - launched->threadgroup_begin;
    threadgroup_granules.make_redzone((bytes >> shift) + 1);
    const auto* end = (const emulated_variable*)launched->variables_end;
    for (const auto* v = (const emulated_variable*)launched->variables; v < end; v++) {
        const size_t at = (char*)v->at - launched->threadgroup_begin;
        for (size_t k = at >> shift; v->bytes && k <= (at + v->bytes - 1) >> shift; k++)
            threadgroup_granules.clear(k);
    }
    memset(buffer_of_page, 0, sizeof buffer_of_page);
    for (int i = 0; i < launched->buffer_count; i++) {
        const launch_buffer& b = launched->buffers[i];
        tracked_buffer tracked = {b, nullptr, 0};
        if (b.kind == WRITABLE) {
            tracked.count = (b.bytes >> shift) + 1;
            tracked.granules = (device_granule*)calloc(tracked.count, sizeof(device_granule));
        }
        buffers.push_back(tracked);
    }
}

static void end_launch() {
    for (tracked_buffer& b : buffers) free(b.granules);
    buffers.clear();
}

} // namespace races

#define EMULATED_ACCESS(name, bytes, write)                                                       \
    void name(void* p) { races::touch(p, bytes, write, __builtin_return_address(0)); }
#define EMULATED_ACCESSES(bytes)                                                                  \
    EMULATED_ACCESS(__tsan_read##bytes, bytes, false)                                             \
    EMULATED_ACCESS(__tsan_write##bytes, bytes, true)                                             \
    EMULATED_ACCESS(__tsan_unaligned_read##bytes, bytes, false)                                   \
    EMULATED_ACCESS(__tsan_unaligned_write##bytes, bytes, true)                                   \
    EMULATED_ACCESS(__tsan_read_write##bytes, bytes, true)                                        \
    EMULATED_ACCESS(__tsan_unaligned_read_write##bytes, bytes, true)

extern "C" {
EMULATED_ACCESSES(1)
EMULATED_ACCESSES(2)
EMULATED_ACCESSES(4)
EMULATED_ACCESSES(8)
EMULATED_ACCESSES(16)

void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
    if (bytes) races::touch(from, (uint)bytes, false, __builtin_return_address(0));
    if (bytes) races::touch(to, (uint)bytes, true, __builtin_return_address(0));
    return memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, size_t bytes) {
    if (bytes) races::touch(from, (uint)bytes, false, __builtin_return_address(0));
    if (bytes) races::touch(to, (uint)bytes, true, __builtin_return_address(0));
    return memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
    if (bytes) races::touch(to, (uint)bytes, true, __builtin_return_address(0));
    return memset(to, value, bytes);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

void emulated_matrix(const void* first, size_t row_bytes, size_t column_bytes, uint element_bytes,
                     bool write) {
    simdgroup_state& s = *running->simdgroup;
    if (running->lane.matrix_accesses <= s.checked_accesses) return;
    s.checked_accesses = running->lane.matrix_accesses;
    races::touch_matrix((const char*)first, row_bytes, column_bytes, element_bytes, write,
                        __builtin_return_address(0));
}

void emulated_atomic(void* at, uint bytes) {
    const void* pc = __builtin_return_address(0);
    const char* p = (const char*)at;
    if (p >= launched->threadgroup_begin && p + bytes <= launched->threadgroup_end)
        return races::touch_threadgroup_atomically(p, bytes, pc);
    races::tracked_buffer* b = races::buffer_at(p, bytes);
    if (!b)
        races::fail_bounds(p, true, pc);
    else if (b->granules)
        races::touch_atomically(*b, p - b->buffer.at, bytes, pc);
}
}
