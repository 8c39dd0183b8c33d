"""Packed sequences are left to the portable kernels' own backend."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch

from anyflex.plugin import Spec
from anyflex_cuda.backend import CudaBackend
from anyflex_triton import TritonBackend


@pytest.mark.parametrize("kv_layout", ["packed", "paged"])
def test_the_portable_backend_alone_takes_packed_calls(kv_layout: str) -> None:
    page_size = 16 if kv_layout == "paged" else 0
    spec = Spec(
        "cuda",
        "sm_90",
        torch.bfloat16,
        64,
        64,
        q_layout="packed",
        kv_layout=kv_layout,  # type: ignore[arg-type]
        page_size=page_size,
    )
    assert spec.unsupported_by(TritonBackend.capabilities) is None
    refusal = spec.unsupported_by(CudaBackend.capabilities)
    assert refusal == "a call of packed sequences is not supported"
