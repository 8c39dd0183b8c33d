// The formula in double: attention of one problem, forward and backward, by loops.
#pragma once
#include <cmath>
#include <functional>
#include <vector>

#include "anyflex_cpu.h"

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

// All arrays are dense, in the order of their indices.
struct wanted {
    std::vector<double> out, lse, dq, dk, dv;
    double slope_grad = 0;
};

// Softcapped or plain scores plus slope * (k - q).
struct score_mod {
    double cap = 0;  // 0: none
    double slope = 0;
    double value(double s, int64_t q, int64_t k) const {
        if (cap > 0) s = cap * std::tanh(s / cap);
        return s + slope * double(k - q);
    }
    double derivative(double s) const {
        if (cap == 0) return 1;
        const double t = std::tanh(s / cap);
        return 1 - t * t;
    }
};

// live(b, h, q, k) says which pairs count.
inline wanted formula(const shape& n, const std::vector<double>& query,
                      const std::vector<double>& key, const std::vector<double>& value,
                      const std::vector<double>& dout, double scale, const score_mod& mod,
                      const std::function<bool(int64_t, int64_t, int64_t, int64_t)>& live) {
    const int64_t E = n.head_dim, V = n.value_head_dim;
    wanted w;
    w.out.assign(n.rows() * V, 0);
    w.lse.assign(n.rows(), -INFINITY);
    w.dq.assign(n.rows() * E, 0);
    w.dk.assign(n.keys() * E, 0);
    w.dv.assign(n.keys() * V, 0);
    std::vector<double> raw(n.kv_length), weight(n.kv_length);
    for (int64_t b = 0; b < n.batch; ++b)
        for (int64_t h = 0; h < n.q_heads; ++h)
            for (int64_t q = 0; q < n.q_length; ++q) {
                const int64_t row = n.row(b, h, q);
                double top = -INFINITY, sum = 0, delta = 0;
                for (int64_t k = 0; k < n.kv_length; ++k) {
                    double dot = 0;
                    for (int64_t e = 0; e < E; ++e)
                        dot += query[row * E + e] * key[n.key(b, h, k) * E + e];
                    raw[k] = dot * scale;
                    weight[k] = live(b, h, q, k) ? mod.value(raw[k], q, k) : -INFINITY;
                    top = std::max(top, weight[k]);
                }
                if (top == -INFINITY) continue;
                for (double& x : weight) sum += x = std::exp(x - top);
                w.lse[row] = top + std::log(sum);
                for (double& x : weight) x /= sum;
                for (int64_t k = 0; k < n.kv_length; ++k)
                    for (int64_t e = 0; e < V; ++e)
                        w.out[row * V + e] += weight[k] * value[n.key(b, h, k) * V + e];
                for (int64_t e = 0; e < V; ++e) delta += dout[row * V + e] * w.out[row * V + e];
                for (int64_t k = 0; k < n.kv_length; ++k) {
                    if (weight[k] == 0) continue;
                    const int64_t at = n.key(b, h, k);
                    double dp = 0;
                    for (int64_t e = 0; e < V; ++e) {
                        dp += dout[row * V + e] * value[at * V + e];
                        w.dv[at * V + e] += weight[k] * dout[row * V + e];
                    }
                    const double modified = weight[k] * (dp - delta);
                    w.slope_grad += modified * double(k - q);
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
