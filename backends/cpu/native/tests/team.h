// Stands in for an OpenMP runtime whose threads calls run on, as torch's are.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "anyflex_cpu.h"

namespace native_test {

inline thread_local int member = 0;
inline std::atomic<int64_t> teams{0};

// As GOMP_parallel: the caller is thread 0, and returns when all have.
inline void run_team(void (*function)(void*), void* context, unsigned threads, unsigned) {
    ++teams;
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; ++i)
        others.emplace_back([=] {
            member = int(i);
            function(context);
        });
    function(context);
    for (std::thread& each : others) each.join();
}

// As omp_get_thread_num.
inline int team_member() { return member; }

// Makes calls that begin from now on run on a team's threads, or on the library's own.
inline void share_threads(bool of_a_team) {
    af_share_threads(of_a_team ? reinterpret_cast<void*>(&run_team) : nullptr,
                     reinterpret_cast<void*>(&team_member));
}

}  // namespace native_test
