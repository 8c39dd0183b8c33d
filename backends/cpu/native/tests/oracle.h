// The formula in double: attention of one problem, forward and backward, by loops over live pairs.
// NaN and infinity in the inputs go where IEEE 754's arithmetic takes them.
#pragma once
#include <cmath>
#include <vector>

#include "mods.h"

namespace native_test {

struct shape {
    int64_t batch, q_heads, kv_heads, q_length, kv_length, head_dim, value_head_dim;
    int64_t group() const { return q_heads / kv_heads; }
    int64_t rows() const { return batch * q_heads * q_length; }
    int64_t keys() const { return batch * kv_heads * kv_length; }
    int64_t row(int64_t b, int64_t h, int64_t q) const { return (b * q_heads + h) * q_length + q; }
    int64_t key(int64_t b, int64_t h, int64_t k) const {
        return (b * kv_heads + h / group()) * kv_length + k;
    }
};

// Decides which pairs are kept, by the function of docs/plugins-advanced.md; all are where
// `threshold` is 0.
struct dropout {
    uint32_t words[2], threshold;
    float scale;

    static uint32_t hashed(uint32_t word, uint32_t between) {
        word = ((word ^ (word >> 16)) * 0x21f0aaadu) ^ between;
        word = (word ^ (word >> 15)) * 0x735a2d97u;
        return word ^ (word >> 15);
    }
    bool keeps(int64_t b, int64_t h, int64_t q, int64_t k) const {
        uint32_t row[2];
        for (int i = 0; i < 2; ++i) {
            row[i] = words[i];
            for (int64_t index : {b, h, q}) row[i] = hashed(row[i] ^ uint32_t(index), 0);
        }
        return hashed(row[0] ^ uint32_t(k), row[1]) >= threshold;
    }
};

// All arrays are dense, in the order of their indices.
struct wanted {
    std::vector<double> out, lse, row_max, dq, dk, dv;

    bool has_nan() const {
        for (const auto* each : {&out, &dq, &dk, &dv})
            for (double x : *each)
                if (std::isnan(x)) return true;
        return false;
    }
};

// Gradients of captured tensors go into `mod`.
inline wanted formula(const shape& n, const std::vector<double>& query,
                      const std::vector<double>& key, const std::vector<double>& value,
                      const std::vector<double>& dout, const std::vector<float>& dlse,
                      double scale, const dropout& dropped, mods& mod) {
    const int64_t E = n.head_dim, V = n.value_head_dim;
    wanted w;
    w.out.assign(n.rows() * V, 0);
    w.lse.assign(n.rows(), -INFINITY);
    w.row_max.assign(n.rows(), -INFINITY);
    w.dq.assign(n.rows() * E, 0);
    w.dk.assign(n.keys() * E, 0);
    w.dv.assign(n.keys() * V, 0);
    std::vector<double> raw(n.kv_length), weight(n.kv_length);
    std::vector<int64_t> live;
    for (int64_t b = 0; b < n.batch; ++b)
        for (int64_t h = 0; h < n.q_heads; ++h)
            for (int64_t q = 0; q < n.q_length; ++q) {
                const int64_t row = n.row(b, h, q);
                double row_max = -INFINITY, row_sum = 0, delta = 0;
                live.clear();
                for (int64_t k = 0; k < n.kv_length; ++k) {
                    if (!mod.live(h, q, k)) continue;
                    live.push_back(k);
                    double dot = 0;
                    for (int64_t e = 0; e < E; ++e)
                        dot += query[row * E + e] * key[n.key(b, h, k) * E + e];
                    raw[k] = dot * scale;
                    weight[k] = mod.value(raw[k], h, q, k);
                    // NaN wins, and stays.
                    if (weight[k] > row_max || std::isnan(weight[k])) row_max = weight[k];
                }
                w.row_max[row] = row_max;
                if (row_max == -INFINITY) continue;
                for (int64_t k : live) row_sum += weight[k] = std::exp(weight[k] - row_max);
                w.lse[row] = row_max + std::log(row_sum);
                for (int64_t k : live) {
                    weight[k] /= row_sum;
                    if (!dropped.keeps(b, h, q, k)) continue;
                    const double given = weight[k] * dropped.scale;
                    for (int64_t e = 0; e < V; ++e)
                        w.out[row * V + e] += given * value[n.key(b, h, k) * V + e];
                }
                // The row's weights are NaN, and so is out, also where all of them are dropped.
                if (std::isnan(row_sum))
                    for (int64_t e = 0; e < V; ++e) w.out[row * V + e] = NAN;
                for (int64_t e = 0; e < V; ++e) delta += dout[row * V + e] * w.out[row * V + e];
                delta -= dlse[row];
                for (int64_t k : live) {
                    const int64_t at = n.key(b, h, k);
                    const bool kept = dropped.keeps(b, h, q, k);
                    double dp = 0;
                    for (int64_t e = 0; kept && e < V; ++e) {
                        dp += dropped.scale * dout[row * V + e] * value[at * V + e];
                        w.dv[at * V + e] += dropped.scale * weight[k] * dout[row * V + e];
                    }
                    const double modified = weight[k] * (dp - delta);
                    mod.learn(modified, weight[k] * (std::fabs(dp) + std::fabs(delta)), h, q, k);
                    const double ds = modified * mod.derivative(raw[k]) * scale;
                    for (int64_t e = 0; e < E; ++e) {
                        w.dq[row * E + e] += ds * key[at * E + e];
                        w.dk[at * E + e] += ds * query[row * E + e];
                    }
                }
            }
    return w;
}

}  // namespace native_test
