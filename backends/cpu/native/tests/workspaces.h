// Workspace sizes of the library, and those that the headers of its plans state.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "anyflex_cpu.h"

namespace native_test {

struct workspace {
    std::string what;
    int64_t found, least, most;
};

inline int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

inline bool has_pairs(const std::string& level) {
    return level == "avx512_bf16" || level == "amx_bf16";
}
inline bool has_tiles(const std::string& level) { return level == "amx_bf16"; }

// src/backward_plan.h. A unit is a (batch, kv head), or a kv head where batches share keys.
inline int64_t backward_units(const af_problem& p) {
    return (p.kv_batch_is_shared ? 1 : p.batch) * p.kv_heads;
}
inline int64_t backward_tile_keys(const af_problem& p, const std::string& level) {
    const int64_t dims = up(p.head_dim, 32) + up(p.value_head_dim, 32);
    return p.dtype == AF_BF16 && has_tiles(level) && dims >= 192 ? 256 : 128;
}
inline int64_t backward_partitions(const af_problem& p, const std::string& level) {
    const int64_t units = backward_units(p), rows = p.batch * p.q_heads * up(p.q_length, 128);
    const int64_t keys = backward_tile_keys(p, level), kv_tiles = up(p.kv_length, keys) / keys;
    const int64_t all_dq = rows * 4 * up(p.head_dim, 32);
    const int64_t most = (int64_t(1) << 30) / std::max<int64_t>(all_dq, 1);
    return std::max<int64_t>(std::min({up(64, units) / units, kv_tiles / 2, most}), 1);
}

inline workspace backward_workspace(const af_problem& p, const std::string& level,
                                    const std::string& what) {
    const bool pairs = p.dtype == AF_BF16 && has_pairs(level);
    const int64_t E = up(p.head_dim, 32), Ev = up(p.value_head_dim, 32), w = pairs ? 2 : 4;
    const int64_t R = backward_tile_keys(p, level), kv_tiles = up(p.kv_length, R) / R;
    const int64_t units = backward_units(p), streams = p.batch * p.q_heads / units;
    const int64_t q_tiles = up(p.q_length, 128) / 128;
    const int64_t partitions = backward_partitions(p, level);
    const int64_t jobs = p.threads > 1 ? 8 * p.threads : 1;
    const int64_t in_flight = std::min(units, up(jobs, partitions) / partitions);
    const int64_t a_unit =
        streams * q_tiles * (512 * (E + Ev) + 2112 + partitions * (512 * E + 1));
    const int64_t a_thread = R * ((2 * E + Ev) * w + (E + Ev) * 4 + 256 * w) +
                             64 * std::max(E, Ev) + 128 * 1024;
    const int64_t tables = 8 * kv_tiles + 44 * in_flight * partitions + 4 * in_flight;
    const int64_t most = in_flight * a_unit + p.threads * a_thread + tables + 512;
    const int64_t slack = in_flight * streams * q_tiles * 1024 + p.threads * 96 * 1024 + 1024;
    return {what + ", backward", af_backward_workspace(&p, 0, 0), most - slack, most};
}

// src/forward_plan.h, from above.
inline workspace forward_workspace(const af_problem& p, const std::string& what) {
    const int64_t E = up(p.head_dim, 32), Ev = up(p.value_head_dim, 32);
    const int64_t head = up(p.kv_length, 32) * ((E + Ev) * 4 + 1) + 256;
    const int64_t all = std::min(int64_t(64) << 20, p.batch * p.kv_heads * head);
    const int64_t packed = p.threads == 1 ? head : std::max(head, all);
    const int64_t q_tiles = up(p.q_length, 128) / 64;
    const int64_t live = p.has_mask ? std::min<int64_t>(16384 * q_tiles, 4 << 20) : 0;
    const int64_t a_thread = 128 * (E + Ev) * 4 + 192 * 1024;
    const int64_t jobs = p.batch * p.q_heads * q_tiles * 4;
    return {what + ", forward", af_forward_workspace(&p), 1,
            packed + live + p.threads * a_thread + jobs};
}

// The workspaces of the level in use, for problems of many sizes.
inline std::vector<workspace> workspaces(const std::string& level) {
    std::vector<workspace> found;
    for (const int32_t dtype : {AF_F32, AF_BF16})
        for (const int64_t length : {200, 1024, 5000})
            for (const int64_t dim : {40, 64, 128, 256})
                for (const int64_t heads : {1, 4, 32})
                    for (const int32_t threads : {1, 2, 16}) {
                        static char anywhere[64];
                        af_problem p = {};
                        p.query.data = p.key.data = p.value.data = anywhere;
                        p.dtype = dtype;
                        p.threads = threads;
                        p.batch = 2;
                        p.kv_heads = heads;
                        p.q_heads = 2 * heads;
                        p.q_length = length;
                        p.kv_length = length + 100;
                        p.head_dim = dim;
                        p.value_head_dim = dim == 64 ? 160 : dim;
                        p.wanted = 7;
                        const std::string what = level + ", dtype " + std::to_string(dtype) +
                                                 ", length " + std::to_string(length) + ", dim " +
                                                 std::to_string(dim) + ", heads " +
                                                 std::to_string(heads) + ", threads " +
                                                 std::to_string(threads);
                        found.push_back(backward_workspace(p, level, what));
                        found.push_back(forward_workspace(p, what));
                    }
    return found;
}

}  // namespace native_test
