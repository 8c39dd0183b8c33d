// Vector types: clang's extended vectors, which have Metal's swizzles.
#pragma once
#include "language.h"

namespace emulated {

template <class T> struct element {
    typedef T type;
    static constexpr int count = 1;
};

} // namespace emulated

#define EMULATED_VECTOR(T, N)                                                                     \
    typedef T T##N __attribute__((ext_vector_type(N)));                                           \
    template <> struct emulated::element<T##N> {                                                  \
        typedef T type;                                                                           \
        static constexpr int count = N;                                                           \
    };
#define EMULATED_VECTORS(T)                                                                       \
    EMULATED_VECTOR(T, 2)                                                                         \
    EMULATED_VECTOR(T, 3)                                                                         \
    EMULATED_VECTOR(T, 4)
EMULATED_VECTORS(float)
EMULATED_VECTORS(half)
EMULATED_VECTORS(bfloat)
EMULATED_VECTORS(char)
EMULATED_VECTORS(uchar)
EMULATED_VECTORS(short)
EMULATED_VECTORS(ushort)
EMULATED_VECTORS(int)
EMULATED_VECTORS(uint)
EMULATED_VECTORS(long)
EMULATED_VECTORS(ulong)
EMULATED_VECTORS(bool)
#undef EMULATED_VECTORS
#undef EMULATED_VECTOR

namespace emulated {

template <class V, class A> constexpr void put(V& v, int& k, const A& a) {
    typedef typename element<V>::type T;
    if constexpr (element<A>::count == 1)
        v[k++] = (T)a;
    else
        for (int i = 0; i < element<A>::count; i++) v[k++] = (T)a[i];
}

// float4(x), float4(xy, z, w) and so on.
template <class V, class... A> constexpr V make_vector(A... a) {
    V v{};
    int k = 0;
    (put(v, k, a), ...);
    if constexpr (sizeof...(A) == 1)
        if (k == 1)
            for (int i = 1; i < element<V>::count; i++) v[i] = v[0];
    return v;
}

} // namespace emulated

// A call needs parentheses, so the names remain types elsewhere.
#define float2(...) emulated::make_vector<float2>(__VA_ARGS__)
#define float3(...) emulated::make_vector<float3>(__VA_ARGS__)
#define float4(...) emulated::make_vector<float4>(__VA_ARGS__)
#define half2(...) emulated::make_vector<half2>(__VA_ARGS__)
#define half3(...) emulated::make_vector<half3>(__VA_ARGS__)
#define half4(...) emulated::make_vector<half4>(__VA_ARGS__)
#define bfloat2(...) emulated::make_vector<bfloat2>(__VA_ARGS__)
#define bfloat3(...) emulated::make_vector<bfloat3>(__VA_ARGS__)
#define bfloat4(...) emulated::make_vector<bfloat4>(__VA_ARGS__)
#define char2(...) emulated::make_vector<char2>(__VA_ARGS__)
#define char3(...) emulated::make_vector<char3>(__VA_ARGS__)
#define char4(...) emulated::make_vector<char4>(__VA_ARGS__)
#define uchar2(...) emulated::make_vector<uchar2>(__VA_ARGS__)
#define uchar3(...) emulated::make_vector<uchar3>(__VA_ARGS__)
#define uchar4(...) emulated::make_vector<uchar4>(__VA_ARGS__)
#define short2(...) emulated::make_vector<short2>(__VA_ARGS__)
#define short3(...) emulated::make_vector<short3>(__VA_ARGS__)
#define short4(...) emulated::make_vector<short4>(__VA_ARGS__)
#define ushort2(...) emulated::make_vector<ushort2>(__VA_ARGS__)
#define ushort3(...) emulated::make_vector<ushort3>(__VA_ARGS__)
#define ushort4(...) emulated::make_vector<ushort4>(__VA_ARGS__)
#define int2(...) emulated::make_vector<int2>(__VA_ARGS__)
#define int3(...) emulated::make_vector<int3>(__VA_ARGS__)
#define int4(...) emulated::make_vector<int4>(__VA_ARGS__)
#define uint2(...) emulated::make_vector<uint2>(__VA_ARGS__)
#define uint3(...) emulated::make_vector<uint3>(__VA_ARGS__)
#define uint4(...) emulated::make_vector<uint4>(__VA_ARGS__)
#define long2(...) emulated::make_vector<long2>(__VA_ARGS__)
#define long3(...) emulated::make_vector<long3>(__VA_ARGS__)
#define long4(...) emulated::make_vector<long4>(__VA_ARGS__)
#define ulong2(...) emulated::make_vector<ulong2>(__VA_ARGS__)
#define ulong3(...) emulated::make_vector<ulong3>(__VA_ARGS__)
#define ulong4(...) emulated::make_vector<ulong4>(__VA_ARGS__)
#define bool2(...) emulated::make_vector<bool2>(__VA_ARGS__)
#define bool3(...) emulated::make_vector<bool3>(__VA_ARGS__)
#define bool4(...) emulated::make_vector<bool4>(__VA_ARGS__)
