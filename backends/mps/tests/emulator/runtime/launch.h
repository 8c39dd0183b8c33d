// Arguments of a launch. `running.py` mirrors these structures.
#pragma once
#include <stddef.h>

// A piece of memory that the kernel may touch.
struct launch_buffer {
    char* at;
    size_t bytes;
    const char* name;
    char* guarded_begin; // the reserved pages around it: a touch of them belongs to this buffer
    char* guarded_end;
    int kind;
};
enum buffer_kind { WRITABLE = 0, READ_ONLY = 1, CONSTANT = 2, UNTRACKED = 3 };

enum schedule_kind { FORWARD, REVERSE, RANDOM, GREEDY, GREEDY_REVERSE };
enum matrix_layout { APPLE_LAYOUT, ROWS_LAYOUT };

struct kernel_launch {
    void (*entry)(void**);
    void** arguments;
    unsigned threads[3];
    unsigned group[3];
    int schedule;
    unsigned seed;
    int layout;
    int flushes_denormals;
    int ulps;
    int reversed_sums;
    int races;         // the library is of the race build
    int granule_shift; // accesses are tracked per 1 << granule_shift bytes
    double seconds;    // of CPU time, after which the kernel is stopped
    const launch_buffer* buffers;
    int buffer_count;
    const char* kernel_name;
    char* threadgroup_begin; // the library's section of threadgroup variables
    char* threadgroup_end;
    const void* variables; // emulated_variable[], of all kernels of the library
    const void* variables_end;
    const char* code_begin;
    const char* code_end;
};
