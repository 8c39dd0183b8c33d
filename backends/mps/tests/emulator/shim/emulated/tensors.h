// Metal 4's tensors in memory, and of Metal Performance Primitives the product of two of them whose
// result is a cooperative tensor.
//
// Metal leaves open which elements of a cooperative tensor a thread holds: here they are shuffled,
// as EMULATED_TENSOR_LAYOUT says, and some slots hold none. Apple's own assertions are repeated.
#pragma once
#include "metal.h"

#ifndef EMULATED_TENSOR_LAYOUT
#define EMULATED_TENSOR_LAYOUT 1u
#endif

extern "C" void emulated_fault(const char* text) EMULATED_TOGETHER;

namespace emulated {

// The element that each slot of each thread holds: a random order of all numbers below Slots.
template <int Slots, uint Seed> struct shuffle {
    static_assert(Slots <= 65536);
    static inline ushort places[Slots];
    static inline bool is_made;
    EMULATED_UNCHECKED static const EMULATED_OWN ushort* get() {
        if (!is_made) {
            uint state = Seed;
            for (int i = 0; i < Slots; i++) places[i] = (ushort)i;
            for (int i = Slots - 1; i > 0; i--) {
                state = state * 1664525u + 1013904223u;
                const int other = (int)((state >> 8) % (uint)(i + 1));
                const ushort place = places[i];
                places[i] = places[other];
                places[other] = place;
            }
            is_made = true;
        }
        return (const EMULATED_OWN ushort*)places;
    }
};

} // namespace emulated

namespace metal {

template <class Index, size_t Rank> struct dextents {
    static_assert(Rank == 2, "the emulator has tensors of two dimensions");
    Index sizes[2];
    // The dimension whose elements are neighbours comes first.
    EMULATED_INLINE dextents(Index columns, Index rows) : sizes{columns, rows} {}
};

struct tensor_inline {};

template <class Element, class Extents, class Kind> struct tensor {
    static_assert(is_same_v<Kind, tensor_inline>, "the emulator has inline tensors");
    typedef emulated::element_of<Element*> value_type;
    Element* data;
    Extents extents;
    EMULATED_INLINE tensor(Element* at, Extents sizes) : data(at), extents(sizes) {}
};

template <size_t Count> struct execution_simdgroups {
    static constexpr int threads = 32 * (int)Count;
};
typedef execution_simdgroups<1> execution_simdgroup;

template <class Element, class Layout> struct cooperative_tensor {
    // Slots without an element, beside those that don't divide evenly.
    static constexpr int spare = 1 + (int)(Layout::seed % 3);
    static constexpr int capacity =
        (Layout::rows * Layout::columns + Layout::threads - 1) / Layout::threads + spare;
    Element elements[capacity];
    const EMULATED_OWN ushort* places;

    EMULATED_INLINE cooperative_tensor() {
        for (int i = 0; i < capacity; i++) elements[i] = (Element)NAN;
        places = emulated::shuffle<capacity * Layout::threads, Layout::seed>::get() +
                 emulated_current->thread_index * capacity;
    }
    EMULATED_INLINE static constexpr uint16_t get_capacity() { return capacity; }
    EMULATED_INLINE bool is_valid_element(uint16_t i) const {
        return i < capacity && places[i] < Layout::rows * Layout::columns;
    }
    // Column and row.
    EMULATED_INLINE array<int, 2> get_multidimensional_index(uint16_t i) const {
        if (!is_valid_element(i)) emulated_fault("asks where an invalid element lies");
        return {places[i] % Layout::columns, places[i] / Layout::columns};
    }
    EMULATED_INLINE Element& operator[](uint16_t i) {
        if (i >= capacity) emulated_fault("reads past a cooperative tensor's capacity");
        return elements[i];
    }
};

} // namespace metal

namespace mpp::tensor_ops {

struct matmul2d_descriptor {
    enum class mode { multiply, multiply_accumulate };
    int m, n, k;
    bool transpose_left, transpose_right, relaxed_precision;
    mode matmul_mode;
    constexpr matmul2d_descriptor(int rows, int columns, int inner, bool left_transposed = false,
                                  bool right_transposed = false, bool relaxed = false,
                                  mode how = mode::multiply)
        : m(rows), n(columns), k(inner), transpose_left(left_transposed),
          transpose_right(right_transposed), relaxed_precision(relaxed), matmul_mode(how) {}
};

template <matmul2d_descriptor Shape, class Scope, class Left, class Right> struct result_layout {
    static constexpr int rows = Shape.m, columns = Shape.n, threads = Scope::threads;
    static constexpr uint seed =
        EMULATED_TENSOR_LAYOUT * 1000003u + (uint)(Shape.m * 8191 + Shape.n * 131 + Shape.k);
};

template <matmul2d_descriptor Shape, class Scope> struct matmul2d {
    static_assert(Shape.m % 16 == 0 || Shape.n % 16 == 0,
                  "at least one of M or N must be a multiple of 16");
    static_assert(Shape.n % 8 == 0, "N must be a multiple of 8");
    static_assert(Shape.k > 0 && Shape.k % 16 == 0, "K must be a multiple of 16");

    template <class Left, class Right, class Element>
    EMULATED_INLINE auto get_destination_cooperative_tensor() const {
        return metal::cooperative_tensor<Element, result_layout<Shape, Scope, Left, Right>>();
    }

    // Every thread computes its own elements, from memory that others wrote: no barrier.
    template <class Left, class Right, class Element, class Layout>
    EMULATED_INLINE EMULATED_TOGETHER void
    run(Left& left, Right& right, metal::cooperative_tensor<Element, Layout>& result) const {
        static_assert(metal::is_same_v<Layout, result_layout<Shape, Scope, Left, Right>>,
                      "input types must match cooperative tensor types");
        static_assert(metal::is_same_v<typename Left::value_type, typename Right::value_type> &&
                          metal::is_same_v<Element, float>,
                      "operands have one type, results are float");
        check(left, right);
        const int pitch = left.extents.sizes[0], right_pitch = right.extents.sizes[0];
        for (int i = 0; i < result.capacity; i++) {
            if (!result.is_valid_element(i)) continue;
            const int row = result.places[i] / Shape.n, column = result.places[i] % Shape.n;
            float sum = 0.0f;
            for (int step = 0; step < Shape.k; step++) {
                // The order of summation is open, too.
                const int k = (int)((step + Layout::seed) % Shape.k);
                const auto a = left.data[Shape.transpose_left ? k * pitch + row : row * pitch + k];
                const auto b = right.data[Shape.transpose_right ? column * right_pitch + k
                                                                : k * right_pitch + column];
                sum = sum + (float)a * (float)b;
            }
            if (Shape.matmul_mode == matmul2d_descriptor::mode::multiply_accumulate)
                sum = result.elements[i] + sum;
            result.elements[i] = sum;
        }
    }

    template <class Left, class Right>
    EMULATED_INLINE EMULATED_TOGETHER static void check(const Left& left, const Right& right) {
        const uint3 threads = emulated_current->threads_per_group;
        if (threads[0] * threads[1] * threads[2] != (uint)Scope::threads)
            emulated_fault("multiplies tensors in a threadgroup of another size");
        const int rows = Shape.transpose_left ? Shape.k : Shape.m;
        const int columns = Shape.transpose_left ? Shape.m : Shape.k;
        const int right_rows = Shape.transpose_right ? Shape.n : Shape.k;
        const int right_columns = Shape.transpose_right ? Shape.k : Shape.n;
        if (left.extents.sizes[0] < columns || left.extents.sizes[1] < rows ||
            right.extents.sizes[0] < right_columns || right.extents.sizes[1] < right_rows)
            emulated_fault("multiplies a tensor past its extents");
        // All lanes call it together.
        const uint together = 0;
        emulated_exchange(&together, sizeof together);
    }
};

} // namespace mpp::tensor_ops
