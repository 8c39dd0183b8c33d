"""Product of two matrices on Metal 4's tensors, and compilers that shuffle its results' places."""

from __future__ import annotations

import random
from typing import Any

import torch
from emulator import compile_shader

__all__ = ["BARRIER", "TENSORS", "largest_error", "run_tensors", "shuffled"]

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

TENSORS = f"""
#include <metal_stdlib>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)

kernel void product(
    device const half* A [[buffer(0)]], device const half* B [[buffer(1)]],
    device float* C [[buffer(2)]], uint tid [[thread_index_in_threadgroup]])
{{
  threadgroup half a_rows[512];
  threadgroup half b_rows[768];
  tensor<threadgroup half, dextents<int32_t, 2>, tensor_inline> a(
      a_rows, dextents<int32_t, 2>(16, 32));
  tensor<threadgroup half, dextents<int32_t, 2>, tensor_inline> b(
      b_rows, dextents<int32_t, 2>(16, 48));
  matmul2d<
      matmul2d_descriptor(32, 48, 16, false, true, false,
          matmul2d_descriptor::mode::multiply_accumulate),
      execution_simdgroups<4>> product;
  auto sums = product.get_destination_cooperative_tensor<decltype(a), decltype(b), float>();
  for (ushort i = 0; i < sums.get_capacity(); i++) sums[i] = 0.0f; // zeros
  for (int k = 0; k < 48; k += 16) {{
    {BARRIER} // used
    for (uint i = tid; i < 512; i += 128) a_rows[i] = A[i / 16 * 48 + k + i % 16];
    for (uint i = tid; i < 768; i += 128) b_rows[i] = B[i / 16 * 48 + k + i % 16];
    {BARRIER} // loaded
    product.run(a, b, sums);
  }}
  for (ushort i = 0; i < sums.get_capacity(); i++) {{
    if (!sums.is_valid_element(i)) continue;
    const auto at = sums.get_multidimensional_index(i);
    C[at[1] * 48 + at[0]] = sums[i];
  }}
}}
"""


def shuffled(source: str, seed: int | None = None, **how: Any) -> Any:
    """Compile a source, its cooperative tensors laid out as `seed` says, or at random."""
    if seed is None:
        # Few, so that libraries are kept; a test that fails shows which.
        seed = random.SystemRandom().randrange(16)
        print(f"layout of cooperative tensors: {seed}")
    text = f"#define EMULATED_TENSOR_LAYOUT {seed}u\n#line 1\n{source}"
    return compile_shader(text, **how)


def run_tensors(
    source: str = TENSORS, seed: int | None = None, threads: int = 128, **how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kernel's product of fixed random matrices, and that of float64."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 48, generator=generator).half() for rows in (32, 48))
    c = torch.full((32, 48), float("nan"))
    shuffled(source, seed, **how).product(a, b, c, threads=threads, group_size=threads)
    return c, a.double() @ b.double().T


def largest_error(source: str = TENSORS, seed: int | None = None, **how: Any) -> float:
    """Return the largest error of the kernel's product, infinite where one is NaN."""
    c, expected = run_tensors(source, seed, **how)
    error = (c - expected).abs().max().item()
    return error if error == error else float("inf")
