// Memory whose neighbours are watched, and tensors in it: any type, any strides.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "anyflex_cpu.h"

namespace native_test {

// Memory of exactly this many bytes, aligned to 64: a sanitizer sees the first byte past it;
// without one, bytes behind it say whether they were written to.
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

inline uint32_t bits_of(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}
inline float of_bits(uint32_t u) {
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

inline uint16_t bf16(float x) {
    const uint32_t u = bits_of(x);
    return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline float of_bf16(uint16_t x) { return of_bits(uint32_t(x) << 16); }

// Rounds towards 0 and takes subnormals as 0: it only makes values that have 16 bits.
inline uint16_t half(float x) {
    const uint32_t u = bits_of(x), size = u & 0x7fffffff;
    if (size >= bits_of(0x1p16f))
        return static_cast<uint16_t>((u >> 16 & 0x8000) | (x == x ? 0x7c00 : 0x7e00));
    if (size < bits_of(0x1p-14f)) return static_cast<uint16_t>(u >> 16 & 0x8000);
    return static_cast<uint16_t>((u >> 16 & 0x8000) | (size - (112u << 23)) >> 13);
}
inline float of_half(uint16_t x) {
    const uint32_t exponent = x >> 10 & 31, sign = uint32_t(x & 0x8000) << 16;
    if (exponent == 31) return of_bits(sign | 0x7f800000 | uint32_t(x & 0x3ff) << 13);
    return of_bits(sign | bits_of(of_bits(uint32_t(x & 0x7fff) << 13) * 0x1p112f));
}

inline int64_t bytes_of(int32_t dtype) { return dtype == AF_F32 ? 4 : 2; }

inline void put(char* to, int32_t dtype, float x) {
    const uint16_t h = dtype == AF_BF16 ? bf16(x) : half(x);
    std::memcpy(to, dtype == AF_F32 ? static_cast<const void*>(&x) : &h, bytes_of(dtype));
}
inline float got(const char* from, int32_t dtype) {
    if (dtype == AF_F32) {
        float x;
        std::memcpy(&x, from, 4);
        return x;
    }
    uint16_t h;
    std::memcpy(&h, from, 2);
    return dtype == AF_BF16 ? of_bf16(h) : of_half(h);
}

enum layout {
    contiguous,
    shifted,       // begins one element after an aligned address
    heads_inside,  // [batch, length, heads, dim] in memory
    every_second,  // elements of a row are two apart
    columns,       // [batch, heads, dim, length] in memory
    of_one_batch,  // batch stride 0
    of_one_head,   // head stride 0
    layout_count
};
constexpr int output_layouts = of_one_batch;   // those that address each element once
constexpr int row_layouts = every_second;      // those of out, whose last stride is 1

// A tensor [batch, heads, length, dim], and its values in double, dense.
struct tensor {
    tensor(int64_t batch, int64_t heads, int64_t length, int64_t dim, int32_t dtype, int how)
        : size(batch * heads * length * dim), dtype(dtype), shape{batch, heads, length, dim},
          stride{heads * length * dim, length * dim, dim, 1}, first(how == shifted ? 1 : 0),
          dense(how == contiguous || how == shifted) {
        if (how == heads_inside) stride[1] = dim, stride[2] = heads * dim;
        if (how == every_second)
            for (int64_t& each : stride) each *= 2;
        if (how == columns) stride[2] = 1, stride[3] = length;
        if (how == of_one_batch) stride[0] = 0;
        if (how == of_one_head) stride[1] = 0;
        int64_t last = first;
        for (int i = 0; i < 4; ++i) last += (shape[i] - 1) * stride[i];
        // Exactly the bytes that the strides reach, so that a sanitizer sees the first element
        // past them.
        data.assign(size > 0 ? (last + 1) * bytes_of(dtype) : bytes_of(dtype), char(0xff));
        view = {data.data() + first * bytes_of(dtype),
                {stride[0], stride[1], stride[2], stride[3]}};
    }
    // `nonfinite`: how many elements become NaN or infinite.
    void fill(std::mt19937_64& random, int64_t nonfinite) {
        std::normal_distribution<float> normal;
        const int64_t elements = int64_t(data.size()) / bytes_of(dtype);
        for (int64_t i = 0; i < elements; ++i)
            put(data.data() + i * bytes_of(dtype), dtype, normal(random));
        const float choices[] = {__builtin_nanf(""), __builtin_inff(), -__builtin_inff()};
        for (int64_t i = 0; i < nonfinite && size > 0; ++i) {
            const int64_t at = place(int64_t(random() % uint64_t(size)));
            put(data.data() + at * bytes_of(dtype), dtype, choices[random() % 3]);
        }
        values.resize(size);
        for (int64_t i = 0; i < size; ++i) values[i] = at(i);
    }
    int64_t place(int64_t i) const {
        if (dense) return first + i;
        int64_t found = first;
        for (int dim = 3; dim >= 0; --dim) {
            found += i % shape[dim] * stride[dim];
            i /= shape[dim];
        }
        return found;
    }
    double at(int64_t i) const { return got(data.data() + place(i) * bytes_of(dtype), dtype); }
    // Number of bytes between the elements of an output that were overwritten.
    int64_t written_between() const {
        std::vector<char> ours(data.size(), 0);
        for (int64_t i = 0; i < size; ++i)
            std::memset(ours.data() + place(i) * bytes_of(dtype), 1, bytes_of(dtype));
        int64_t found = 0;
        for (size_t i = 0; i < data.size(); ++i) found += !ours[i] && data[i] != char(0xff);
        return found;
    }
    int64_t size;
    int32_t dtype;
    int64_t shape[4], stride[4];
    int64_t first;
    bool dense;
    std::vector<double> values;
    std::vector<char> data;
    af_tensor view;
};

}  // namespace native_test
