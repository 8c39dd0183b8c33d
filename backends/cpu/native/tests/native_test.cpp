// The library by itself, for sanitizers and for processors without Python: random problems of the
// C ABI against the formula in double, from several threads at once, and arguments that no caller
// of ours sends.
//
//   native_test [problems] [seed] [calling threads]
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "oracle.h"
#include "workspaces.h"

namespace {

using native_test::formula;
using native_test::score_mod;
using native_test::shape;
using native_test::wanted;

constexpr float poison = __builtin_nanf("");

// Memory of exactly so many bytes, aligned to 64: a sanitizer sees the first byte past it; without
// one, bytes behind it say whether they were written to.
struct memory {
    explicit memory(int64_t bytes) : data(nullptr), bytes(bytes) {
        if (bytes > 0) data = std::aligned_alloc(64, (bytes + guard + 63) / 64 * 64);
        if (data) std::memset(static_cast<char*>(data) + bytes, 0x5a, guard);
    }
    ~memory() { std::free(data); }
    memory(const memory&) = delete;
    int64_t written_past() const {
        int64_t found = 0;
        for (int64_t i = 0; data && i < guard; ++i)
            found += static_cast<char*>(data)[bytes + i] != 0x5a;
        return found;
    }
#if defined(__SANITIZE_ADDRESS__)
    static constexpr int64_t guard = 0;
#else
    static constexpr int64_t guard = 4096;
#endif
    void* data;
    int64_t bytes;
};

uint16_t bf16(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
float of_bf16(uint16_t x) {
    const uint32_t u = uint32_t(x) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

// A tensor [batch, heads, length, dim] of float or bf16, and its values in double.
struct tensor {
    tensor(int64_t batch, int64_t heads, int64_t length, int64_t dim, int32_t dtype)
        : size(batch * heads * length * dim), dtype(dtype), bytes(size * (dtype == AF_F32 ? 4 : 2)),
          values(size) {
        data.resize(bytes);
        view = {data.data(), {heads * length * dim, length * dim, dim, 1}};
    }
    void fill(std::mt19937_64& random) {
        std::normal_distribution<float> normal;
        for (int64_t i = 0; i < size; ++i) {
            const float x = normal(random);
            if (dtype == AF_F32) {
                std::memcpy(data.data() + 4 * i, &x, 4);
                values[i] = x;
            } else {
                const uint16_t h = bf16(x);
                std::memcpy(data.data() + 2 * i, &h, 2);
                values[i] = of_bf16(h);
            }
        }
    }
    double at(int64_t i) const {
        if (dtype == AF_F32) {
            float x;
            std::memcpy(&x, data.data() + 4 * i, 4);
            return x;
        }
        uint16_t h;
        std::memcpy(&h, data.data() + 2 * i, 2);
        return of_bf16(h);
    }
    int64_t size;
    int32_t dtype;
    int64_t bytes;
    std::vector<double> values;
    std::vector<char> data;
    af_tensor view;
};

// What the mods below read: the program's code.
struct mod_code {
    score_mod mod;
    int64_t window;
};
const mod_code& code_of(const af_program* program) {
    return *static_cast<const mod_code*>(program->code);
}

bool in_window(int64_t window, int64_t q, int64_t k) { return k <= q && q - k < window; }

void window_mask(const af_program* program, const af_tile* t) {
    for (int r = 0; r < t->rows; ++r)
        for (int word = 0; word < (t->cols + 15) / 16; ++word) {
            uint16_t bits = 0;
            for (int i = 0; i < 16; ++i) {
                const int c = word * 16 + i;
                if (c < t->cols && in_window(code_of(program).window, t->q + r, t->kv + c))
                    bits = static_cast<uint16_t>(bits | 1u << i);
            }
            t->live[r * t->live_ld + word] = bits;
        }
}

void modify(const af_program* program, const af_tile* t) {
    for (int r = 0; r < t->rows; ++r)
        for (int c = 0; c < t->cols; ++c) {
            float& s = t->score[r * t->ld + c];
            s = static_cast<float>(code_of(program).mod.value(s, t->q + r, t->kv + c));
        }
}

void modify_backward(const af_program* program, const af_tile* t) {
    for (int r = 0; r < t->rows; ++r)
        for (int c = 0; c < t->cols; ++c) {
            float& grad = t->grad[r * t->ld + c];
            const bool live =
                !t->live || (t->live[r * t->live_ld + c / 16] >> (c % 16) & 1) != 0;
            if (!live) {
                grad = 0;
                continue;
            }
            const double k_minus_q = double(t->kv + c - t->q - r);
            if (t->captured_grad && t->captured_grad[0]) t->captured_grad[0][0] += grad * k_minus_q;
            grad *= static_cast<float>(
                code_of(program).mod.derivative(t->score[r * t->ld + c]));
        }
}

// A block mask of `window`, as runs; transposed too.
struct runs {
    runs(const shape& n, int64_t q_block, int64_t kv_block, int64_t window) {
        const int64_t rows = (n.q_length + q_block - 1) / q_block;
        const int64_t columns = (n.kv_length + kv_block - 1) / kv_block;
        std::vector<int> kind(rows * columns);
        for (int64_t q = 0; q < rows * q_block; ++q)
            for (int64_t k = 0; k < columns * kv_block; ++k) {
                if (q >= n.q_length || k >= n.kv_length) continue;
                int& all = kind[q / q_block * columns + k / kv_block];
                all |= in_window(window, q, k) ? 1 : 2;
            }
        // 1: all live, 3: some, 2: none.
        for (int& each : kind) each = each == 3 ? 2 : each == 1 ? 1 : 0;
        list(kind, rows, columns, columns, 1, forward_offsets, forward);
        list(kind, columns, rows, 1, columns, backward_offsets, backward);
    }
    static void list(const std::vector<int>& kind, int64_t rows, int64_t columns, int64_t by_row,
                     int64_t by_column, std::vector<int32_t>& offsets, std::vector<int32_t>& to) {
        offsets.push_back(0);
        for (int64_t r = 0; r < rows; ++r) {
            for (int32_t c = 0; c < columns; ++c) {
                const int k = kind[r * by_row + c * by_column];
                if (k == 0) continue;
                const bool first = static_cast<int32_t>(to.size() / 3) == offsets.back();
                if (!first && to[to.size() - 2] == c && to.back() == k)
                    to[to.size() - 2] = c + 1;
                else
                    to.insert(to.end(), {c, c + 1, k});
            }
            offsets.push_back(static_cast<int32_t>(to.size() / 3));
        }
    }
    std::vector<int32_t> forward_offsets, forward, backward_offsets, backward;
};

std::atomic<int> failures{0};

void compare(const char* what, int64_t number, double found, double wanted, double limit) {
    if (found == wanted || std::fabs(found - wanted) <= limit) return;
    if (failures++ < 20)
        std::printf("problem %" PRId64 ": %s is %g, wanted %g (limit %g), level %s\n", number, what,
                    found, wanted, limit, af_isa());
}

void run_problem(int64_t number, uint64_t seed) {
    std::mt19937_64 random(seed * 1000003 + static_cast<uint64_t>(number));
    const auto draw = [&](std::vector<int64_t> from) { return from[random() % from.size()]; };
    shape n;
    n.batch = draw({1, 2});
    n.kv_heads = draw({1, 2});
    n.q_heads = n.kv_heads * draw({1, 1, 2, 4});
    n.q_length = draw({0, 1, 3, 4, 17, 40, 65, 130});
    n.kv_length = draw({0, 1, 31, 32, 33, 70, 129, 300, 520});
    n.head_dim = draw({1, 7, 16, 33, 64, 100});
    n.value_head_dim = draw({1, 8, 20, 64, 100, 160, n.head_dim});
    const int32_t dtype = draw({0, 0, 1}) ? AF_BF16 : AF_F32;
    mod_code code;
    code.mod.cap = draw({0, 0, 3});
    code.mod.slope = draw({0, 1}) ? 0.03 : 0.0;
    code.window = draw({1, 20, 1000});
    const bool masked = draw({0, 1}), modified = code.mod.cap > 0 || code.mod.slope != 0;

    tensor query(n.batch, n.q_heads, n.q_length, n.head_dim, dtype);
    tensor key(n.batch, n.kv_heads, n.kv_length, n.head_dim, dtype);
    tensor value(n.batch, n.kv_heads, n.kv_length, n.value_head_dim, dtype);
    tensor dout(n.batch, n.q_heads, n.q_length, n.value_head_dim, dtype);
    for (tensor* each : {&query, &key, &value, &dout}) each->fill(random);
    tensor out(n.batch, n.q_heads, n.q_length, n.value_head_dim, dtype);
    std::vector<float> lse(n.rows(), poison), top(n.rows(), poison);
    std::vector<float> unrounded(n.rows() * n.value_head_dim, poison);

    const af_program mask_program = {window_mask, &code, sizeof code, 0};
    const af_program score_program = {modify, &code, sizeof code, 0};
    const af_program backward_program = {modify_backward, &code, sizeof code, 0};
    const int64_t q_block = draw({16, 32, 48, 128}), kv_block = draw({16, 48, 64, 128});
    const runs blocks(n, q_block, kv_block, code.window);

    af_forward_args forward = {};
    af_problem& p = forward.problem;
    p.dtype = dtype;
    p.threads = static_cast<int32_t>(draw({1, 2, 4}));
    p.batch = n.batch;
    p.q_heads = n.q_heads;
    p.kv_heads = n.kv_heads;
    p.q_length = n.q_length;
    p.kv_length = n.kv_length;
    p.head_dim = n.head_dim;
    p.value_head_dim = n.value_head_dim;
    p.query = query.view;
    p.key = key.view;
    p.value = value.view;
    p.scale = 1 / std::sqrt(double(n.head_dim));
    p.wanted = 7;
    if (masked) {
        p.has_mask = 1;
        p.q_block = static_cast<int32_t>(q_block);
        p.kv_block = static_cast<int32_t>(kv_block);
        p.mask_is_per_call = 1;
        p.runs = {blocks.forward_offsets.data(), blocks.forward.data(), 1, 1,
                  static_cast<int64_t>(blocks.forward_offsets.size()) - 1};
        p.transposed = {blocks.backward_offsets.data(), blocks.backward.data(), 1, 1,
                        static_cast<int64_t>(blocks.backward_offsets.size()) - 1};
        p.mask = &mask_program;
    }
    if (modified) {
        p.score = &score_program;
        p.score_backward = &backward_program;
    }
    forward.out = out.view;
    forward.lse = lse.data();
    forward.max_scores = top.data();
    forward.unrounded_out = unrounded.data();
    forward.workspace_bytes = af_forward_workspace(&p);
    memory workspace(forward.workspace_bytes);
    forward.workspace = workspace.data;
    af_error error;
    const int32_t status = af_forward(&forward, &error);
    compare("forward's status", number, status, AF_OK, 0);
    compare("bytes past forward's workspace", number, double(workspace.written_past()), 0, 0);

    const wanted w = formula(n, query.values, key.values, value.values, dout.values, p.scale,
                             code.mod, [&](int64_t, int64_t, int64_t q, int64_t k) {
                                 return !masked || in_window(code.window, q, k);
                             });
    const double limit = dtype == AF_F32 ? 2e-5 : 4e-2;
    for (int64_t i = 0; i < n.rows(); ++i)
        compare("lse", number, lse[i], w.lse[i], dtype == AF_F32 ? 1e-5 : 1e-4);
    for (int64_t i = 0; i < out.size; ++i) compare("out", number, out.at(i), w.out[i], limit);

    tensor dq(n.batch, n.q_heads, n.q_length, n.head_dim, dtype);
    tensor dk(n.batch, n.kv_heads, n.kv_length, n.head_dim, dtype);
    tensor dv(n.batch, n.kv_heads, n.kv_length, n.value_head_dim, dtype);
    af_backward_args backward = {};
    backward.problem = p;
    backward.out = out.view;
    backward.unrounded_out = unrounded.data();
    backward.lse = lse.data();
    backward.dout = dout.view;
    backward.dq = dq.view;
    backward.dk = dk.view;
    backward.dv = dv.view;
    double slope_grad = 0;
    void* captured_grad[] = {&slope_grad};
    const int32_t is_double[] = {1};
    const int64_t elements[] = {1};
    if (modified) {
        backward.captured_grad = captured_grad;
        backward.captured_grad_f64 = is_double;
        backward.captured_grad_elements = elements;
        backward.captured_count = 1;
    }
    backward.workspace_bytes = af_backward_workspace(&p, modified ? 1 : 0);
    memory backward_workspace(backward.workspace_bytes);
    backward.workspace = backward_workspace.data;
    const int32_t second = af_backward(&backward, &error);
    compare("backward's status", number, second, AF_OK, 0);
    compare("bytes past backward's workspace", number, double(backward_workspace.written_past()),
            0, 0);
    const double room = dtype == AF_F32 ? 2e-4 : 0.15;
    // Of the last digit that the type holds.
    const double half = dtype == AF_F32 ? 0 : dtype == AF_BF16 ? 1.0 / 256 : 1.0 / 2048;
    for (int64_t i = 0; i < dq.size; ++i)
        compare("dq", number, dq.at(i), w.dq[i], room + half * std::fabs(w.dq[i]));
    for (int64_t i = 0; i < dk.size; ++i)
        compare("dk", number, dk.at(i), w.dk[i], room + half * std::fabs(w.dk[i]));
    for (int64_t i = 0; i < dv.size; ++i)
        compare("dv", number, dv.at(i), w.dv[i], room + half * std::fabs(w.dv[i]));
    if (modified) {
        const double scale = 1 + std::fabs(w.slope_grad) + double(n.rows());
        compare("slope's gradient", number, slope_grad, w.slope_grad,
                (dtype == AF_F32 ? 1e-3 : 0.1) * scale);
    }
}

// Arguments that no caller of ours sends get a status.
void refused() {
    af_error error;
    const auto expect = [](const char* what, int64_t found, int64_t wanted) {
        compare(what, -1, double(found), double(wanted), 0);
    };
    expect("no arguments", af_forward(nullptr, &error), AF_BAD_ARGUMENT);
    expect("no problem", af_forward_workspace(nullptr), -1);
    expect("no level", af_set_isa(nullptr), AF_BAD_ARGUMENT);
    expect("an unknown level", af_set_isa("abacus"), AF_BAD_ARGUMENT);
    expect("no gradients", af_backward(nullptr, &error), AF_BAD_ARGUMENT);
    float q[16] = {}, out[16];
    af_forward_args a = {};
    a.problem.threads = 1;
    a.problem.batch = a.problem.q_heads = a.problem.kv_heads = 1;
    a.problem.q_length = a.problem.kv_length = 1;
    a.problem.head_dim = a.problem.value_head_dim = 16;
    a.problem.query = a.problem.key = a.problem.value = {q, {16, 16, 16, 1}};
    a.out = {out, {16, 16, 16, 1}};
    expect("no workspace", af_forward(&a, &error), AF_WORKSPACE_TOO_SMALL);
    a.problem.kv_heads = 3;
    expect("heads that don't divide", af_forward(&a, &error), AF_BAD_ARGUMENT);
    a.problem.kv_heads = 1;
    a.problem.q_length = int64_t(1) << 60;
    expect("a length beyond memory", af_forward_workspace(&a.problem), -1);
    a.problem.q_length = 1;
    a.problem.threads = 0;
    expect("no threads", af_forward(&a, &error), AF_BAD_ARGUMENT);
}

}  // namespace

int main(int count, char** arguments) {
    const int64_t problems = count > 1 ? std::atoll(arguments[1]) : 200;
    const uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 0;
    const int callers = count > 3 ? std::atoi(arguments[3]) : 3;
    refused();
    std::string levels = af_isa_available();
    std::printf("levels: %s\n", levels.c_str());
    size_t at = 0;
    while (at <= levels.size()) {
        const size_t end = std::min(levels.find(',', at), levels.size());
        const std::string level = levels.substr(at, end - at);
        if (af_set_isa(level.c_str()) != AF_OK) return 1;
        for (const native_test::workspace& each : native_test::workspaces(level))
            if (each.found > each.most || each.found < each.least) {
                ++failures;
                std::printf("%s: a workspace of %" PRId64 " bytes, stated are %" PRId64 " to %" PRId64
                            "\n",
                            each.what.c_str(), each.found, each.least, each.most);
            }
        std::atomic<int64_t> next{0};
        std::vector<std::thread> threads;
        for (int i = 0; i < callers; ++i)
            threads.emplace_back([&] {
                for (int64_t n; (n = next++) < problems;) run_problem(n, seed);
            });
        for (std::thread& each : threads) each.join();
        std::printf("%s: %" PRId64 " problems, %d failures so far\n", level.c_str(), problems,
                    failures.load());
        at = end + 1;
    }
    return failures.load() ? 1 : 0;
}
