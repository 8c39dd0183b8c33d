// The levels and the ABI's functions. Compiled for the baseline.
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "bytecode.h"
#include "level.h"

#if defined(__x86_64__) || defined(_M_X64)
#define AF_X86 1
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#define AF_DECLARE_LEVEL(space)                                     \
    namespace space {                                               \
    int64_t forward_workspace(const af_problem&);                   \
    int32_t forward(const af_forward_args&, af_error*);             \
    int64_t decode_workspace(int64_t);                              \
    int64_t decode_workspace_of(const af_problem&, int64_t*);       \
    int32_t decode(const af_forward_args*, int64_t, void*, af_error*); \
    int64_t backward_workspace(const af_problem&, int64_t, int64_t);  \
    int32_t backward(const af_backward_args&, af_error*);           \
    }
#define AF_DECLARE_INTERPRETER(space)                  \
    namespace space {                                  \
    void interpret(const af_program*, const af_tile*); \
    }
// A level's entry in the table. `built` is 1 or 0: whether the compiler can build it, found by
// CMake. Of a level that isn't built the table has the name alone.
#define AF_ENTRY_1(name, supported)                                                           \
    {#name, supported, af_##name::forward_workspace, af_##name::forward,                      \
     af_##name::decode_workspace, af_##name::decode_workspace_of, af_##name::decode,          \
     af_##name::backward_workspace, af_##name::backward, af_##name::interpret}
#define AF_ENTRY_0(name, supported) \
    {#name, supported, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr}
#define AF_ENTRY_FOR(built) AF_ENTRY_##built
#define AF_LEVEL_ENTRY(built, name, supported) AF_ENTRY_FOR(built)(name, supported)

AF_DECLARE_LEVEL(af_portable)
AF_DECLARE_INTERPRETER(af_portable)
#if defined(AF_X86)
AF_DECLARE_LEVEL(af_avx2)
AF_DECLARE_LEVEL(af_avx512)
AF_DECLARE_LEVEL(af_avx512_bf16)
AF_DECLARE_LEVEL(af_amx_bf16)
AF_DECLARE_INTERPRETER(af_avx2)
AF_DECLARE_INTERPRETER(af_avx512)
// bf16 instructions change nothing in the interpreter.
namespace af_avx512_bf16 {
using af_avx512::interpret;
}
namespace af_amx_bf16 {
using af_avx512::interpret;
}
#endif

namespace {

bool always() { return true; }

#if defined(AF_X86)
struct registers {
    unsigned a = 0, b = 0, c = 0, d = 0;
};
registers cpuid(unsigned leaf, unsigned sub) {
    registers r;
    if (!__get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d)) return {};
    return r;
}
bool bit(unsigned word, int n) { return (word >> n & 1) != 0; }

// The first four letters of the maker's name.
constexpr unsigned intel = 0x756e6547, amd = 0x68747541;
unsigned maker() { return cpuid(0, 0).b; }
unsigned family() {
    const unsigned word = cpuid(1, 0).a, base = word >> 8 & 0xf;
    return base == 0xf ? base + (word >> 20 & 0xff) : base;
}

// State components that the operating system saves (XCR0).
bool saves(uint64_t components) {
    if (!bit(cpuid(1, 0).c, 27)) return false;
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    const uint64_t state = (static_cast<uint64_t>(high) << 32) | low;
    return (state & components) == components;
}

bool has_avx2() {
    const registers one = cpuid(1, 0), seven = cpuid(7, 0);
    return saves(0x6) && bit(one.c, 12) && bit(one.c, 29) && bit(seven.b, 5);  // FMA F16C AVX2
}
bool has_avx512() {
    const registers seven = cpuid(7, 0);
    return has_avx2() && saves(0xe6) && bit(seven.b, 16) && bit(seven.b, 17) &&
           bit(seven.b, 30) && bit(seven.b, 31);  // F DQ BW VL
}
bool has_avx512_bf16() { return has_avx512() && bit(cpuid(7, 1).a, 5); }

// Linux hands out the 8 KiB of tile registers on request, once for the process.
bool tiles_permitted() {
#if defined(__linux__)
    constexpr long request_permission = 0x1023, tile_data = 18;
    static const bool granted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    return granted;
#else
    return true;
#endif
}
bool has_amx_bf16() {
    const registers seven = cpuid(7, 0);
    return has_avx512_bf16() && saves(0x60000) && bit(seven.d, 22) && bit(seven.d, 24) &&
           tiles_permitted();  // AMX-BF16 AMX-TILE
}
#endif

// Best first, on most processors.
const af_level levels[] = {
#if defined(AF_X86)
    AF_LEVEL_ENTRY(AF_HAS_AMX_BF16, amx_bf16, has_amx_bf16),
    AF_LEVEL_ENTRY(AF_HAS_AVX512_BF16, avx512_bf16, has_avx512_bf16),
    AF_LEVEL_ENTRY(AF_HAS_AVX512, avx512, has_avx512),
    AF_LEVEL_ENTRY(AF_HAS_AVX2, avx2, has_avx2),
#endif
    AF_LEVEL_ENTRY(1, portable, always),
};

typedef std::vector<const af_level*> level_list;

// The levels that this processor can run, best first on most, of those that are built, or aren't.
level_list runnable(bool built) {
    level_list found;
    for (const af_level& each : levels)
        if ((each.forward != nullptr) == built && each.supported()) found.push_back(&each);
    return found;
}

// Levels that are built and that this processor can run, best first.
const level_list& here() {
    static const level_list found = [] {
        level_list best = runnable(true);
#if defined(AF_X86)
        // Intel's vdpbf16ps runs at a quarter of the rate of float products (Sapphire Rapids): a
        // processor without AMX, or not permitted to use it, is 1.5 times as fast with bf16
        // converted to float.
        for (size_t i = 0; i + 1 < best.size() && maker() == intel; ++i)
            if (std::strcmp(best[i]->name, "avx512_bf16") == 0) {
                std::swap(best[i], best[i + 1]);
                break;
            }
#endif
        return best;
    }();
    return found;
}

std::string names_of(const level_list& list) {
    std::string names;
    for (const af_level* each : list) names += (names.empty() ? "" : ",") + std::string(each->name);
    return names;
}

std::atomic<const af_level*>& chosen() {
    static std::atomic<const af_level*> level{here()[0]};
    return level;
}

bool has_rows(const af_problem& p) {
    return p.batch > 0 && p.q_heads > 0 && p.q_length > 0;
}

int64_t workspace_of(const af_level& l, const af_problem& p) {
    if (!af_is_decode(p)) return l.forward_workspace(p);
    int64_t buffers = 0;
    const int64_t own = l.decode_workspace_of(p, &buffers);
    return l.decode_workspace(1) + own + buffers;
}

}  // namespace

const af_level& af_chosen_level() { return *chosen().load(std::memory_order_acquire); }

bool af_fits(const void* workspace, int64_t bytes, int64_t needed) {
    return needed == 0 || (workspace && reinterpret_cast<uintptr_t>(workspace) % 64 == 0 &&
                           bytes >= needed);
}

bool af_is_decode(const af_problem& p) {
    // The rows lie in one row of blocks. Up to `most` rows, packing keys costs more than it saves:
    // 16, or 64 where keys are many and bfloat16 products aren't used. With one to four rows a
    // head the packed products would compute mostly padding.
    const int64_t rows = p.q_heads / p.kv_heads * p.q_length;
    const int64_t most = p.dtype == AF_BF16 || p.kv_length < 256 ? 16 : 64;
    return (p.q_length <= 4 || rows <= most) && (!p.has_mask || p.q_length <= p.q_block);
}

bool af_reads_best_in_order() {
#if defined(AF_X86)
    static const bool best = maker() == amd;
    return best;
#else
    return false;
#endif
}

bool af_asks_ahead_in_order() {
#if defined(AF_X86)
    static const bool asks = maker() == amd && family() >= 0x1a;
    return asks;
#else
    return false;
#endif
}

extern "C" {

int32_t af_abi(void) { return AF_ABI; }

const char* af_isa_available(void) {
    static const std::string names = names_of(here());
    return names.c_str();
}

const char* af_isa_left_out(void) {
    static const std::string names = names_of(runnable(false));
    return names.c_str();
}

const char* af_isa(void) { return af_chosen_level().name; }

int32_t af_set_isa(const char* name) {
    for (const af_level* each : here()) {
        if (std::strcmp(each->name, name) != 0) continue;
        chosen().store(each, std::memory_order_release);
        return AF_OK;
    }
    return AF_BAD_ARGUMENT;
}

int64_t af_forward_workspace(const af_problem* problem) {
    if (!has_rows(*problem)) return 0;
    return workspace_of(af_chosen_level(), *problem);
}

int32_t af_forward(const af_forward_args* args, af_error* error) {
    std::memset(error, 0, sizeof *error);
    const af_problem& p = args->problem;
    if (!has_rows(p)) return AF_OK;
    const af_level& l = af_chosen_level();
    const int64_t needed = workspace_of(l, p);
    if (!af_fits(args->workspace, args->workspace_bytes, needed)) return AF_WORKSPACE_TOO_SMALL;
    return af_is_decode(p) ? l.decode(args, 1, args->workspace, error) : l.forward(*args, error);
}

int64_t af_backward_workspace(const af_problem* problem, int64_t captured_elements,
                              int64_t owned_elements) {
    return af_chosen_level().backward_workspace(*problem, captured_elements, owned_elements);
}

int32_t af_backward(const af_backward_args* args, af_error* error) {
    std::memset(error, 0, sizeof *error);
    const af_problem& p = args->problem;
    const int64_t needed = af_chosen_level().backward_workspace(
        p, af_captured_elements(*args, 0), af_captured_elements(*args, AF_GRAD_OWNED));
    if (!af_fits(args->workspace, args->workspace_bytes, needed)) return AF_WORKSPACE_TOO_SMALL;
    return af_chosen_level().backward(*args, error);
}

const char* af_forward_variant(const af_problem* problem) {
    return has_rows(*problem) && af_is_decode(*problem) ? "decode" : "prefill";
}

const char* af_operations(void) {
#define AF_LINE(NAME, SIGNATURE) #NAME " " SIGNATURE "\n"
    return AF_OPERATIONS(AF_LINE);
#undef AF_LINE
}

int64_t af_program_scratch(const void* code) {
    const af_code& header = *static_cast<const af_code*>(code);
    return int64_t(header.steps) * AF_STEP_SCRATCH + AF_LANES * 8 +
           int64_t(header.slots) * AF_LANES * 4;
}

void af_interpret(const af_program* program, const af_tile* tile) {
    af_chosen_level().interpret(program, tile);
}

void af_find_read_outside(const af_program* program, const af_tile* tile) {
    // The tile's scores are in use: the interpreter gets copies, at addresses that it can take.
    // Nothing is thrown: the caller is compiled code, in a team of threads.
    const int64_t width = (int64_t(tile->cols) + 15) / 16 * 16;
    const int64_t scratch = (af_program_scratch(program->code) + 63) / 64 * 16;
    const int64_t scores = tile->score ? tile->rows * width : 0;
    const std::unique_ptr<float[]> memory(new (std::nothrow) float[scratch + scores + 16]);
    if (!memory) {
        if (tile->error->code == AF_OK) tile->error->code = AF_NO_MEMORY;
        return;
    }
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory.get());
    af_tile copy = *tile;
    copy.scratch = reinterpret_cast<void*>((address + 63) / 64 * 64);
    if (tile->score) {
        copy.score = static_cast<float*>(copy.scratch) + scratch;
        copy.ld = width;
        for (int64_t row = 0; row < tile->rows; ++row)
            std::memcpy(copy.score + row * width, tile->score + row * tile->ld,
                        width * sizeof(float));
    }
    af_interpret(program, &copy);
}

void af_add_lanes(double* sums, const int64_t* places, const double* values, uint32_t live) {
    for (; live != 0; live &= live - 1) {
        const int i = __builtin_ctz(live);
        sums[places[i]] += values[i];
    }
}

void af_add_strip(double* sums, double* strip, int64_t first, int64_t step, int64_t size,
                  int64_t last, int64_t stride, int64_t count) {
    for (int64_t c = 0; c < count; ++c) {
        int64_t index = first + c * step;
        index = index < 0 ? index + size : index;
        index = index < 0 ? 0 : index > last ? last : index;
        sums[index * stride] += strip[c * step];
        strip[c * step] = 0;
    }
}

int64_t af_power(int64_t x, int64_t power) {
    uint64_t result = 1, square = uint64_t(x);
    for (uint64_t left = uint64_t(power); left != 0; left >>= 1, square *= square)
        if (left & 1) result *= square;
    return int64_t(result);
}

}  // extern "C"
