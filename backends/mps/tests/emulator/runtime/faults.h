// Faults: the first one ends the kernel and becomes the launch's message. Signals of the CPU are
// faults too: an access of a page that guards a buffer, or a division of integers by zero.
#pragma once
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "fibers.h"

#define RARE __attribute__((noinline, cold))

static std::string message;

// The first fault counts; a thread that commits one goes no further.
RARE static void fail(const std::string& text) {
    if (!failed) {
        failed = true;
        message = text;
    }
    if (emulated_current) {
        void* abandoned;
        emulated_switch(&abandoned, scheduler_stack);
    }
}

// A place of the kernel: `running.py` makes a source line of it.
static std::string at_code(const void* pc) {
    char text[32];
    snprintf(text, sizeof text, "[code %p]", pc);
    return text;
}

static std::string triple(const uint3& v) {
    return "(" + std::to_string(v[0]) + ", " + std::to_string(v[1]) + ", " + std::to_string(v[2]) +
           ")";
}

static std::string this_thread() {
    const emulated_lane& lane = running->lane;
    return "thread " + std::to_string(lane.thread_index) + " of threadgroup " +
           triple(lane.group_position);
}

namespace signals {

constexpr int CAUGHT[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
static int overdue_signal() { return SIGRTMAX - 1; }

static struct sigaction before[5];
static char* handler_stack;
static stack_t stack_before;
static pid_t thread_id;
static timer_t timer;
static bool has_timer;

static int caught;
static char* touched;
static bool was_write;
static const void* code;

static std::string wrong_access(const launch_buffer& buffer, const char* p, bool write) {
    const long offset = p - buffer.at;
    if (offset >= 0 && offset < (long)buffer.bytes)
        return this_thread() + " writes to " + buffer.name + ", which is " +
               (buffer.kind == CONSTANT ? "constant" : "const");
    return this_thread() + (write ? " writes " : " reads ") +
           (offset < 0 ? "before the begin of " : "past the end of ") + buffer.name +
           ": at byte " + std::to_string(offset) + " of " + std::to_string(buffer.bytes);
}

// The buffer whose reserved pages hold an address, or null.
static const launch_buffer* guard_of(const char* p) {
    for (int i = 0; i < launched->buffer_count; i++) {
        const launch_buffer& buffer = launched->buffers[i];
        if (p >= buffer.guarded_begin && p < buffer.guarded_end) return &buffer;
    }
    return nullptr;
}

// The fiber goes on here after a signal, on its own stack.
RARE static void report() {
    std::string text;
    char* const stack = running->stack;
    if (caught == overdue_signal())
        text = "stopped after " + std::to_string(launched->seconds) + " s: " + this_thread() +
               " was running";
    else if (caught == SIGFPE)
        text = this_thread() + " divides an integer by zero, or overflows in a division";
    else if (caught == SIGILL)
        text = this_thread() + " does what Metal leaves undefined: overflow of a signed integer, "
                               "a shift by too many bits, or a float out of an integer's range";
    else if (touched >= stack && touched < stack + PAGE)
        text = this_thread() + " overflows its stack";
    else if (const launch_buffer* buffer = guard_of(touched))
        text = wrong_access(*buffer, touched, was_write);
    else if (touched)
        text =
            this_thread() + (was_write ? " writes" : " reads") + " out of bounds of every buffer";
    else
        text = this_thread() + " makes a misaligned vector access, or one by a wild pointer";
    fail(text + ", " + at_code(code));
}

static void on_signal(int signal, siginfo_t* info, void* context) {
    greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
    const char* pc = (const char*)registers[REG_RIP];
    const bool in_kernel = emulated_current && syscall(SYS_gettid) == thread_id && !failed;
    if (signal == overdue_signal()) {
        // Between kernel code, the timer comes again.
        if (!in_kernel || pc < launched->code_begin || pc >= launched->code_end) return;
    } else if (!in_kernel) {
        // Not a kernel's: whoever handled it before does.
        for (int i = 0; i < 4; i++)
            if (CAUGHT[i] == signal) sigaction(signal, &before[i], nullptr);
        return;
    }
    caught = signal;
    code = pc + 1; // as a return address, which belongs to the instruction before
    touched = signal == SIGSEGV || signal == SIGBUS ? (char*)info->si_addr : nullptr;
    was_write = registers[REG_ERR] & 2;
    // The fiber's frames are abandoned; its stack may have overflowed.
    char* top = running->stack + STACK_BYTES - 64;
    registers[REG_RSP] = (greg_t)((size_t)top & ~(size_t)15) - 8;
    registers[REG_RIP] = (greg_t)report;
}

static void catch_all() {
    thread_id = syscall(SYS_gettid);
    constexpr size_t bytes = 64 << 10;
    if (!handler_stack) handler_stack = new char[bytes];
    stack_t stack = {};
    stack.ss_sp = handler_stack;
    stack.ss_size = bytes;
    sigaltstack(&stack, &stack_before);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 4; i++) sigaction(CAUGHT[i], &action, &before[i]);
    sigaction(overdue_signal(), &action, &before[4]);

    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = overdue_signal();
    event._sigev_un._tid = thread_id;
    has_timer = launched->seconds > 0 && !timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer);
    if (!has_timer) return;
    itimerspec times = {};
    times.it_value.tv_sec = (long)launched->seconds;
    times.it_value.tv_nsec = (long)((launched->seconds - (long)launched->seconds) * 1e9) + 1;
    times.it_interval.tv_nsec = 1000000;
    timer_settime(timer, 0, &times, nullptr);
}

static void release_all() {
    if (has_timer) timer_delete(timer);
    for (int i = 0; i < 4; i++) sigaction(CAUGHT[i], &before[i], nullptr);
    // A signal of the deleted timer may still be pending.
    signal(overdue_signal(), SIG_IGN);
    sigaltstack(&stack_before, nullptr);
}

} // namespace signals
