// A random problem of the C ABI: drawn, computed by the library, compared with the formula.
#pragma once
#include "block_runs.h"
#include "bytecode_mods.h"
#include "coverage.h"
#include "drawing.h"
#include "workspaces.h"

namespace native_test {

class problem : drawing {
   public:
    problem(int64_t number, uint64_t seed)
        : drawing(seed * 1000003 + uint64_t(number)), number_(number) {}

    void run(coverage& covered) {
        const int32_t dtype = static_cast<int32_t>(draw({AF_F32, AF_BF16, AF_F16}));
        const int64_t kv_batch = shared_ ? 1 : n_.batch;
        const int layouts[] = {layout_of(layout_count), layout_of(layout_count),
                               layout_of(layout_count), layout_of(layout_count)};
        tensor query(n_.batch, n_.q_heads, n_.q_length, n_.head_dim, dtype, layouts[0]);
        tensor key(kv_batch, n_.kv_heads, n_.kv_length, n_.head_dim, dtype, layouts[1]);
        tensor value(kv_batch, n_.kv_heads, n_.kv_length, n_.value_head_dim, dtype, layouts[2]);
        tensor dout(n_.batch, n_.q_heads, n_.q_length, n_.value_head_dim, dtype, layouts[3]);
        tensor* const inputs[INPUTS] = {&query, &key, &value, &dout};
        for (int64_t i = 0; i < INPUTS; ++i)
            inputs[i]->fill(random_, i == nonfinite_ ? draw({1, 1, 3}) : 0);
        if (shared_) key.view.stride[0] = value.view.stride[0] = 0;
        tensor out(n_.batch, n_.q_heads, n_.q_length, n_.value_head_dim, dtype,
                   layout_of(row_layouts));
        std::vector<float> lse(n_.rows(), poison), max_scores(n_.rows(), poison);
        std::vector<float> unrounded(n_.rows() * n_.value_head_dim, poison);

        const bool interpreted = draw({0, 1, 1});
        const std::vector<uint64_t> mask = mask_code(mods_), score = score_code(mods_, false),
                                    slopes = score_code(mods_, true);
        const af_program mask_program = program(interpreted, mask, native_mask);
        const af_program score_program = program(interpreted, score, native_score);
        const af_program backward_program = program(interpreted, slopes, native_backward);
        const bool by_head = mods_.by_head || draw({0, 0, 1});
        const block_runs blocks(n_, mods_, by_head ? n_.q_heads : 1, q_block_, kv_block_);

        af_forward_args forward = {};
        af_problem& p = forward.problem;
        p.dtype = dtype;
        p.threads = static_cast<int32_t>(draw({1, 2, 4}));
        p.batch = n_.batch;
        p.q_heads = n_.q_heads;
        p.kv_heads = n_.kv_heads;
        p.q_length = n_.q_length;
        p.kv_length = n_.kv_length;
        p.head_dim = n_.head_dim;
        p.value_head_dim = n_.value_head_dim;
        p.query = query.view;
        p.key = key.view;
        p.value = value.view;
        p.scale = 1 / std::sqrt(double(n_.head_dim));
        p.wanted = static_cast<int32_t>(draw({7, 7, 7, 1, 2, 6}));
        p.kv_batch_is_shared = shared_;
        p.dropout_words[0] = dropped_.words[0];
        p.dropout_words[1] = dropped_.words[1];
        p.dropout_threshold = dropped_.threshold;
        p.dropout_scale = dropped_.scale;
        if (mods_.masked) {
            p.has_mask = 1;
            p.q_block = static_cast<int32_t>(q_block_);
            p.kv_block = static_cast<int32_t>(kv_block_);
            p.mask_is_per_call = !mods_.by_head;
            p.runs = blocks.of_queries();
            p.transposed = blocks.of_keys();
            p.mask = &mask_program;
        }
        if (mods_.modified()) {
            p.score = &score_program;
            p.score_backward = &backward_program;
        }
        const af_captured captured[CAPTURED] = {mods_.slope.view, mods_.table.view,
                                                mods_.index.view, mods_.kept.view};
        p.inputs = {captured, mods_.ints, &mods_.cap, {0, 0, 0, 0}};
        forward.out = out.view;
        forward.lse = lse.data();
        forward.max_scores = max_scores.data();
        forward.unrounded_out = unrounded.data();
        forward.workspace_bytes = af_forward_workspace(&p);
        memory workspace(forward.workspace_bytes);
        forward.workspace = workspace.data;
        af_error error;
        const int32_t status = af_forward(&forward, &error);
        const bool outside = reads_outside();
        compare("forward's status", number_, status, outside ? AF_READ_OUTSIDE : AF_OK, 0);
        compare("bytes past forward's workspace", number_, double(workspace.written_past()), 0, 0);
        compare("bytes between rows of out", number_, double(out.written_between()), 0, 0);

        const bool modified = mods_.modified() && n_.rows() > 0 && n_.kv_length > 0;
        covered.interpreted += interpreted && (modified || mods_.masked);
        covered.loads += interpreted && mods_.tabled && modified;
        covered.halves += dtype == AF_F16;
        covered.bf16s += dtype == AF_BF16;
        for (int each : layouts) covered.strides += each == every_second || each == columns;
        if (n_.rows() > 0) count_forward(covered, p, blocks);
        covered.shared_batches += shared_ && n_.batch > 1;
        covered.masks_by_head += mods_.masked && by_head;
        covered.reads_outside += outside;
        covered.dropouts += dropped_.threshold != 0 && n_.rows() > 0 && n_.kv_length > 0;
        if (outside) {
            compare("the tensor that was read outside", number_, error.captured, TABLE, 0);
            compare("its dimension", number_, error.dim, 1, 0);
            covered.several_threads += mods_.several_threads;
            return;
        }
        // Half of the problems: the others have the constant gradient 0 at lse.
        std::vector<float> dlse(n_.rows(), 0);
        const bool with_dlse = draw({0, 1});
        std::normal_distribution<float> normal;
        if (with_dlse)
            for (float& each : dlse) each = normal(random_);
        const wanted w = formula(n_, query.values, of_all_batches(key), of_all_batches(value),
                                 dout.values, dlse, p.scale, dropped_, mods_);
        const bool nonfinite = nonfinite_ != INPUTS && inputs[nonfinite_]->size > 0;
        if (nonfinite && n_.rows() > 0 && n_.kv_length > 0)
            ++(w.has_nan() ? covered.nonfinite_seen : covered.nonfinite_unseen);
        const double limit = dtype == AF_F32 ? 2e-5 : dtype == AF_BF16 ? 4e-2 : 5e-3;
        for (int64_t i = 0; i < n_.rows(); ++i) {
            compare("lse", number_, lse[i], w.lse[i],
                    (dtype == AF_F32 ? 1e-5 : 1e-4) * (1 + std::fabs(w.lse[i]) / 8));
            // Its values aren't rounded to 16 bits.
            compare("max_scores", number_, max_scores[i], w.row_max[i],
                    1e-6 * (8 + std::fabs(w.row_max[i])));
        }
        for (int64_t i = 0; i < out.size; ++i) compare("out", number_, out.at(i), w.out[i], limit);

        af_backward_args backward = {};
        tensor dq(n_.batch, n_.q_heads, n_.q_length, n_.head_dim, dtype, layout_of(output_layouts));
        tensor dk(kv_batch, n_.kv_heads, n_.kv_length, n_.head_dim, dtype,
                  layout_of(output_layouts));
        tensor dv(kv_batch, n_.kv_heads, n_.kv_length, n_.value_head_dim, dtype,
                  layout_of(output_layouts));
        backward.problem = p;
        backward.out = out.view;
        backward.unrounded_out = dtype == AF_F32 && draw({0, 1}) ? nullptr : unrounded.data();
        backward.lse = lse.data();
        backward.dout = dout.view;
        backward.dlse = with_dlse ? dlse.data() : nullptr;
        if (shared_) dk.view.stride[0] = dv.view.stride[0] = 0;
        if (p.wanted & 1) backward.dq = dq.view;
        if (p.wanted & 2) backward.dk = dk.view;
        if (p.wanted & 4) backward.dv = dv.view;
        const bool doubles[] = {bool(draw({0, 1})), bool(draw({0, 1}))};
        const bool learns = mods_.modified() && draw({0, 1, 1});
        const int64_t entries = n_.q_heads * mods_.entries();
        sums slope_sums(1, doubles[SLOPE]), table_sums(entries, doubles[TABLE]);
        void* grads[CAPTURED] = {slope_sums.data(), mods_.tabled ? table_sums.data() : nullptr,
                                 nullptr, nullptr};
        const int32_t are_double[CAPTURED] = {doubles[SLOPE], doubles[TABLE], 0, 0};
        const int64_t elements[CAPTURED] = {1, entries, 0, 0};
        if (learns) {
            backward.captured_grad = grads;
            backward.captured_grad_kind = are_double;
            backward.captured_grad_elements = elements;
            backward.captured_count = CAPTURED;
        }
        backward.workspace_bytes =
            af_backward_workspace(&p, learns ? 1 + (mods_.tabled ? entries : 0) : 0, 0);
        memory backward_workspace(backward.workspace_bytes);
        backward.workspace = backward_workspace.data;
        const int32_t second = af_backward(&backward, &error);
        compare("backward's status", number_, second, AF_OK, 0);
        compare("bytes past backward's workspace", number_,
                double(backward_workspace.written_past()), 0, 0);
        if (p.wanted & 1) compare_gradient("dq", dq, w.dq);
        if (p.wanted & 2) compare_gradient("dk", dk, of_kept_batches(w.dk, dk.size));
        if (p.wanted & 4) compare_gradient("dv", dv, of_kept_batches(w.dv, dv.size));
        if (n_.rows() > 0) count_backward(covered, p);
        covered.scatters += learns && interpreted && modified && mods_.tabled;
        covered.several_threads += mods_.several_threads;
        if (!learns) return;
        compare_sums("the slope's gradient", slope_sums, mods_.slope_grad, mods_.slope_size, dtype);
        if (mods_.tabled)
            compare_sums("the table's gradient", table_sums, mods_.table_grad, mods_.table_size,
                         dtype);
    }

   private:
    static constexpr float poison = __builtin_nanf("");

    // An accumulator of a captured gradient.
    struct sums {
        sums(int64_t elements, bool is_double)
            : doubles(is_double ? elements : 0), floats(is_double ? 0 : elements) {}
        void* data() {
            return doubles.empty() ? static_cast<void*>(floats.data()) : doubles.data();
        }
        double at(size_t i) const { return doubles.empty() ? floats[i] : doubles[i]; }
        std::vector<double> doubles;
        std::vector<float> floats;
    };

    af_program program(bool interpreted, const std::vector<uint64_t>& code,
                       af_tile_function native) {
        if (!interpreted) return {native, &mods_, sizeof mods_, 0};
        const int64_t bytes = int64_t(code.size()) * 8;
        return {af_interpret, code.data(), bytes, af_program_scratch(code.data())};
    }

    void count_forward(coverage& covered, const af_problem& p, const block_runs& blocks) const {
        if (p.has_mask) {
            covered.row_gaps += blocks.forward.gaps;
            covered.mixed_rows += blocks.forward.mixed;
            covered.column_gaps += blocks.backward.gaps;
            covered.mixed_columns += blocks.backward.mixed;
        }
        if (std::strcmp(af_forward_variant(&p), "decode") != 0) return;
        covered.grouped_decodes += n_.group() > 1;
        covered.split_decodes += n_.kv_length > 1024;
        if (n_.kv_length == 0 || (p.dtype == AF_BF16 && has_pairs(af_isa()))) return;
        // Heads whose masks differ are decoded one by one.
        const bool alone = p.has_mask && p.runs.heads > 1;
        const int64_t rows = (alone ? 1 : n_.group()) * n_.q_length;
        covered.decodes_in_lanes += rows > 16;
        covered.decodes_in_panels += rows > 32;
    }

    void count_backward(coverage& covered, const af_problem& p) const {
        const bool parted = backward_partitions(p, af_isa()) > 1;
        covered.parted_backwards += parted && (p.wanted & 1) != 0;
        covered.wide_tiles += backward_tile_keys(p, af_isa()) > 128 && n_.kv_length > 128;
    }

    bool reads_outside() const {
        if (!mods_.tabled || n_.rows() == 0) return false;
        for (int64_t h = 0; h < (mods_.by_head ? n_.q_heads : 1); ++h)
            for (int64_t q = 0; q < n_.q_length; ++q)
                for (int64_t k = 0; k < n_.kv_length; ++k)
                    if (mods_.live(h, q, k) && mods_.outside(q, k)) return true;
        return false;
    }

    std::vector<double> of_all_batches(const tensor& of_one) const {
        std::vector<double> all = of_one.values;
        while (shared_ && int64_t(all.size()) < of_one.size * n_.batch)
            all.insert(all.end(), of_one.values.begin(), of_one.values.end());
        return all;
    }
    // Sums over the batches that share a tensor of this size.
    std::vector<double> of_kept_batches(const std::vector<double>& all, int64_t size) const {
        std::vector<double> summed(size, 0);
        for (size_t i = 0; i < all.size(); ++i) summed[i % size] += all[i];
        return summed;
    }

    void compare_gradient(const char* what, const tensor& found,
                          const std::vector<double>& wanted) {
        const bool bf16 = found.dtype == AF_BF16;
        const double room = found.dtype == AF_F32 ? 2e-4 : bf16 ? 0.15 : 0.02;
        // Relative error of one step in the last digit of the type.
        const double step = found.dtype == AF_F32 ? 0 : bf16 ? 1.0 / 256 : 1.0 / 1024;
        for (int64_t i = 0; i < found.size; ++i)
            compare(what, number_, found.at(i), wanted[i], room + step * std::fabs(wanted[i]));
        compare("bytes between elements of a gradient", number_, double(found.written_between()), 0,
                0);
    }

    void compare_sums(const char* what, const sums& found, const std::vector<double>& wanted,
                      const std::vector<double>& sizes, int32_t dtype) {
        const double share = dtype == AF_F32 ? 1e-5 : dtype == AF_BF16 ? 0.02 : 3e-3;
        for (size_t i = 0; i < wanted.size(); ++i)
            compare(what, number_, found.at(i), wanted[i], share * (1 + sizes[i]));
    }

    int64_t number_;
};

}  // namespace native_test
