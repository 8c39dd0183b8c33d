// A call's workspace: pieces of it, the threads' errors, and the tiles that programs see.
#pragma once
#include "tiles.h"

namespace AF_LEVEL {

// Takes pieces off a workspace; with a null base it only adds up their bytes.
struct arena {
    char* base;
    int64_t used;

    template <class T> T* take(int64_t count) {
        T* piece = base ? reinterpret_cast<T*>(base + used) : nullptr;
        used += round_up(count * int64_t(sizeof(T)), 64);
        return piece;
    }
};

// The bytes that `take` takes off an arena.
template <class F> int64_t bytes_of(const F& take) {
    arena counted = {nullptr, 0};
    take(counted);
    return counted.used;
}

// Scratch of the mods' programs.
inline int64_t scratch_bytes(const af_problem& p, bool backward) {
    int64_t bytes = 0;
    const af_program* programs[] = {p.mask, p.score, backward ? p.score_backward : nullptr};
    for (const af_program* program : programs)
        if (program) bytes = larger(bytes, program->scratch_bytes);
    return bytes;
}

// A tile of `rows` and `cols` from (b, h, q, kv) on, without what it reads and writes.
inline af_tile tile_of(const af_problem& p, int64_t b, int64_t h, int64_t q, int64_t kv,
                       int64_t rows, int64_t cols, void* scratch, af_error* error) {
    af_tile tile;
    memset(&tile, 0, sizeof tile);
    tile.rows = static_cast<int32_t>(rows);
    tile.cols = static_cast<int32_t>(cols);
    tile.b = b;
    tile.h = h;
    tile.q = q;
    tile.kv = kv;
    tile.inputs = &p.inputs;
    tile.scratch = scratch;
    tile.error = error;
    return tile;
}

// Threads' own errors: `run.buffers_of(thread).error`.
template <class RUN> void clear_errors(const RUN& run, int threads) {
    for (int i = 0; i < threads; ++i) memset(run.buffers_of(i).error, 0, sizeof(af_error));
}
template <class RUN> int32_t first_error(const RUN& run, int threads, af_error* error) {
    for (int i = 0; i < threads; ++i) {
        *error = *run.buffers_of(i).error;
        if (error->code != AF_OK) break;
    }
    return error->code;
}

}  // namespace AF_LEVEL
