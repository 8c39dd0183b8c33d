"""Synchronisation on a GPU: no call makes the host wait for the device, whichever kernel takes it,
once a mask has its derived views."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import anyflex

__all__: list[str] = []

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device on this machine"
)

KEYS = 1200


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """torch raises where it would wait."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def documents(device: str) -> Tensor:
    return (torch.arange(KEYS, device=device) // 170).to(torch.int32)


def mask_named(name: str, rows: int) -> anyflex.BlockMask | None:
    if name == "no mask":
        return None
    ids = documents("cuda")
    past = KEYS - rows

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q + past >= k

    def packed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (ids[q + past] == ids[k]) & (q + past >= k)

    mod = causal if name == "causal" else packed
    return anyflex.create_block_mask(mod, None, None, rows, KEYS, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", ["no mask", "causal", "documents"])
@pytest.mark.parametrize(
    ("rows", "dim"), [(1, 128), (40, 64), (KEYS, 64), (KEYS, 128), (KEYS, 256)], ids=str
)
def test_no_call_waits(
    rows: int, dim: int, name: str, dtype: torch.dtype, no_waiting: None
) -> None:
    q = torch.randn(2, 8, rows, dim, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(2, 2, KEYS, dim, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(2)
    )
    slopes = torch.rand(8, device="cuda", requires_grad=True)
    mask = mask_named(name, rows)

    def alibi(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return s + slopes[h] * (k_idx - q_idx)

    for mod in (None, alibi):
        for again in (False, True):
            if again:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            with torch.no_grad():
                anyflex.flex_attention(q, k, v, mod, mask, enable_gqa=True)
            out, aux = anyflex.flex_attention(
                q, k, v, mod, mask, enable_gqa=True, return_aux=anyflex.AuxRequest(lse=True)
            )
            assert aux.lse is not None
            (out.float().sum() + aux.lse.sum()).backward()
            torch.cuda.set_sync_debug_mode("default")
