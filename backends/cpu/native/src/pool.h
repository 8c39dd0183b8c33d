// The library's one thread pool.
#pragma once
#include <cstdint>

// Runs job(context, index, thread) for every index of [0, jobs), on the calling thread and up to
// threads - 1 others; returns when all are done. `thread` counts from 0 and is below `threads`.
// Jobs are taken in order, one at a time: put the longest first. Safe from several threads at once:
// who finds the pool taken works alone. Safe in a forked child, which makes its own threads.
// Threads sleep when there is no work: a pool that spins steals the cores of torch's.
void af_parallel(int64_t jobs, int threads, void (*job)(void* context, int64_t index, int thread),
                 void* context);
