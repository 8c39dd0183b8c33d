// Metal's keywords, scalar types and constants as C++20 for clang. No standard header is included:
// the compile time of a kernel is mostly the parsing of what is included.
#pragma once

#define __METAL__ 1
#define __METAL_VERSION__ 310

// Real address spaces: mixing pointers of two of them is a compile error.
#define EMULATED_DEVICE __attribute__((address_space(1)))
#define EMULATED_CONSTANT const __attribute__((address_space(2)))
#define EMULATED_THREADGROUP __attribute__((address_space(3)))
#ifndef EMULATED_RACES
#define device EMULATED_DEVICE
#define constant EMULATED_CONSTANT
#define threadgroup EMULATED_THREADGROUP
#else
// LLVM's thread sanitizer pass skips pointers into other address spaces.
#define device
#define constant const
#define threadgroup
#endif
#define thread
#define kernel
#define METAL_FUNC inline __attribute__((always_inline))

// Memory of the runtime: the sanitizer pass leaves other address spaces alone.
#ifndef EMULATED_RUNTIME
#define EMULATED_OWN __attribute__((address_space(9)))
#else
#define EMULATED_OWN
#endif

#define EMULATED_INLINE inline __attribute__((always_inline))
// A call that all lanes of a simdgroup make together must not become control dependent.
#define EMULATED_TOGETHER __attribute__((convergent))
// Shim code that the race build must not check.
#define EMULATED_UNCHECKED __attribute__((noinline, disable_sanitizer_instrumentation))

typedef _Float16 half;
typedef __bf16 bfloat;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT 3.40282347e38f
#define FLT_MAX 3.40282347e38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.19209290e-7f
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define LONG_MIN (-9223372036854775807l - 1)
#define M_LOG2E_F 1.44269504f
#define M_LN2_F 0.69314718f
#define M_LN10_F 2.30258509f
#define M_PI_F 3.14159265f
#define M_PI_2_F 1.57079633f
#define M_1_PI_F 0.31830989f
#define M_2_SQRTPI_F 1.12837917f
#define M_SQRT2_F 1.41421356f
#define M_SQRT1_2_F 0.70710678f
