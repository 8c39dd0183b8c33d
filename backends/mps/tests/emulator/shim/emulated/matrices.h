// simdgroup_matrix: each lane holds two neighbours of a row, as MLX's and torch's kernels assume.
#pragma once
#include "simdgroups.h"

namespace emulated {

template <class T>
constexpr int type_code = metal::is_same_v<T, half>     ? 1
                          : metal::is_same_v<T, bfloat> ? 2
                                                        : 0;

// For unevaluated use: the element type of memory, without its address space.
template <class P> auto value_at(P p) { return p[0]; }
template <class P> using element_of = decltype(value_at(metal::declval<P>()));

// The race build checks a matrix as a whole, so its elements are read and written unchecked.
template <class T, class P>
EMULATED_INLINE auto checked(P p, ulong stride, bool transposed, bool write) {
    emulated_current->matrix_accesses++;
#ifdef EMULATED_RACES
    const ulong row = transposed ? 1 : stride, column = transposed ? stride : 1;
    emulated_matrix((const void*)p, row * sizeof(T), column * sizeof(T), sizeof(T), write);
    return (EMULATED_OWN T*)p;
#else
    return p;
#endif
}

// Row and column of the lane's first element.
struct place {
    int row = emulated_current->element >> 3, column = emulated_current->element & 7;
};

} // namespace emulated

namespace metal {

template <class T, int Columns, int Rows> struct simdgroup_matrix {
    static_assert(Columns == 8 && Rows == 8, "only 8x8");
    static_assert(is_floating_point_v<T>, "float, half or bfloat");
    mutable vec<T, 2> elements;
    // The product in the queue whose result the elements will be; 0: they are known.
    mutable uint pending = 0;

    EMULATED_INLINE simdgroup_matrix() { elements[0] = elements[1] = (T)NAN; }
    EMULATED_INLINE explicit simdgroup_matrix(T diagonal) {
        const emulated::place at;
        elements[0] = at.row == at.column ? diagonal : T(0);
        elements[1] = at.row == at.column + 1 ? diagonal : T(0);
    }
    EMULATED_INLINE EMULATED_TOGETHER void resolve() const {
        if (!pending) return;
        const float2 result = emulated_product(pending);
        elements[0] = (T)result[0];
        elements[1] = (T)result[1];
        pending = 0;
    }
    EMULATED_INLINE EMULATED_TOGETHER vec<T, 2>& thread_elements() {
        resolve();
        return elements;
    }
    EMULATED_INLINE EMULATED_TOGETHER const vec<T, 2>& thread_elements() const {
        resolve();
        return elements;
    }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Columns, int Rows>
EMULATED_INLINE simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
    simdgroup_matrix<T, Columns, Rows> matrix;
    matrix.elements[0] = matrix.elements[1] = value;
    return matrix;
}

// The index of element (row, column) of the matrix in memory.
EMULATED_INLINE ulong emulated_index(ulong row, ulong column, ulong stride, bool transposed) {
    return transposed ? column * stride + row : row * stride + column;
}

template <class T, class P>
EMULATED_INLINE EMULATED_TOGETHER void
simdgroup_load(thread simdgroup_matrix<T, 8, 8>& matrix, P from, ulong elements_per_row = 8,
               ulong2 origin = ulong2(0), bool transposed = false) {
    static_assert(is_same_v<emulated::element_of<P>, T>, "matrix and memory differ in type");
    const emulated::place at;
    from += origin.y * elements_per_row + origin.x;
    const auto memory = emulated::checked<T>(from, elements_per_row, transposed, false);
    matrix.pending = 0;
    for (int j = 0; j < 2; j++)
        matrix.elements[j] =
            memory[emulated_index(at.row, at.column + j, elements_per_row, transposed)];
}
template <class T, class P>
EMULATED_INLINE EMULATED_TOGETHER void
simdgroup_store(const thread simdgroup_matrix<T, 8, 8>& matrix, P to, ulong elements_per_row = 8,
                ulong2 origin = ulong2(0), bool transposed = false) {
    static_assert(is_same_v<emulated::element_of<P>, T>, "matrix and memory differ in type");
    const emulated::place at;
    to += origin.y * elements_per_row + origin.x;
    const auto memory = emulated::checked<T>(to, elements_per_row, transposed, true);
    matrix.resolve();
    for (int j = 0; j < 2; j++)
        memory[emulated_index(at.row, at.column + j, elements_per_row, transposed)] =
            matrix.elements[j];
}

template <class D, class A, class B, class C>
EMULATED_INLINE EMULATED_TOGETHER void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D, 8, 8>& d, const thread simdgroup_matrix<A, 8, 8>& a,
    const thread simdgroup_matrix<B, 8, 8>& b, const thread simdgroup_matrix<C, 8, 8>& c) {
    a.resolve();
    b.resolve();
    const bool chained = c.pending && is_same_v<C, float>;
    if (!chained) c.resolve();
    d.pending = emulated_multiply((float)a.elements[0], (float)a.elements[1], (float)b.elements[0],
                                  (float)b.elements[1], chained ? c.pending : 0,
                                  chained ? 0.0f : (float)c.elements[0],
                                  chained ? 0.0f : (float)c.elements[1], emulated::type_code<D>);
}
template <class D, class A, class B>
EMULATED_INLINE EMULATED_TOGETHER void
simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, const thread simdgroup_matrix<A, 8, 8>& a,
                   const thread simdgroup_matrix<B, 8, 8>& b) {
    simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)));
}

} // namespace metal
