"""Which packed calls take Hopper's own kernels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from recording import OnHopper, recording

import anyflex
from anyflex.plugin import isolated, register
from anyflex_cuda.packed_forward_call import PackedForward


def kernel_of(page: int, dtype: torch.dtype = torch.bfloat16, dims: int = 64) -> str:
    """Return the portable kernels' description of a call of sequences of 200 rows, or nothing
    where Hopper's kernel takes it."""
    taken: list[Any] = []
    rows = torch.tensor([0, *itertools.accumulate([200, 1])], dtype=torch.int32)
    q = torch.zeros(201, 4, dims, dtype=dtype)
    if page:
        table = torch.arange(2 * -(-200 // page), dtype=torch.int32).view(2, -1)
        k = torch.zeros(table.numel(), 2, page, dims, dtype=dtype)
        lengths = torch.tensor([200, 1], dtype=torch.int32)
        packed = anyflex.Packed(rows, lengths, page_table=table)
    else:
        k = torch.zeros(201, 2, dims, dtype=dtype)
        packed = anyflex.Packed(rows)
    with isolated(), pytest.MonkeyPatch.context() as patch:
        register("cuda", OnHopper)
        launch = PackedForward.launch

        def note(self: PackedForward, *given: Any) -> None:
            taken.append(self.describe())
            launch(self, *given)

        patch.setattr(PackedForward, "launch", note)
        with recording() as launched:
            anyflex.flex_attention_packed(q, k, k, packed.begin(), enable_gqa=True, backend="cuda")
    (program, _, _), *_ = launched
    return taken[0] if taken else program.function.__name__


@pytest.mark.parametrize("page", [0, 16, 48, 64, 128, 256])
def test_pages_of_whole_sixteenths_are_hopper_s(page: int) -> None:
    assert kernel_of(page) == "hopper packed 128x128"


def test_other_packed_calls_are_the_portable_kernels() -> None:
    assert kernel_of(8) == kernel_of(24) == kernel_of(0, torch.float32) == "forward_kernel"
    assert kernel_of(64, dims=68) == "forward_kernel"
