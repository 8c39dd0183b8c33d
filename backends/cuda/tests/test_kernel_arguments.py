"""Entry kernels' parameters are those that `kernel_arguments` describes, here or in
`anyflex_triton`."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from anyflex_cuda import (
    backward_rows,
    blackwell_forward,
    decode_steps,
    decode_sums,
    hopper_backward,
    hopper_decode,
    hopper_forward,
    hopper_wide_backward,
    packed_steps,
    packed_tile_list,
)
from anyflex_cuda.kernel_arguments import ARGUMENTS
from anyflex_triton import kernel_arguments as portable

MODULES = (
    hopper_forward, blackwell_forward, hopper_backward, hopper_wide_backward, hopper_decode,
    backward_rows, decode_steps, decode_sums, packed_steps, packed_tile_list,
)  # fmt: skip
ENTRIES: list[Any] = [
    kernel
    for module in MODULES
    for name, kernel in vars(module).items()
    if name.endswith("_kernel") and kernel.fn.__module__ == module.__name__
]


def test_every_parameter_of_an_entry_is_described_and_no_others_are() -> None:
    assert len(ENTRIES) >= 10
    ours = [name for each in ARGUMENTS for name in each.names]
    assert len(ours) == len(set(ours))
    known = {name for each in portable.ARGUMENTS for name in each.names}
    taken = {name for kernel in ENTRIES for name in kernel.arg_names}
    assert set(ours) <= taken <= known | set(ours)


@pytest.mark.parametrize("kernel", ENTRIES, ids=lambda kernel: kernel.fn.__module__)
def test_an_entry_takes_its_arguments_in_the_order_of_their_description(kernel: Any) -> None:
    names = kernel.arg_names
    for each in (*portable.ARGUMENTS, *ARGUMENTS):
        taken = [name for name in names if name in each.names]
        assert taken == [name for name in each.names if name in names]
