"""Entry kernels' parameters are those that `kernel_arguments` describes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from anyflex_triton import (
    backward,
    backward_keys,
    backward_queries,
    decode,
    forward,
    mask_refinement_kernels,
)
from anyflex_triton.kernel_arguments import ARGUMENTS, types_of

MODULES = (
    forward, decode, backward, backward_keys, backward_queries, mask_refinement_kernels,
)  # fmt: skip
ENTRIES: list[Any] = [
    kernel
    for module in MODULES
    for name, kernel in vars(module).items()
    if name.endswith("_kernel") and kernel.fn.__module__ == module.__name__
]


def test_every_parameter_of_an_entry_is_described_and_no_others_are() -> None:
    assert len(ENTRIES) == 10
    described = [name for each in ARGUMENTS for name in each.names]
    assert len(described) == len(set(described))
    taken = {name for kernel in ENTRIES for name in kernel.arg_names}
    assert taken == set(described)


@pytest.mark.parametrize("kernel", ENTRIES, ids=lambda kernel: kernel.__name__)
def test_an_entry_takes_its_arguments_in_the_order_of_their_description(kernel: Any) -> None:
    names = kernel.arg_names
    types = types_of(ARGUMENTS)
    constants = [name for name in names if name not in types]
    assert names[-len(constants) :] == constants, "constants come last"
    for each in ARGUMENTS:
        taken = [name for name in names if name in each.names]
        assert taken == [name for name in each.names if name in names]
