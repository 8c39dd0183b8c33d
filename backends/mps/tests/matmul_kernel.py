"""Tiled matrix product on simdgroup matrices: the kernel that faults are seeded in."""

from __future__ import annotations

import torch
from emulator import compile_shader

__all__ = ["BARRIER", "MATMUL", "largest_error", "run_matmul", "seeded"]

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

MATMUL = f"""
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)

kernel void matmul(
    device const half* A [[buffer(0)]], device const half* B [[buffer(1)]],
    device float* C [[buffer(2)]], constant int* P [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]])
{{
  threadgroup half As[512];
  threadgroup half Bs[512];
  const uint N = (uint)P[1];
  const uint K = (uint)P[2];
  const uint row0 = group.y * 32;
  const uint column0 = group.x * 32;
  const uint row = sg / 2 * 16;
  const uint column = sg % 2 * 16;
  simdgroup_matrix<float, 8, 8> sums[4];
  for (int i = 0; i < 4; i++) sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  // begin
  for (uint k0 = 0; k0 < K; k0 += 16) {{
    for (uint i = tid; i < 512; i += 128) As[i] = A[(row0 + i / 16) * K + k0 + i % 16];
    for (uint i = tid; i < 512; i += 128) Bs[i] = B[(k0 + i / 32) * N + column0 + i % 32];
    {BARRIER} // loaded
    for (int k = 0; k < 16; k += 8) {{
      for (int i = 0; i < 4; i++) {{
        simdgroup_matrix<half, 8, 8> a;
        simdgroup_matrix<half, 8, 8> b;
        simdgroup_load(a, As + (row + (uint)i / 2 * 8) * 16 + k, 16);
        simdgroup_load(b, Bs + k * 32 + column + (uint)i % 2 * 8, 32);
        simdgroup_multiply_accumulate(sums[i], a, b, sums[i]);
      }}
    }}
    {BARRIER} // used
  }}
  for (int i = 0; i < 4; i++)
    simdgroup_store(
        sums[i], C + (row0 + row + i / 2 * 8) * N + column0 + column + i % 2 * 8, N);
}}
"""

M, N, K = 64, 96, 80


def seeded(old: str, new: str, source: str = MATMUL) -> str:
    """Return a source with one place changed, which must be there once."""
    assert source.count(old) == 1, old
    return source.replace(old, new)


def run_matmul(source: str = MATMUL, **how: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kernel's product of fixed random matrices, and that of float64."""
    random = torch.Generator().manual_seed(0)
    a = torch.randn(M, K, generator=random).half()
    b = torch.randn(K, N, generator=random).half()
    c = torch.full((M, N), float("nan"))
    library = compile_shader(source, **how)  # type: ignore[arg-type]
    library.matmul(
        a, b, c, [M, N, K], arg_casts={3: "int32"}, threads=[N // 32 * 128, M // 32],
        group_size=[128, 1],
    )  # fmt: skip
    return c, a.double() @ b.double()


def largest_error(source: str = MATMUL, **how: object) -> float:
    """Return the largest error of the kernel's product, infinite where one is NaN."""
    c, expected = run_matmul(source, **how)
    error = (c - expected).abs().max().item()
    return error if error == error else float("inf")
