// Parallel regions, one at a time: on the threads of torch's own OpenMP runtime where it has been
// named, else on workers that sleep on a condition variable.
//
// This library links no OpenMP: a second runtime beside torch's spins on the cores that torch's
// threads need. In turn torch's threads spin for some milliseconds after each of its operations,
// on the cores that our workers need: with 16 threads that took longer than the attention between
// them.
#include "pool.h"

#include "anyflex_cpu.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace {

constexpr int most_segments = 64;

// Segments of jobs, one per thread. Neighbouring jobs read the same keys, often keys that this
// thread has packed before, so a thread works through its own segment, which stays in its cache,
// and then helps others.
struct region {
    region(void (*job)(void*, int64_t, int), void* context, int64_t jobs, int threads)
        : job_(job),
          context_(context),
          segments_(threads < most_segments ? threads : most_segments) {
        for (int i = 0; i < segments_; ++i) {
            segment_[i].next = jobs / segments_ * i + jobs % segments_ * i / segments_;
            segment_[i].end = jobs / segments_ * (i + 1) + jobs % segments_ * (i + 1) / segments_;
        }
    }

    void work(int thread) {
        for (int i = 0; i < segments_; ++i) {
            segment& s = segment_[(thread + i) % segments_];
            for (;;) {
                const int64_t index = s.next.fetch_add(1, std::memory_order_relaxed);
                if (index >= s.end) break;
                job_(context_, index, thread);
            }
        }
    }

   private:
    struct alignas(64) segment {
        std::atomic<int64_t> next;
        int64_t end;
    };
    void (*job_)(void*, int64_t, int);
    void* context_;
    int segments_;
    segment segment_[most_segments];
};

class pool {
   public:
    // False if another thread is running a region. Up to `helpers` workers join.
    bool run(region& work, int helpers) {
        if (!taken_.try_lock()) return false;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            grow(helpers);
            work_ = &work;
            wanted_ = helpers;
        }
        wake_.notify_all();
        work.work(0);
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wanted_ = 0;  // workers that wake later find no work
            done_.wait(lock, [&] { return working_ == 0; });
        }
        taken_.unlock();
        return true;
    }

   private:
    void grow(int workers) {
        for (; workers_ < workers; ++workers_) {
            try {
                std::thread([this] { live(); }).detach();
            } catch (const std::system_error&) {
                return;  // the system gives no more threads: work with these
            }
        }
    }

    void live() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return wanted_ > 0; });
            const int thread = wanted_--;
            ++working_;
            region* work = work_;
            lock.unlock();
            work->work(thread);
            lock.lock();
            if (--working_ == 0) done_.notify_one();
        }
    }

    std::mutex taken_;  // held by the thread that runs a region
    std::mutex mutex_;  // guards everything below
    std::condition_variable wake_, done_;
    region* work_ = nullptr;
    int workers_ = 0;
    int wanted_ = 0;   // workers that may still join the region
    int working_ = 0;  // workers in the region
};

// Never destroyed: workers outlive static destructors.
pool* the_pool = new pool;

// libgomp's entry points, which Intel's and LLVM's runtimes have as well.
typedef void (*team_function)(void (*)(void*), void*, unsigned threads, unsigned flags);
typedef int (*member_function)();
std::atomic<team_function> the_team{nullptr};
std::atomic<member_function> the_member{nullptr};
std::atomic_flag team_is_taken = ATOMIC_FLAG_INIT;

// A job that calls af_parallel works alone.
thread_local bool inside = false;

// False if there is no team, or another thread has it.
bool run_on_team(region& work, int threads) {
    const team_function team = the_team.load(std::memory_order_acquire);
    if (!team || team_is_taken.test_and_set(std::memory_order_acquire)) return false;
    const auto share = [](void* context) {
        inside = true;
        static_cast<region*>(context)->work(the_member.load(std::memory_order_relaxed)());
        inside = false;
    };
    team(share, &work, static_cast<unsigned>(threads), 0);
    team_is_taken.clear(std::memory_order_release);
    return true;
}

#if !defined(_WIN32)
// A forked child has none of its parent's threads, and the parent's locks in any state: it starts
// with a pool of its own, because no OpenMP runtime survives a fork.
void forget_threads() {
    the_team.store(nullptr);
    the_pool = new pool;
}
const int watching_forks = pthread_atfork(nullptr, nullptr, forget_threads);
#endif

}  // namespace

void af_share_threads(void* parallel, void* thread_number) {
    the_member.store(reinterpret_cast<member_function>(thread_number));
    the_team.store(reinterpret_cast<team_function>(parallel), std::memory_order_release);
}

void af_parallel(int64_t jobs, int threads, void (*job)(void*, int64_t, int), void* context) {
    const int helpers = static_cast<int>((jobs < threads ? jobs : threads) - 1);
    if (helpers > 0 && !inside) {
        region work(job, context, jobs, helpers + 1);
        if (the_team.load(std::memory_order_relaxed)) {
            if (run_on_team(work, threads)) return;
        } else {
            inside = true;
            const bool done = the_pool->run(work, helpers);
            inside = false;
            if (done) return;
        }
    }
    for (int64_t i = 0; i < jobs; ++i) job(context, i, 0);
}

void af_wait_a_little(int turn) {
    // The thread that others wait for may not be running: after a microsecond or so it gets the
    // core.
    constexpr int turns = 64;
    if (turn >= turns) return std::this_thread::yield();
#if defined(__x86_64__) || defined(_M_X64)
    __builtin_ia32_pause();
#endif
}
