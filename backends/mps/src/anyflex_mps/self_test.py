"""Self test: whether the GPU and its compiler keep what the kernels assume and Apple nowhere says.

No test of the project has run on an Apple GPU. A wrong assumption would give wrong numbers without
an error; so the first compile for a dtype runs a small kernel, and compares.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from anyflex.plugin import AnyflexError, ArgumentError, BackendRefused, Spec, free_in_child
from anyflex_mps.forward_matmul import Products
from anyflex_mps.matmul_test import broken_products, matmul_test_shader
from anyflex_mps.shaders import CompileShader, Shaders
from anyflex_mps.targets import machine
from anyflex_mps.text import LANE_OF_COLUMN, PLACE_OF_LANE, TYPES, Shader, fill, kernel_text

__all__ = ["SelfTest", "broken_assumptions", "self_test_shader"]

_LANES = 32
_HIGH, _LOW = 300, 7
"""Parts of an integer that int32 doesn't hold."""
_FACTOR = 1 + 2.0**-12
_PRODUCT = 1 + 2.0**-11
"""float32's square of `_FACTOR`: a multiplication that isn't rounded by itself differs from it."""
_FLOATS = (0.5, float("inf"), float("nan"), _FACTOR, _PRODUCT)
"""Numbers that come from memory, so that no compiler computes with them."""

_KERNEL = """\
threadgroup $type index_rows[64];
threadgroup $type b_rows[64];
for (int i = 0; i < 2; i++) {
  index_rows[2 * lane + i] = given[2 * lane + i];
  b_rows[2 * lane + i] = given[128 + 2 * lane + i];
}
threadgroup_barrier(mem_flags::mem_threadgroup);
$place_of_lane
simdgroup_matrix<$type, 8, 8> index;
simdgroup_load(index, index_rows, 8);
simdgroup_matrix<$type, 8, 8> turned;
simdgroup_load(turned, index_rows, 8, ulong2(0), true);
simdgroup_matrix<$type, 8, 8> a;
for (int i = 0; i < 2; i++)
  a.thread_elements()[i] = given[64 + r * 8 + c + i];
simdgroup_matrix<$type, 8, 8> b;
simdgroup_load(b, b_rows, 8, ulong2(0), true);
simdgroup_matrix<float, 8, 8> s = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
simdgroup_multiply_accumulate(s, a, b, s);
float high = -INFINITY;
for (int i = 0; i < 2; i++) {
  const int at = r * 8 + c + i;
  out[at] = (float)index.thread_elements()[i];
  out[64 + at] = (float)turned.thread_elements()[i];
  out[128 + at] = s.thread_elements()[i];
  high = max(high, (float)a.thread_elements()[i]);
}
high = max(high, simd_shuffle_xor(high, (ushort)1));
high = max(high, simd_shuffle_xor(high, (ushort)8));
float sum = 0.0f;
for (int j = 0; j < 8; j++) {
  const float x = (float)a.thread_elements()[j % 2];
  sum += (float)(j + 1) * simd_shuffle(x, $lane_of_column);
}
if (c == 0) {
  out[192 + r] = high;
  out[200 + r] = sum;
}
if (lane == 0) {
  const float infinity = F[1];
  const float nan = F[2];
  const float product = F[3] * F[3];
  out[208] = (float)(int)(P[0] >> 32);
  out[209] = (float)(int)(P[0] & 255L);
  out[210] = F[0];
  out[211] = isnan(infinity - infinity) && isnan(nan) && !isfinite(infinity) ? 1.0f : 0.0f;
  out[212] = nan < 1.0f || nan >= 1.0f || nan == nan ? 1.0f : 0.0f;
  out[213] = F[3] * F[3] - F[4];
  out[214] = product - F[4];
  out[215] = fast::exp2(-infinity);
  out[216] = fast::exp2(F[0] - F[0]);
  out[217] = isnan(fast::exp2(nan)) ? 1.0f : 0.0f;
}
"""
_RESULTS = 218


def self_test_shader(dtype: torch.dtype) -> Shader:
    """Return the kernel for a dtype; its threadgroup is one simdgroup.

    Its buffers are out, of float32; and three matrices of the dtype: indices, and the factors of a
    product, the second transposed.
    """
    type_ = TYPES[dtype]
    body = fill(_KERNEL, type=type_, place_of_lane=PLACE_OF_LANE, lane_of_column=LANE_OF_COLUMN)
    spec = Spec("mps", "", dtype, 8, 8)
    buffers = ["device float* out", f"device const {type_}* given"]
    return kernel_text("self_test", spec, buffers, "", body, _LANES)


def broken_assumptions(kernel: Any, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Run the kernel, and name what isn't as kernels assume.

    Args:
        kernel: compiled `self_test_shader`.
        dtype: of its matrices.
        device: where tensors are.
    """
    # The user may have set torch's default dtype and device.
    index = torch.arange(64, dtype=torch.float32, device="cpu").view(8, 8)
    # Integers: no order of summation rounds.
    a = (index * 5 + 2) % 7 - 3
    b = (index * 3 + index.T) % 5 - 2
    given = torch.cat([index.flatten(), a.flatten(), b.T.flatten()]).to(device, dtype)
    out = torch.full((_RESULTS,), -1.0, dtype=torch.float32, device=device)
    numbers = [(_HIGH << 32) + _LOW]
    kernel(out, given, numbers, list(_FLOATS), threads=[_LANES, 1, 1], group_size=[_LANES, 1, 1])
    found = out.cpu()
    columns = index[0] + 1
    expected = {
        "the lanes of an 8x8 matrix": (0, index),
        "the lanes of a transposed 8x8 matrix": (64, index.T),
        "a product of 8x8 matrices": (128, a @ b + 1),
        "the largest element of a row": (192, a.amax(1)),
        "elements of other lanes": (200, a @ columns),
        "integers and floats of a call": (208, _floats(_HIGH, _LOW, _FLOATS[0])),
        "infinities and NaN": (211, _floats(1.0)),
        "comparisons with NaN": (212, _floats(0.0)),
        "separate rounding of products and sums": (213, _floats(0.0, 0.0)),
        "fast::exp2 of -inf and 0": (215, _floats(0.0, 1.0)),
        "fast::exp2 of NaN": (217, _floats(1.0)),
    }
    broken = [name for name, (at, values) in expected.items() if not _equal(found, at, values)]
    if kernel.thread_execution_width != _LANES:
        broken.append(f"{_LANES} lanes in a simdgroup")
    return broken


def _floats(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


def _equal(found: Tensor, at: int, values: Tensor) -> bool:
    return torch.equal(found[at : at + values.numel()], values.flatten().float())


class SelfTest:
    """Runs the test once for each dtype, and that of matrix units for each of their products.

    Args:
        compile_shader: what compiles Metal source.
        device: where tensors are.
    """

    def __init__(self, compile_shader: CompileShader, device: torch.device) -> None:
        self._shaders = Shaders(compile_shader)
        self._device = device
        self._refusals: dict[tuple[torch.dtype, Products | None], str | None] = {}
        self._lock = threading.Lock()
        free_in_child(self, "_lock")

    def check(self, dtype: torch.dtype) -> None:
        """Raise BackendRefused where kernels for a dtype would compute wrong numbers, or where
        that can't be found out; only the former is remembered."""
        self._check(dtype, None, BackendRefused)

    def check_matrix_units(self, dtype: torch.dtype, products: Products) -> None:
        """Do the same for kernels of the option ``mpp`` that have such products, but raise
        ArgumentError: the call can be computed without it."""
        self._check(dtype, products, ArgumentError)

    def _check(
        self, dtype: torch.dtype, products: Products | None, error: type[AnyflexError]
    ) -> None:
        key = dtype, products
        with self._lock:
            if key not in self._refusals:
                try:
                    broken = self._broken(dtype, products)
                except RuntimeError as failure:
                    message = " ".join(str(failure).split())
                    raise error(_report(dtype, products, message)) from failure
                problem = "not as kernels assume, which would compute wrong numbers: "
                problem += "; ".join(broken)
                self._refusals[key] = _report(dtype, products, problem) if broken else None
            refusal = self._refusals[key]
        if refusal is not None:
            raise error(refusal)

    def _broken(self, dtype: torch.dtype, products: Products | None) -> list[str]:
        if products is None:
            kernel = self._shaders.kernel(self_test_shader(dtype))
            return broken_assumptions(kernel, dtype, self._device)
        kernel = self._shaders.kernel(matmul_test_shader(dtype, products))
        return broken_products(kernel, dtype, self._device, products)


def _report(dtype: torch.dtype, products: Products | None, problem: str) -> str:
    name = str(dtype).removeprefix("torch.")
    if products is None:
        return (
            f"anyflex-mps's self test of {name} fails on this machine ({machine()}): {problem}. "
            "Please report this line, and use backend='reference' meanwhile"
        )
    return (
        f"kernel_options['mps']: anyflex-mps's self test of mpp with {name} fails on this "
        f"machine ({machine()}): {problem}. mpp needs macOS 26.2 or newer: if this is one, "
        "please report this line, and leave mpp out meanwhile"
    )
