// Runs the bytecode of bytecode.h on a tile.
//
// A program is decoded once a tile: each step becomes a function and addresses. Then the sections
// run: the first for all lanes at once, the second for AF_LANES rows, the third for a block of
// columns, and the last for each row of that block. Nothing here checks a program: it comes from the
// assembler of the same process.
#include "step_functions.h"

namespace AF_LEVEL {
namespace {

struct machine {
    const af_tile& tile;
    const af_code& code;
    step* steps;
    moving* moved;
    char* registers;
    int moved_count;

    void section(int which, const lane_block& t) const {
        const step* end = steps + code.ends[which];
        for (const step* s = steps + (which == 0 ? 0 : code.ends[which - 1]); s != end; ++s)
            s->run(*s, t);
    }

    char* place(uint16_t slot, char** address) {
        if (slot < AF_SCORE_ROW) return registers + int64_t(slot) * AF_LANES * 4;
        moving& m = moved[moved_count++];
        m.address = address;
        if (slot == AF_LIVE_ROW) {
            m.begin = reinterpret_cast<char*>(tile.live);
            m.row_bytes = tile.live_ld * 2;
            m.block_bytes = AF_LANES / 8;
        } else {
            m.begin = reinterpret_cast<char*>(slot == AF_SCORE_ROW ? tile.score : tile.grad);
            m.row_bytes = tile.ld * 4;
            m.block_bytes = AF_LANES * 4;
        }
        return m.begin;
    }

    void decode(const af_operand* operands, const char* constants) {
        const af_step* source = reinterpret_cast<const af_step*>(&code + 1);
        for (uint32_t i = 0; i < code.steps; ++i) {
            const af_step& from = source[i];
            step& s = steps[i];
            s.run = FUNCTIONS[from.operation];
            s.code = &from;
            s.registers = registers;
            s.list = operands + from.list;
            s.d = place(from.d, &s.d);
            s.a = place(from.a, &s.a);
            s.b = place(from.b, &s.b);
            s.c = place(from.c, &s.c);
            if (from.operation >= AF_OP_const_p && from.operation <= AF_OP_const_d)
                s.b = const_cast<char*>(constants) + int64_t(from.immediate) * 8;
        }
    }

    void follow(int row, int first_column) const {
        for (int i = 0; i < moved_count; ++i) {
            const moving& m = moved[i];
            *m.address = m.begin + row * m.row_bytes + first_column / AF_LANES * m.block_bytes;
        }
    }
};

// Sets the gradients of dead pairs to 0.
void drop_dead(const af_tile& tile, int row, int first, int columns) {
    const uint16_t* live = tile.live + row * tile.live_ld + first / 16;
    float* grad = tile.grad + row * tile.ld + first;
    for (int i = 0; i < columns; i += 16) {
        if (live[i / 16] == 0xffff) continue;
        for (int j = 0; j < 16; j += VL) {
            const vi m = mask_of(uint32_t(live[i / 16]) >> j, vi{});
            store(grad + i + j, as_float(as_int(load(grad + i + j)) & m));
        }
    }
}

int whole_words(int lanes) { return (lanes + 15) & ~15; }

void run_sections(const machine& m, char* indices, bool all_live) {
    const af_tile& tile = m.tile;
    const int rows = tile.rows, columns = tile.cols;
    const int longest = rows > columns ? rows : columns;
    lane_block t = {whole_words(longest < AF_LANES ? longest : AF_LANES),
                    0, 0, 0, rows, columns,
                    UNIFORM, &tile, int32_t(m.code.kind), all_live, indices};
    m.section(0, t);
    for (t.first_row = 0; t.first_row < rows; t.first_row += AF_LANES) {
        t.rows = rows - t.first_row < AF_LANES ? rows - t.first_row : AF_LANES;
        t.first_column = 0;
        t.row = 0;
        t.lanes = whole_words(t.rows);
        t.where = ROWS;
        m.section(1, t);
        for (int first = 0; first < columns; first += AF_LANES) {
            t.first_column = first;
            t.columns = columns - first < AF_LANES ? columns - first : AF_LANES;
            t.lanes = whole_words(t.columns);
            t.where = COLUMNS;
            t.row = 0;
            m.section(2, t);
            t.where = PAIRS;
            const bool masked = m.code.kind == AF_SCORE_BACKWARD && tile.live != nullptr;
            for (t.row = 0; t.row < t.rows; ++t.row) {
                const int row = t.first_row + t.row;
                m.follow(row, first);
                if (masked) drop_dead(tile, row, first, t.columns);
                m.section(3, t);
                if (masked) drop_dead(tile, row, first, t.columns);
                if (m.code.kind == AF_MASK && t.columns % 16 != 0)
                    tile.live[row * tile.live_ld + (first + t.columns) / 16] &=
                        uint16_t((1u << (t.columns % 16)) - 1);
            }
        }
    }
}

}  // namespace

void interpret(const af_program* program, const af_tile* tile) {
    const af_code& code = *static_cast<const af_code*>(program->code);
    const af_step* source = reinterpret_cast<const af_step*>(&code + 1);
    const af_operand* operands = reinterpret_cast<const af_operand*>(source + code.steps);
    const char* constants =
        reinterpret_cast<const char*>(operands + (code.operands + 1) / 2 * 2);
    // Counts as af_program_scratch does.
    step* steps = static_cast<step*>(tile->scratch);
    moving* moved = reinterpret_cast<moving*>(steps + code.steps);
    char* indices = reinterpret_cast<char*>(moved + code.steps * 4);
    // Pairs are live where a mask program says so. If it has read outside anywhere, it runs again
    // on its own live bits, and only their reads count.
    af_tile unsettled = *tile;
    af_error anywhere = {};
    unsettled.error = &anywhere;
    const bool is_mask = code.kind == AF_MASK;
    machine m = {is_mask ? unsettled : *tile, code, steps, moved, indices + AF_LANES * 8, 0};
    m.decode(operands, constants);
    run_sections(m, indices, is_mask);
    if (!is_mask || anywhere.code == AF_OK) return;
    unsettled.error = tile->error;
    run_sections(m, indices, false);
}

}  // namespace AF_LEVEL
