// The bytecode of mods on tiles: the format, and the list of operations.
//
// A program is a flat block of bytes: af_code, then `steps` steps of 16 bytes, then `operands`
// operands of 4 bytes, padded to a multiple of 8, then `constants` values of 8 bytes.
//
// It works on registers of AF_LANES lanes. A register has a kind: p (bool, one bit a lane, in
// words of 16), i (int32), l (int64), f (float), d (double). Registers live in one file of slots
// of AF_LANES * 4 bytes; l and d take two slots in a row, the others one. Narrow integers are i,
// wrapped after each operation; half and bf16 are f, rounded after each operation.
//
// The steps are in four sections. What depends on neither index runs once a tile, with all lanes
// equal; what depends on q_idx alone once for AF_LANES rows, a lane a row; what depends on kv_idx
// alone once a block of AF_LANES columns, a lane a column; the rest for every row of that block, a
// lane a column. There an operand in capitals (see below) is one value: its register's lane of
// that row. Registers of the first sections keep their values as long as their section isn't run
// again.
#pragma once
#include <stdint.h>

#define AF_CODE_MAGIC 0x43464131  // "1AFC"
#define AF_LANES 256
#define AF_STEP_SCRATCH 192  // bytes that a decoded step takes of a tile's scratch

// Kinds of programs.
enum { AF_MASK = 0, AF_SCORE = 1, AF_SCORE_BACKWARD = 2 };

// Slots that stand for the tile's memory, in the last section only: the row's scores (f), its
// gradients (f), its live bits (p). A mask program writes all words of LIVE up to the last column.
enum { AF_SCORE_ROW = 0xfffd, AF_GRAD_ROW = 0xfffe, AF_LIVE_ROW = 0xffff };

struct af_code {
    uint32_t magic;
    uint32_t kind;
    uint32_t slots;      // of the register file
    uint32_t steps;      // all sections
    uint32_t ends[4];    // of the sections, in steps; the last is `steps`
    uint32_t operands;
    uint32_t constants;
};

// Registers are named by their first slot. What d, a, b, c are is in the operation's signature.
struct af_step {
    uint16_t operation;
    uint16_t d, a, b, c;
    uint16_t immediate;  // position in captured, ints, floats or constants
    uint32_t list;       // loads and scatters: where their list of operands begins
};

// An index of a load or scatter. `b` of the step says how many there are.
struct af_operand {
    uint16_t slot;
    uint8_t wide;   // 1: l, 0: i
    uint8_t shape;  // an af_shape
};
// How an index varies over lanes: in any way, not at all, or by a fixed step a lane, which follows
// in the place of the next operand as an int32. The value of a scatter or a load may also be one
// value.
enum af_shape { AF_ANY = 0, AF_ONE = 1, AF_STEP = 2 };

// X(name, signature). A signature has the step's result, ':', its operands: kinds in the order
// a, b, c; a capital is one value in the last section. Afterwards maybe one of
//   c  the immediate counts into constants    n  into ints    x  into floats
//   t  into captured tensors: a load, or a scatter where nothing is written
#define AF_NUMBERS(X, NAME)                                                                  \
    X(NAME##_i, "i:ii") X(NAME##_iS, "i:iI") X(NAME##_l, "l:ll") X(NAME##_lS, "l:lL")         \
    X(NAME##_f, "f:ff") X(NAME##_fS, "f:fF") X(NAME##_d, "d:dd") X(NAME##_dS, "d:dD")
#define AF_INTEGERS(X, NAME)                                                                 \
    X(NAME##_i, "i:ii") X(NAME##_iS, "i:iI") X(NAME##_l, "l:ll") X(NAME##_lS, "l:lL")
#define AF_FLOATS(X, NAME)                                                                   \
    X(NAME##_f, "f:ff") X(NAME##_fS, "f:fF") X(NAME##_d, "d:dd") X(NAME##_dS, "d:dD")
#define AF_TESTS(X, NAME)                                                                    \
    X(NAME##_i, "p:ii") X(NAME##_iS, "p:iI") X(NAME##_l, "p:ll") X(NAME##_lS, "p:lL")         \
    X(NAME##_f, "p:ff") X(NAME##_fS, "p:fF") X(NAME##_d, "p:dd") X(NAME##_dS, "p:dD")
#define AF_ONE_NUMBER(X, NAME)                                                               \
    X(NAME##_i, "i:i") X(NAME##_l, "l:l") X(NAME##_f, "f:f") X(NAME##_d, "d:d")
#define AF_ONE_FLOAT(X, NAME) X(NAME##_f, "f:f") X(NAME##_d, "d:d")
#define AF_SELECTS(X, T, LOW, HIGH)                                                          \
    X(where_##T, LOW ":p" LOW LOW) X(where_##T##S, LOW ":p" LOW HIGH)                         \
    X(where_S##T, LOW ":p" HIGH LOW) X(where_S##T##S, LOW ":p" HIGH HIGH)

#define AF_OPERATIONS(X)                                                                     \
    AF_NUMBERS(X, add) AF_NUMBERS(X, sub) AF_NUMBERS(X, rsub) AF_NUMBERS(X, mul)              \
    AF_NUMBERS(X, minimum) AF_NUMBERS(X, maximum)                                            \
    AF_FLOATS(X, truediv) AF_FLOATS(X, rtruediv)                                             \
    AF_NUMBERS(X, floordiv) AF_NUMBERS(X, mod) AF_NUMBERS(X, fmod)                            \
    AF_NUMBERS(X, pow) AF_FLOATS(X, pow_number) AF_FLOATS(X, atan2)                           \
    AF_INTEGERS(X, and) AF_INTEGERS(X, or) AF_INTEGERS(X, xor)                                \
    AF_INTEGERS(X, shl) AF_INTEGERS(X, shr)                                                  \
    AF_TESTS(X, eq) AF_TESTS(X, ne) AF_TESTS(X, lt) AF_TESTS(X, le) AF_TESTS(X, gt)           \
    AF_TESTS(X, ge)                                                                          \
    AF_ONE_NUMBER(X, neg) AF_ONE_NUMBER(X, abs) AF_ONE_NUMBER(X, sign)                        \
    X(not_i, "i:i") X(not_l, "l:l") X(not_p, "p:p")                                          \
    X(and_p, "p:pp") X(or_p, "p:pp") X(xor_p, "p:pp") X(and_not_p, "p:pp")                    \
    AF_ONE_FLOAT(X, floor) AF_ONE_FLOAT(X, ceil) AF_ONE_FLOAT(X, round)                       \
    AF_ONE_FLOAT(X, trunc)                                                                   \
    AF_ONE_FLOAT(X, exp) AF_ONE_FLOAT(X, exp2) AF_ONE_FLOAT(X, expm1) AF_ONE_FLOAT(X, log)    \
    AF_ONE_FLOAT(X, log2) AF_ONE_FLOAT(X, log10) AF_ONE_FLOAT(X, log1p)                       \
    AF_ONE_FLOAT(X, sqrt) AF_ONE_FLOAT(X, rsqrt) AF_ONE_FLOAT(X, sin) AF_ONE_FLOAT(X, cos)    \
    AF_ONE_FLOAT(X, tan) AF_ONE_FLOAT(X, asin) AF_ONE_FLOAT(X, acos) AF_ONE_FLOAT(X, atan)    \
    AF_ONE_FLOAT(X, sinh) AF_ONE_FLOAT(X, cosh) AF_ONE_FLOAT(X, tanh)                         \
    AF_ONE_FLOAT(X, asinh) AF_ONE_FLOAT(X, acosh) AF_ONE_FLOAT(X, atanh)                      \
    AF_ONE_FLOAT(X, sigmoid) AF_ONE_FLOAT(X, erf) AF_ONE_FLOAT(X, erfc)                       \
    AF_SELECTS(X, i, "i", "I") AF_SELECTS(X, l, "l", "L") AF_SELECTS(X, f, "f", "F")          \
    AF_SELECTS(X, d, "d", "D")                                                               \
    X(wrap_u8, "i:i") X(wrap_i8, "i:i") X(wrap_i16, "i:i")                                   \
    X(round_f16, "f:f") X(round_bf16, "f:f")                                                 \
    X(i_to_l, "l:i") X(l_to_i, "i:l") X(i_to_f, "f:i") X(i_to_d, "d:i") X(l_to_f, "f:l")      \
    X(l_to_d, "d:l") X(f_to_i, "i:f") X(f_to_l, "l:f") X(f_to_d, "d:f") X(d_to_i, "i:d")      \
    X(d_to_l, "l:d") X(d_to_f, "f:d") X(p_to_i, "i:p") X(p_to_f, "f:p")                      \
    X(copy_p, "p:p") X(copy_f, "f:f")                                                        \
    X(spread_p, "p:P") X(spread_i, "i:I") X(spread_l, "l:L") X(spread_f, "f:F")               \
    X(spread_d, "d:D")                                                                       \
    X(const_p, "p:c") X(const_i, "i:c") X(const_l, "l:c") X(const_f, "f:c")                   \
    X(const_d, "d:c") X(int_l, "l:n") X(float_d, "d:x")                                      \
    X(b_i, "i:") X(b_l, "l:") X(h_i, "i:") X(h_l, "l:") X(q_i, "i:") X(q_l, "l:")             \
    X(kv_i, "i:") X(kv_l, "l:")                                                              \
    X(load_p, "p:t") X(load_i, "i:t") X(load_l, "l:t") X(load_f, "f:t") X(load_d, "d:t")      \
    X(scatter_f, ":ft") X(scatter_fS, ":Ft") X(scatter_d, ":dt") X(scatter_dS, ":Dt")

#define AF_ENUMERATOR(NAME, SIGNATURE) AF_OP_##NAME,
enum af_operation { AF_OPERATIONS(AF_ENUMERATOR) AF_OPERATION_COUNT };
#undef AF_ENUMERATOR
