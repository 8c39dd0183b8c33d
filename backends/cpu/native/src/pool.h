// Work shared by threads: torch's own where af_share_threads has named them, else a pool's.
#pragma once
#include <cstdint>

// Runs job(context, index, thread) for every index of [0, jobs), on the calling thread and up to
// threads - 1 others; returns when all are done. `thread` counts from 0 and is below `threads`.
// Each thread takes jobs of its own segment in order, then of the others': put the longest first.
// Safe from several threads at once: a caller that finds the threads taken works alone. Safe in a
// forked child, which makes its own threads.
void af_parallel(int64_t jobs, int threads, void (*job)(void* context, int64_t index, int thread),
                 void* context);

// One step of waiting until another thread has finished a little work; `turn` counts the calls.
void af_wait_a_little(int turn);
