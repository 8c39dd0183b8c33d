// The C ABI of anyflex's CPU kernels: plain data, no C++ type and no torch type crosses it.
//
// Sizes are in elements unless a name says bytes. A call never allocates what grows with the
// problem: the caller hands in a workspace of af_*_workspace(...) bytes, aligned to 64.
// All functions are safe to call from many threads at once and throw nothing.
#ifndef ANYFLEX_CPU_H
#define ANYFLEX_CPU_H

#include <stdint.h>

#if defined(_WIN32)
#define AF_API __declspec(dllexport)
#else
#define AF_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Bumped with every change of a struct below; the Python side refuses another number.
#define AF_ABI 7

// The last two are types that keys and values may be stored in: int8 and float8_e4m3fn.
typedef enum { AF_F32 = 0, AF_BF16 = 1, AF_F16 = 2, AF_I8 = 3, AF_F8 = 4 } af_dtype;

// Types of captured tensors and of interpreter registers, in the order of
// anyflex.mod_graph.dtypes.DTYPES.
typedef enum {
    AF_T_BOOL = 0, AF_T_U8, AF_T_I8, AF_T_I16, AF_T_I32, AF_T_I64,
    AF_T_F16, AF_T_BF16, AF_T_F32, AF_T_F64
} af_type;

// A tensor [batch, heads, length, dim] of an af_dtype; strides may be 0.
typedef struct {
    void* data;
    int64_t stride[4];
} af_tensor;

// A captured tensor as mods read it. `size` and `stride` have `rank` entries.
typedef struct {
    const void* data;
    const int64_t* size;
    const int64_t* stride;
    int32_t type;  // af_type
    int32_t rank;
} af_captured;

// The inputs of mods beside the pair: captured tensors and numbers, fixed during a call.
typedef struct {
    const af_captured* captured;
    const int64_t* ints;
    const double* floats;
    // Added to b, h, q_idx, kv_idx before a mod sees them.
    int64_t offset[4];
} af_mod_inputs;

// The first read of a live pair outside of a captured tensor. code 0: there was none.
typedef struct {
    int32_t code;      // an af_status
    int32_t mod;       // 0 score_mod, 1 mask_mod
    int32_t captured;  // position in af_mod_inputs.captured
    int32_t dim;
    int64_t index;
} af_error;

// Most columns of a tile.
#define AF_TILE_COLUMNS 512

// A rectangle of pairs of one (batch, query head): what a mod program works on, in place. It has at
// least one row and one column.
//
// Rows of `score` and `grad` are `ld` floats apart; ld is a multiple of 16 and both, as `live`,
// are aligned to 64 bytes. Programs may read and write columns up to cols rounded up to 16, whose
// values mean nothing; loads of captured tensors clamp there as everywhere.
typedef struct {
    float* score;     // [rows][ld]: scaled scores; a score program replaces them
    float* grad;      // [rows][ld], score_backward only: in the gradient of the modified score,
                      // out the gradient of the score. `score` holds unmodified scores then.
    uint16_t* live;   // [rows][live_ld]: bit c % 16 of word c / 16. A mask program writes all
                      // words up to cols rounded up to 16 (bits past cols: 0). Score programs
                      // read it: NULL says all are live. Reads outside of a captured tensor count
                      // for live pairs only; score_backward treats grad of dead pairs as 0 and
                      // returns 0 there, and scatters nothing.
    int64_t ld;
    int64_t live_ld;
    int32_t rows;
    int32_t cols;
    int64_t b, h, q, kv;  // of the first row and column, without af_mod_inputs.offset
    const af_mod_inputs* inputs;
    double* const* captured_grad;  // one a captured tensor: dense, row-major; NULL where unwanted
    void* scratch;                 // af_program.scratch_bytes, aligned to 64, this thread's own
    af_error* error;               // this thread's own; the first read outside is kept
} af_tile;

struct af_program;
typedef void (*af_tile_function)(const struct af_program* program, const af_tile* tile);

// A mod on tiles. Bytecode has af_interpret as its function. Compiled code that may read outside of
// a captured tensor has its mod's bytecode in `code`, for af_find_read_outside.
typedef struct af_program {
    af_tile_function function;
    const void* code;
    int64_t code_bytes;
    int64_t scratch_bytes;
} af_program;

// Runs of consecutive kv blocks, anyflex's block mask format 1.
typedef struct {
    const int32_t* offsets;  // [batch][heads][blocks + 1]
    const int32_t* runs;     // [n][3]: first block, end block, kind (1 FULL, 2 PARTIAL)
    int64_t batch;           // 1 or B
    int64_t heads;           // 1 or Hq
    int64_t blocks;          // rows of blocks
    int64_t count;           // n: what offsets say beyond it isn't read
} af_runs;

// Keys and values in pages: key i is row i % size of page ids[i / size]. An id outside of the pool is
// taken for page 0.
typedef struct {
    const int32_t* ids;  // NULL: keys and values lie one after the other
    int64_t size;        // rows of a page
    int64_t count;       // pages of the pool
} af_pages;

// Factors of stored keys or values, for each row of each head; strides may be 0.
typedef struct {
    const float* data;
    int64_t stride[3];  // batch, or page; head; row
} af_scales;

// The arguments that forward, decode and backward share.
typedef struct {
    int32_t dtype;  // af_dtype
    int32_t threads;
    int64_t batch, q_heads, kv_heads, q_length, kv_length, head_dim, value_head_dim;
    af_tensor query, key, value;  // a broadcast batch has stride 0
    double scale;
    int32_t has_mask;     // 0: every pair is live
    int32_t q_block, kv_block;  // block size of the mask, elements
    int32_t mask_is_per_call;   // 1: the mask program reads neither b nor h
    af_runs runs;         // rows of q blocks
    af_runs transposed;   // rows of kv blocks; backward only
    // NULL where there is none. mask: bits of live pairs of PARTIAL blocks. score: in place.
    const af_program* mask;
    const af_program* score;
    const af_program* score_backward;
    af_mod_inputs inputs;
    // Backward only: which gradients are wanted (bits 1 dq, 2 dk, 4 dv). The others take no
    // workspace.
    int32_t wanted;
    // 1 where key and value have batch 1 (their batch stride is 0): forward packs them once for
    // all batches, dk and dv are sums.
    int32_t kv_batch_is_shared;
    // Backward only: what every read of the owned captured tensors (af_backward_args) is indexed
    // by, beside kv: bits 1 b, 2 h.
    int32_t captured_owner;
    // Dropout (native/src/dropout.h): pairs whose random bits are below the threshold are dropped,
    // none where it is 0. The scale is the factor of the others' weights.
    uint32_t dropout_words[2];
    uint32_t dropout_threshold;
    float dropout_scale;
    // [q_heads], or NULL: one more score a head in each row's softmax, whose value is 0. lse and
    // max_scores of forward leave it out; the lse that backward reads has it.
    const float* sinks;
    // One sequence of af_packed_args. Strides 0 of key and value are then from page to page, if
    // pages.ids isn't NULL, and lse and max_scores have `packed_rows` rows a head. Else both are 0.
    af_pages pages;
    int64_t packed_rows;
    // AF_I8 or AF_F8: keys and values are stored so, in packed sequences only; 0: in `dtype`.
    int64_t kv_storage;
    af_scales key_scales, value_scales;
} af_problem;

typedef struct {
    af_problem problem;
    af_tensor out;        // [B, Hq, L, Ev], dtype; last stride 1
    float* lse;           // [B, Hq, L] contiguous, or NULL
    float* max_scores;    // [B, Hq, L] contiguous, or NULL
    float* unrounded_out; // [B, Hq, L, Ev] contiguous: out before rounding to dtype, or NULL
    void* workspace;
    int64_t workspace_bytes;
} af_forward_args;

// Forward of many sequences, whose query rows lie one after the other in one batch of `args`. Their
// keys do so too, or lie in pages: key and value are then pools [pages, heads, page_size, dim].
// Numbers that would lead outside of a tensor are bounded.
typedef struct {
    af_forward_args args;  // q_length and kv_length: of all sequences together
    int64_t sequences;
    const int32_t* q_offsets;   // [sequences + 1]: its query rows; padding rows get out 0
    const int32_t* q_starts;    // position of a sequence's first query row
    const int32_t* kv_lengths;
    const int32_t* slots;       // what mods see as b
    const int32_t* kv_offsets;  // [sequences]: its first key; NULL: keys are in pages
    // Row table_rows[i] of the table, or i where table_rows is NULL, has the pages of sequence i.
    const int32_t* page_table;
    const int32_t* table_rows;
    int64_t table_stride, table_width, table_height, page_size, pages;
} af_packed_args;

enum { AF_GRAD_DOUBLE = 1, AF_GRAD_OWNED = 2 };

typedef struct {
    af_problem problem;
    af_tensor out;         // as forward left it, or, if unrounded_out is given, not read
    const float* unrounded_out;  // [B, Hq, L, Ev] contiguous, or NULL
    const float* lse;      // [B, Hq, L] contiguous
    af_tensor dout;        // [B, Hq, L, Ev], dtype, any strides
    const float* dlse;     // [B, Hq, L] contiguous, or NULL
    const float* delta;    // [B, Hq, L] contiguous, or NULL: computed from out and dout
    // data NULL: unwanted. Overwritten; any strides that address each element once. Where
    // problem.kv_batch_is_shared, dk and dv hold one batch, summed over all, and their batch
    // stride is 0; where key and value are expanded to `batch` it is not.
    af_tensor dq, dk, dv;
    // One a captured tensor, or NULL: dense accumulators, added to. A kind is a sum of
    // AF_GRAD_DOUBLE, float otherwise, and AF_GRAD_OWNED: every read of the tensor has kv among its
    // indices as it is, and what problem.captured_owner says.
    void* const* captured_grad;
    const int32_t* captured_grad_kind;
    const int64_t* captured_grad_elements;
    int64_t captured_count;
    void* workspace;
    int64_t workspace_bytes;
} af_backward_args;

typedef enum {
    AF_OK = 0,
    AF_READ_OUTSIDE = 1,       // see af_error
    AF_WORKSPACE_TOO_SMALL = 2,
    AF_BAD_ARGUMENT = 3,       // of af_set_isa: no level that can run here
    AF_NO_MEMORY = 4           // see af_find_read_outside
} af_status;

AF_API int32_t af_abi(void);
// Names of the built levels that this processor can run, comma-separated, best first; and the one
// in use. af_set_isa returns AF_BAD_ARGUMENT for a level that can't run here.
AF_API const char* af_isa_available(void);
AF_API const char* af_isa(void);
// Names of the levels that this processor can run and that the library was built without, because
// the compiler couldn't build them.
AF_API const char* af_isa_left_out(void);
AF_API int32_t af_set_isa(const char* name);

// Makes calls run on the threads of an OpenMP runtime that the process has already, given by the
// addresses of its GOMP_parallel and omp_get_thread_num. Call it before any other call runs.
AF_API void af_share_threads(void* parallel, void* thread_number);

// A workspace's size follows from dtype, threads, the seven sizes, has_mask, the mask's block
// sizes, `wanted`, `kv_batch_is_shared`, `captured_owner` and the programs' scratch_bytes alone,
// never from pointers, strides or runs. Elements are those of captured tensors that get gradients:
// all of them, and the owned ones.
AF_API int64_t af_forward_workspace(const af_problem* problem);
AF_API int32_t af_forward(const af_forward_args* args, af_error* error);
// The block mask of packed sequences has rows of blocks one sequence after the other, each in its
// own coordinates. A workspace's size depends on the lengths.
AF_API int64_t af_packed_workspace(const af_packed_args* args);
AF_API int32_t af_packed_forward(const af_packed_args* args, af_error* error);
AF_API int64_t af_backward_workspace(const af_problem* problem, int64_t captured_elements,
                                     int64_t owned_elements);
AF_API int32_t af_backward(const af_backward_args* args, af_error* error);
// Name of the variant that af_forward takes for this problem: "prefill", "decode", ...
AF_API const char* af_forward_variant(const af_problem* problem);

// The bytecode interpreter (the format is in native/src/bytecode.h).
AF_API void af_interpret(const af_program* program, const af_tile* tile);
// Bytes of scratch that a program of bytecode needs (af_program.scratch_bytes).
AF_API int64_t af_program_scratch(const void* code);
// A line for each operation of the bytecode, in the order of its numbers: "add_f f:ff".
AF_API const char* af_operations(void);

// For compiled mods: notes the first read outside of a captured tensor at a live pair, which the
// program's bytecode finds. A mask's live bits are written again. Where there is no memory for that
// the tile's error is AF_NO_MEMORY.
AF_API void af_find_read_outside(const af_program* program, const af_tile* tile);
// For compiled mods: adds values[i] to sums[places[i]] for the bits i of `live`, in order.
AF_API void af_add_lanes(double* sums, const int64_t* places, const double* values, uint32_t live);
// For compiled mods: adds strip[c * step], and clears it, for c from 0 to count - 1 in order, to
// the element of `sums` with index first + c * step, which wraps once and is clamped to 0..last.
AF_API void af_add_strip(double* sums, double* strip, int64_t first, int64_t step, int64_t size,
                         int64_t last, int64_t stride, int64_t count);
// For compiled mods: x to a power without sign, which wraps.
AF_API int64_t af_power(int64_t x, int64_t power);

#ifdef __cplusplus
}
#endif
#endif
