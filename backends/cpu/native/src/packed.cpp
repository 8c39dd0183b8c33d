// Packed sequences: each is a problem of its own, with its rows of the packed tensors and its
// coordinates. Those with few query rows are decoded together, so that their jobs share the
// threads; the others run one after the other, each on all threads. What a sequence computes, and
// in which order, depends on it alone.
#include <cstring>

#include "level.h"

namespace {

int64_t bounded(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

void* moved(void* data, int64_t elements, int64_t size) {
    return static_cast<char*>(data) + elements * size;
}

// First and last query row of sequence i, in bounds whatever the offsets say.
struct row_range {
    int64_t begin, end;
};

row_range rows_of(const af_packed_args& a, int64_t i) {
    const int64_t all = a.args.problem.q_length;
    const int64_t begin = bounded(a.q_offsets[i], 0, all);
    return {begin, bounded(a.q_offsets[i + 1], begin, all)};
}

// Sequence i, whose first row of blocks is `block`.
af_forward_args sequence_of(const af_packed_args& a, int64_t i, int64_t block) {
    af_forward_args args = a.args;
    af_problem& p = args.problem;
    const int64_t size = p.dtype == AF_F32 ? 4 : 2, kv_size = p.kv_storage ? 1 : size;
    const row_range rows = rows_of(a, i);
    p.packed_rows = p.q_length;
    p.q_length = rows.end - rows.begin;
    p.query.data = moved(p.query.data, rows.begin * p.query.stride[2], size);
    args.out.data = moved(args.out.data, rows.begin * args.out.stride[2], size);
    if (args.lse) args.lse += rows.begin;
    if (args.max_scores) args.max_scores += rows.begin;
    if (a.kv_offsets) {
        const int64_t first = bounded(a.kv_offsets[i], 0, p.kv_length);
        p.key.data = moved(p.key.data, first * p.key.stride[2], kv_size);
        p.value.data = moved(p.value.data, first * p.value.stride[2], kv_size);
        if (p.kv_storage) {
            p.key_scales.data += first * p.key_scales.stride[2];
            p.value_scales.data += first * p.value_scales.stride[2];
        }
        p.kv_length = bounded(a.kv_lengths[i], 0, p.kv_length - first);
    } else {
        const int64_t row = bounded(a.table_rows ? a.table_rows[i] : i, 0, a.table_height - 1);
        p.pages = {a.page_table + row * a.table_stride, a.page_size, a.pages};
        p.kv_length = bounded(a.kv_lengths[i], 0, a.table_width * a.page_size);
        if (a.pages == 0 || a.table_height == 0) p.kv_length = 0;
    }
    const int64_t offset[4] = {a.slots[i], 0, a.q_starts[i], 0};
    std::memcpy(p.inputs.offset, offset, sizeof offset);
    p.runs.offsets += block;
    return args;
}

// Calls f for every sequence that has query rows.
template <class F> void every_sequence(const af_packed_args& a, const F& f) {
    const af_problem& p = a.args.problem;
    int64_t block = 0;
    for (int64_t i = 0; i < a.sequences; ++i) {
        const row_range rows = rows_of(a, i);
        const int64_t blocks =
            p.has_mask ? (rows.end - rows.begin + p.q_block - 1) / p.q_block : 0;
        af_forward_args args = sequence_of(a, i, block);
        block += blocks;
        // The mask was made before the offsets were overwritten: it has no rows of blocks for these.
        if (p.has_mask && block > p.runs.blocks) args.problem.has_mask = args.problem.kv_length = 0;
        if (rows.begin < rows.end) f(args);
    }
}

void clear_rows(const af_packed_args& a, int64_t begin, int64_t end) {
    const af_problem& p = a.args.problem;
    const int64_t size = p.dtype == AF_F32 ? 4 : 2;
    for (int64_t h = 0; h < p.q_heads; ++h)
        for (int64_t row = begin; row < end; ++row) {
            const af_tensor& out = a.args.out;
            std::memset(moved(out.data, h * out.stride[1] + row * out.stride[2], size), 0,
                        p.value_head_dim * size);
            const int64_t index = h * p.q_length + row;
            if (a.args.lse) a.args.lse[index] = -__builtin_inff();
            if (a.args.max_scores) a.args.max_scores[index] = -__builtin_inff();
        }
}

// Padding rows: those from the last offset on, and, where offsets were overwritten, others.
void clear_rest(const af_packed_args& a) {
    int64_t done = 0;
    for (int64_t i = 0; i < a.sequences; ++i) {
        const row_range rows = rows_of(a, i);
        clear_rows(a, done, rows.begin);
        done = rows.end > done ? rows.end : done;
    }
    clear_rows(a, done, a.args.problem.q_length);
}

struct packed_needs {
    int64_t decoded;   // sequences
    int64_t decoding;  // bytes of decoding
    int64_t most;      // bytes of the largest other sequence
};

packed_needs needs_of(const af_level& l, const af_packed_args& a) {
    packed_needs n = {0, 0, 0};
    int64_t buffers = 0;
    every_sequence(a, [&](const af_forward_args& args) {
        if (af_is_decode(args.problem)) {
            ++n.decoded;
            n.decoding += l.decode_workspace_of(args.problem, &buffers);
        } else {
            const int64_t bytes = l.forward_workspace(args.problem);
            n.most = bytes > n.most ? bytes : n.most;
        }
    });
    n.decoding += l.decode_workspace(n.decoded) + buffers;
    return n;
}

int64_t bytes_of(const packed_needs& n) {
    const int64_t list = aligned(n.decoded * int64_t(sizeof(af_forward_args)));
    return list + (n.decoding > n.most ? n.decoding : n.most);
}

}  // namespace

extern "C" {

int64_t af_packed_workspace(const af_packed_args* args) {
    return bytes_of(needs_of(af_chosen_level(), *args));
}

int32_t af_packed_forward(const af_packed_args* args, af_error* error) {
    std::memset(error, 0, sizeof *error);
    const af_level& l = af_chosen_level();
    const packed_needs needs = needs_of(l, *args);
    char* base = static_cast<char*>(args->args.workspace);
    const int64_t bytes = args->args.workspace_bytes;
    if (!af_fits(base, bytes, bytes_of(needs))) return AF_WORKSPACE_TOO_SMALL;
    clear_rest(*args);
    af_forward_args* decoded = reinterpret_cast<af_forward_args*>(base);
    char* rest = base + aligned(needs.decoded * int64_t(sizeof(af_forward_args)));
    int64_t count = 0;
    int32_t status = AF_OK;
    every_sequence(*args, [&](const af_forward_args& sequence) {
        if (status != AF_OK) return;
        if (af_is_decode(sequence.problem)) {
            decoded[count++] = sequence;
            return;
        }
        af_forward_args alone = sequence;
        alone.workspace = rest;
        alone.workspace_bytes = bytes - (rest - base);
        status = l.forward(alone, error);
    });
    if (status != AF_OK || count == 0) return status;
    return l.decode(decoded, count, rest, error);
}

}  // extern "C"
