"""Text of products of tensors: ``matmul2d`` of Metal Performance Primitives, in Metal 4.

A result is a cooperative tensor. Apple chooses, by chip and system, which elements a thread holds,
so each element is asked where it lies; copies of a chip's layout would give wrong numbers on
another one, without an error.
"""

from __future__ import annotations

import torch

from anyflex_mps.text import TYPES, fill

__all__ = [
    "INCLUDES",
    "MULTIPLE",
    "USING",
    "declared_product",
    "declared_rows",
    "each_element",
]

INCLUDES = """\
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>"""
USING = "using namespace mpp::tensor_ops;\n"
MULTIPLE = 16
"""Sizes of products are multiples of it, as Metal demands."""

_ROWS = """\
tensor<threadgroup $type, dextents<int32_t, 2>, tensor_inline> $name(
    $memory, dextents<int32_t, 2>($columns, $rows));"""

_PRODUCT = """\
matmul2d<
    matmul2d_descriptor($m, $n, $k, false, $transposed, false,
        matmul2d_descriptor::mode::$mode),
    execution_simdgroups<$simdgroups>> $name;"""

_EACH = """\
#pragma clang loop unroll(full)
for (ushort i = 0; i < $name.get_capacity(); i++) {
  if ($name.is_valid_element(i)) {
    $place
    $body
  }
}"""


def declared_rows(dtype: torch.dtype, name: str, memory: str, rows: int, columns: int) -> str:
    """Return the statement that makes a tensor of rows in threadgroup memory, without gaps."""
    return fill(_ROWS, type=TYPES[dtype], name=name, memory=memory, rows=rows, columns=columns)


def declared_product(
    name: str, shape: tuple[int, int, int], *, transposed: bool, mode: str, simdgroups: int
) -> str:
    """Return the statement that makes a product of tensors, which a whole threadgroup runs.

    Args:
        shape: rows and columns of the result, and the inner size.
        transposed: whether the second operand is.
        mode: ``"multiply"`` or ``"multiply_accumulate"``.
        simdgroups: of the threadgroup.
    """
    m, n, k = shape
    return fill(
        _PRODUCT,
        m=m,
        n=n,
        k=k,
        transposed=str(transposed).lower(),
        mode=mode,
        simdgroups=simdgroups,
        name=name,
    )


def each_element(name: str, body: str) -> str:
    """Return the loop over this thread's elements of a cooperative tensor. It is unrolled, because
    the elements are registers.

    Args:
        body: statements about ``<name>[i]``, which lies in ``column`` of row ``tile_row``.
    """
    axes = {"column": 0, "tile_row": 1}
    lines = [f"const int {axis} = place[{at}];" for axis, at in axes.items() if axis in body]
    if lines:
        lines.insert(0, f"const auto place = {name}.get_multidimensional_index(i);")
    return fill(_EACH, name=name, place="\n".join(lines), body=body)
