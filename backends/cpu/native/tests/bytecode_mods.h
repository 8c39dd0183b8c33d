// The mods of mods.h as bytecode, and an assembler for it.
#pragma once
#include "bytecode.h"
#include "mods.h"

namespace native_test {

#define AF_SIGNATURE(NAME, SIGNATURE) SIGNATURE,
constexpr const char* signatures[] = {AF_OPERATIONS(AF_SIGNATURE)};
#undef AF_SIGNATURE

enum { ONCE, A_ROW, A_COLUMN, A_PAIR };

// Each value gets a register of its own.
struct assembler {
    explicit assembler(uint32_t kind) : kind(kind) {}

    uint16_t add(int section, int operation, uint16_t a = 0, uint16_t b = 0,
                 uint16_t immediate = 0) {
        const char result = signatures[operation][0];
        const uint16_t d = slots;
        slots = static_cast<uint16_t>(slots + (result == 'l' || result == 'd' ? 2 : 1));
        add_to(section, operation, d, a, b, immediate);
        return d;
    }
    void add_to(int section, int operation, uint16_t d, uint16_t a = 0, uint16_t b = 0,
                uint16_t immediate = 0) {
        steps[section].push_back({uint16_t(operation), d, a, b, 0, immediate, 0});
    }
    template <class T> uint16_t constant(int operation, T value) {
        uint64_t bits = 0;
        std::memcpy(&bits, &value, sizeof value);
        constants.push_back(bits);
        return add(ONCE, operation, 0, 0, static_cast<uint16_t>(constants.size() - 1));
    }
    // Indices of the load or scatter that was added last.
    void index(int section, uint16_t slot, bool wide, af_shape shape) {
        af_step& step = steps[section].back();
        if (step.b++ == 0) step.list = static_cast<uint32_t>(operands.size());
        operands.push_back({slot, wide, uint8_t(shape)});
        if (shape != AF_STEP) return;
        const int32_t one = 1;
        af_operand held;
        std::memcpy(&held, &one, 4);
        operands.push_back(held);
    }
    // Returns the program's bytes in words of 8, so that they are aligned.
    std::vector<uint64_t> code() const {
        af_code header = {AF_CODE_MAGIC, kind, slots, 0, {}, uint32_t(operands.size()),
                          uint32_t(constants.size())};
        for (int i = 0; i < 4; ++i) header.ends[i] = header.steps += uint32_t(steps[i].size());
        const size_t words = (sizeof header + header.steps * sizeof(af_step)) / 8 +
                             (operands.size() + 1) / 2 + constants.size();
        std::vector<uint64_t> made(words);
        char* at = reinterpret_cast<char*>(made.data());
        const auto append = [&](const void* from, size_t bytes) {
            if (bytes > 0) std::memcpy(at, from, bytes);
            at += bytes;
        };
        append(&header, sizeof header);
        for (const auto& section : steps) append(section.data(), section.size() * sizeof(af_step));
        append(operands.data(), operands.size() * sizeof(af_operand));
        if (operands.size() % 2) at += sizeof(af_operand);
        append(constants.data(), constants.size() * 8);
        return made;
    }
    uint32_t kind;
    uint16_t slots = 0;
    std::vector<af_step> steps[4];
    std::vector<af_operand> operands;
    std::vector<uint64_t> constants;
};

static_assert(sizeof(af_code) % 8 == 0 && sizeof(af_step) == 16, "code() counts in 8 bytes");

inline uint16_t load_float(assembler& a, int section, const captured_tensor& from, uint16_t which) {
    return a.add(section, from.type == AF_T_F64 ? AF_OP_load_d : AF_OP_load_f, 0, 0, which);
}
inline uint16_t as_float(assembler& a, int section, const captured_tensor& from, uint16_t loaded) {
    return from.type == AF_T_F64 ? a.add(section, AF_OP_d_to_f, loaded) : loaded;
}

// The place in the table: a register of a pair, wide if the index tensor is.
inline uint16_t position_of(assembler& a, const mods& m, uint16_t q, uint16_t k) {
    const bool wide = m.index.type == AF_T_I64;
    const uint16_t three = a.constant(AF_OP_const_i, int32_t(3));
    uint16_t low = a.add(A_ROW, AF_OP_and_i, q, three);
    const uint16_t index =
        a.add(A_COLUMN, wide ? AF_OP_load_l : AF_OP_load_i, 0, 0, INDEX);
    a.index(A_COLUMN, k, false, AF_STEP);
    if (!wide) return a.add(A_PAIR, AF_OP_add_iS, index, low);
    low = a.add(A_ROW, AF_OP_i_to_l, low);
    return a.add(A_PAIR, AF_OP_add_lS, index, low);
}

inline std::vector<uint64_t> mask_code(const mods& m) {
    assembler a(AF_MASK);
    const auto whole = [&](uint16_t which) {
        return a.add(ONCE, AF_OP_l_to_i, a.add(ONCE, AF_OP_int_l, 0, 0, which));
    };
    uint16_t least = a.add(ONCE, AF_OP_neg_i, whole(WINDOW));
    if (m.by_head) {
        const uint16_t one = a.constant(AF_OP_const_i, int32_t(1));
        const uint16_t seven = a.constant(AF_OP_const_i, int32_t(7));
        const uint16_t odd = a.add(ONCE, AF_OP_and_i, a.add(ONCE, AF_OP_h_i), one);
        least = a.add(ONCE, AF_OP_sub_i, least, a.add(ONCE, AF_OP_mul_i, odd, seven));
    }
    const uint16_t zero = a.constant(AF_OP_const_i, int32_t(0));
    const uint16_t shift = whole(SHIFT), stripe = whole(STRIPE);
    const uint16_t q = a.add(A_ROW, AF_OP_q_i), k = a.add(A_COLUMN, AF_OP_kv_i);
    const uint16_t striped = a.add(A_ROW, AF_OP_ne_i, a.add(A_ROW, AF_OP_and_i, q, stripe), zero);
    const uint16_t last = a.add(A_ROW, AF_OP_add_i, q, shift);
    const uint16_t kept_key = a.add(A_COLUMN, AF_OP_load_p, 0, 0, KEPT);
    a.index(A_COLUMN, k, false, AF_STEP);
    const uint16_t kept =
        a.add(A_PAIR, AF_OP_or_p, kept_key, a.add(A_PAIR, AF_OP_spread_p, striped));
    const uint16_t apart = a.add(A_PAIR, AF_OP_sub_iS, k, last);
    const uint16_t before = a.add(A_PAIR, AF_OP_le_iS, apart, zero);
    const uint16_t near = a.add(A_PAIR, AF_OP_gt_iS, apart, least);
    a.add_to(A_PAIR, AF_OP_and_p, AF_LIVE_ROW, a.add(A_PAIR, AF_OP_and_p, before, near), kept);
    return a.code();
}

inline std::vector<uint64_t> score_code(const mods& m, bool backward) {
    assembler a(backward ? AF_SCORE_BACKWARD : AF_SCORE);
    const uint16_t h = a.add(ONCE, AF_OP_h_i);
    const uint16_t q = a.add(A_ROW, AF_OP_q_i), k = a.add(A_COLUMN, AF_OP_kv_i);
    const uint16_t q_float = a.add(A_ROW, AF_OP_i_to_f, q);
    const uint16_t k_float = a.add(A_COLUMN, AF_OP_i_to_f, k);
    uint16_t s = AF_SCORE_ROW, bent = 0;
    if (m.cap > 0) {
        const uint16_t cap = a.add(ONCE, AF_OP_d_to_f, a.add(ONCE, AF_OP_float_d));
        bent = a.add(A_PAIR, AF_OP_tanh_f, a.add(A_PAIR, AF_OP_truediv_fS, s, cap));
        s = a.add(A_PAIR, AF_OP_mul_fS, bent, cap);
    }
    const uint16_t apart = a.add(A_PAIR, AF_OP_sub_fS, k_float, q_float);
    const uint16_t place = m.tabled ? position_of(a, m, q, k) : uint16_t(0);
    const bool wide = m.index.type == AF_T_I64;
    if (backward) {
        const uint16_t by_slope = a.add(A_PAIR, AF_OP_mul_f, apart, AF_GRAD_ROW);
        a.add_to(A_PAIR, AF_OP_scatter_f, 0, by_slope, 0, SLOPE);
        if (m.tabled) {
            a.add_to(A_PAIR, AF_OP_scatter_f, 0, AF_GRAD_ROW, 0, TABLE);
            a.index(A_PAIR, h, false, AF_ONE);
            a.index(A_PAIR, place, wide, AF_ANY);
        }
        if (m.cap == 0) return a.code();
        const uint16_t one = a.constant(AF_OP_const_f, 1.0f);
        const uint16_t square = a.add(A_PAIR, AF_OP_mul_f, bent, bent);
        const uint16_t slope = a.add(A_PAIR, AF_OP_rsub_fS, square, one);
        a.add_to(A_PAIR, AF_OP_mul_f, AF_GRAD_ROW, AF_GRAD_ROW, slope);
        return a.code();
    }
    if (m.sloped) {
        const uint16_t slope = as_float(a, ONCE, m.slope, load_float(a, ONCE, m.slope, SLOPE));
        s = a.add(A_PAIR, AF_OP_add_f, s, a.add(A_PAIR, AF_OP_mul_fS, apart, slope));
    }
    if (m.tabled) {
        const uint16_t loaded = load_float(a, A_PAIR, m.table, TABLE);
        a.index(A_PAIR, h, false, AF_ONE);
        a.index(A_PAIR, place, wide, AF_ANY);
        s = a.add(A_PAIR, AF_OP_add_f, s, as_float(a, A_PAIR, m.table, loaded));
    }
    a.add_to(A_PAIR, AF_OP_copy_f, AF_SCORE_ROW, s);
    return a.code();
}

}  // namespace native_test
