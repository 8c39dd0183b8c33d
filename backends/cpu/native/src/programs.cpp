// Programs of bytecode, by code for every processor: the list of operations, the scratch that a
// program needs, and whether it is well-formed. A well-formed program can be interpreted on any
// tile with as many captured tensors and numbers as given here: it reads and writes nothing
// outside.
#include "bytecode.h"

#include <cstring>

#include "anyflex_cpu.h"

namespace {

#define AF_SIGNATURE(NAME, SIGNATURE) SIGNATURE,
constexpr const char* SIGNATURES[] = {AF_OPERATIONS(AF_SIGNATURE)};
#undef AF_SIGNATURE

#define AF_LINE(NAME, SIGNATURE) #NAME " " SIGNATURE "\n"
constexpr char LIST[] = AF_OPERATIONS(AF_LINE);
#undef AF_LINE

constexpr uint32_t MOST_STEPS = 1 << 16, MOST_DIMS = 64;

struct reader {
    const af_code* code;
    const af_step* steps;
    const af_operand* operands;
    int64_t captured, ints, floats;
    bool last;  // in the last section

    bool is_register(uint16_t slot, char kind) const {
        const uint32_t width = kind == 'l' || kind == 'd' || kind == 'L' || kind == 'D' ? 2 : 1;
        return slot + width <= code->slots;
    }

    bool is_read(uint16_t slot, char kind) const {
        if (!last || slot < AF_SCORE_ROW) return is_register(slot, kind);
        if (slot == AF_SCORE_ROW) return kind == 'f' && code->kind != AF_MASK;
        if (slot == AF_GRAD_ROW) return kind == 'f' && code->kind == AF_SCORE_BACKWARD;
        return kind == 'p' && code->kind == AF_MASK;
    }

    bool is_written(uint16_t slot, char kind) const {
        if (!last || slot < AF_SCORE_ROW) return is_register(slot, kind);
        if (slot == AF_SCORE_ROW) return kind == 'f' && code->kind == AF_SCORE;
        return is_read(slot, kind);
    }

    bool is_list(const af_step& step) const {
        uint64_t at = step.list;
        for (uint32_t dim = 0; dim < step.b; ++dim) {
            if (at >= code->operands) return false;
            const af_operand& operand = operands[at++];
            if (operand.shape > AF_STEP || operand.wide > 1) return false;
            if (operand.shape == AF_STEP && at++ >= code->operands) return false;
            if (!is_register(operand.slot, operand.wide ? 'l' : 'i')) return false;
        }
        return step.b <= MOST_DIMS;
    }

    bool is_step(const af_step& step) const {
        if (step.operation >= AF_OPERATION_COUNT) return false;
        const char* s = SIGNATURES[step.operation];
        const bool writes = *s != ':';
        if (writes && !is_written(step.d, *s++)) return false;
        ++s;
        const uint16_t read[3] = {step.a, step.b, step.c};
        int count = 0;
        for (; *s != 0 && strchr("pilfdPILFD", *s) != nullptr; ++s)
            if (!is_read(read[count++], *s)) return false;
        const char what = *s;
        if (what == 't') {
            return step.immediate < captured && is_list(step) && (writes || is_scattering());
        }
        for (; count < 3; ++count)
            if (read[count] != 0) return false;
        switch (what) {
            case 'c':
                return step.immediate < code->constants;
            case 'n':
                return step.immediate < ints;
            case 'x':
                return step.immediate < floats;
            default:
                return what == 0;
        }
    }

    bool is_scattering() const { return last && code->kind == AF_SCORE_BACKWARD; }
};

// Returns the number of bytes that a header announces, or -1.
int64_t announced(const void* bytes, int64_t size) {
    if (bytes == nullptr || reinterpret_cast<uintptr_t>(bytes) % 8 != 0) return -1;
    if (size < int64_t(sizeof(af_code))) return -1;
    const af_code& code = *static_cast<const af_code*>(bytes);
    if (code.magic != AF_CODE_MAGIC || code.kind > AF_SCORE_BACKWARD) return -1;
    if (code.slots > AF_SCORE_ROW || code.steps > MOST_STEPS) return -1;
    return int64_t(sizeof(af_code)) + int64_t(code.steps) * int64_t(sizeof(af_step)) +
           (int64_t(code.operands) + 1) / 2 * 8 + int64_t(code.constants) * 8;
}

}  // namespace

const char* af_operations(void) { return LIST; }

int64_t af_program_scratch(const void* code, int64_t code_bytes) {
    if (announced(code, code_bytes) != code_bytes) return -1;
    const af_code& header = *static_cast<const af_code*>(code);
    return int64_t(header.steps) * AF_STEP_SCRATCH + AF_LANES * 8 +
           int64_t(header.slots) * AF_LANES * 4;
}

int32_t af_check_program(const void* code, int64_t code_bytes, int64_t captured_count,
                         int64_t ints, int64_t floats) {
    if (announced(code, code_bytes) != code_bytes) return AF_BAD_PROGRAM;
    const af_code& header = *static_cast<const af_code*>(code);
    uint32_t begin = 0;
    for (uint32_t end : header.ends) {
        if (end < begin) return AF_BAD_PROGRAM;
        begin = end;
    }
    if (begin != header.steps) return AF_BAD_PROGRAM;
    const af_step* steps = reinterpret_cast<const af_step*>(&header + 1);
    reader r = {&header, steps, reinterpret_cast<const af_operand*>(steps + header.steps),
                captured_count, ints, floats, false};
    for (uint32_t i = 0; i < header.steps; ++i) {
        r.last = i >= header.ends[2];
        if (!r.is_step(steps[i])) return AF_BAD_PROGRAM;
    }
    return AF_OK;
}
