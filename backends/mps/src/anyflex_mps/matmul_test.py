"""Self test of products on matrix units: those of a `forward_matmul` kernel, in its sizes.

Users of other projects report units that are right at some sizes and wrong at others.

All numbers are integers, so that no order of summation rounds, and sums need more bits than a
float16, bfloat16 or TF32 number has: units that keep fewer than float32's are found.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.plugin import Spec
from anyflex_mps.forward_matmul import ROWS, SIMDGROUPS, Products
from anyflex_mps.tensor_text import (
    INCLUDES,
    USING,
    declared_product,
    declared_rows,
    each_element,
)
from anyflex_mps.text import TYPES, Shader, fill, kernel_text

__all__ = ["broken_products", "matmul_test_shader"]

_THREADS = 32 * SIMDGROUPS
_START = 2**20 + 1
"""A sum that a product is added to."""

_KERNEL = """\
threadgroup $type a_rows[$a_size];
threadgroup $type bv_rows[$bv_size];
threadgroup $type p_rows[$p_size];
for (int i = (int)tid; i < $a_size; i += $threads)
  a_rows[i] = a[i];
for (int i = (int)tid; i < $b_size; i += $threads)
  bv_rows[i] = b[i];
for (int i = (int)tid; i < $p_size; i += $threads)
  p_rows[i] = p[i];
$tensors
threadgroup_barrier(mem_flags::mem_threadgroup);
auto s = multiply.get_destination_cooperative_tensor<
    decltype(left), decltype(turned), float>();
multiply.run(left, turned, s);
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int i = (int)tid; i < $v_size; i += $threads)
  bv_rows[i] = v[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
auto acc = add.get_destination_cooperative_tensor<
    decltype(weights), decltype(values), float>();
$start
add.run(weights, values, acc);
add.run(weights, values, acc);
$store_product
$store_sum
"""


def matmul_test_shader(dtype: torch.dtype, products: Products) -> Shader:
    """Return the kernel for a dtype, float16 or bfloat16; it runs in one threadgroup.

    Its buffers are the results, of float32, and the operands of the two products.
    """
    type_, (keys, depth, columns) = TYPES[dtype], products
    rows = {
        "left": ("a_rows", ROWS, depth),
        "turned": ("bv_rows", keys, depth),
        "weights": ("p_rows", ROWS, keys),
        "values": ("bv_rows", keys, columns),
    }
    tensors = [declared_rows(dtype, name, *given) for name, given in rows.items()]
    tensors.append(
        declared_product(
            "multiply",
            (ROWS, keys, depth),
            transposed=True,
            mode="multiply",
            simdgroups=SIMDGROUPS,
        )
    )
    tensors.append(
        declared_product(
            "add",
            (ROWS, columns, keys),
            transposed=False,
            mode="multiply_accumulate",
            simdgroups=SIMDGROUPS,
        )
    )
    body = fill(
        _KERNEL,
        type=type_,
        threads=_THREADS,
        a_size=ROWS * depth,
        b_size=keys * depth,
        bv_size=keys * max(depth, columns),
        p_size=ROWS * keys,
        v_size=keys * columns,
        tensors="\n".join(tensors),
        start=each_element("acc", "acc[i] = F[0];"),
        store_product=each_element("s", f"product[tile_row * {keys} + column] = s[i];"),
        store_sum=each_element("acc", f"sum[tile_row * {columns} + column] = acc[i];"),
    )
    buffers = ["device float* product", "device float* sum"]
    buffers += [f"device const {type_}* {name}" for name in ("a", "b", "p", "v")]
    spec = Spec("mps", "", dtype, 16, 16)
    return kernel_text("matmul_test", spec, buffers, USING, body, _THREADS, includes=INCLUDES)


def broken_products(
    kernel: Any, dtype: torch.dtype, device: torch.device, products: Products
) -> list[str]:
    """Run the kernel, and name what isn't as `forward_matmul` assumes.

    Args:
        kernel: compiled `matmul_test_shader`.
        dtype: of its operands.
        device: where tensors are.
        products: its sizes.
    """
    keys, depth, columns = products
    # Primes above the largest numbers of rows and columns; bfloat16 holds half of them exactly.
    a, b = _integers(ROWS, depth, 257), _integers(keys, depth, 263)
    p, v = _integers(ROWS, keys, 37), _integers(keys, columns, 269)
    product, sum_ = (
        torch.full((ROWS, width), float("nan"), dtype=torch.float32, device=device)
        for width in (keys, columns)
    )
    operands = [each.to(device, dtype) for each in (a, b, p, v)]
    kernel(
        product, sum_, *operands, [float(_START)],
        threads=[_THREADS, 1, 1], group_size=[_THREADS, 1, 1],
    )  # fmt: skip
    broken = []
    if not torch.equal(product.cpu(), a @ b.T):
        broken.append(f"a product of tensors, {ROWS} x {keys} of {depth}")
    if not torch.equal(sum_.cpu(), 2 * (p @ v) + _START):
        broken.append(f"a float32 sum of products of tensors, {ROWS} x {columns} of {keys}")
    return broken


def _integers(rows: int, columns: int, of: int) -> Tensor:
    """Return a matrix of integers whose rows and columns all differ, from -of/2 to of/2; `of` is a
    prime above the numbers of both."""
    # The user may have set torch's default dtype and device.
    i = torch.arange(rows, dtype=torch.float32, device="cpu")[:, None]
    j = torch.arange(columns, dtype=torch.float32, device="cpu")
    return (i * i * 5 + i * j * 3 + j * 7) % of - of // 2
