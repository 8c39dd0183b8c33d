"""Dropout: every level keeps the pairs that the reference keeps, whatever threads and tiles do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import anyflex

pytestmark = pytest.mark.usefixtures("level", "threads")

SHAPES = {"prefill": (150, 700), "decode": (3, 1500), "one row": (1, 70)}


def kept_pairs(length: int, keys: int, dtype: torch.dtype, backend: str) -> Tensor:
    """Bool [2, 4, length, keys]: with equal scores and one value a key, out has a number other
    than 0 in the columns of the pairs that are kept."""
    query = torch.zeros(2, 4, length, 8, dtype=dtype)
    key = torch.randn(2, 2, keys, 8, dtype=dtype)
    found = []
    for first in range(0, keys, 256):
        value = torch.eye(keys, dtype=dtype)[:, first : first + 256].expand(2, 2, -1, -1)
        torch.manual_seed(11)
        out = anyflex.flex_attention(
            query, key, value, enable_gqa=True, dropout_p=0.3, backend=backend
        )
        found.append(out != 0)
    return torch.cat(found, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_same_pairs_are_kept(shape: tuple[int, int], dtype: torch.dtype) -> None:
    kept = kept_pairs(*shape, dtype, "reference")
    assert 0.65 < kept.double().mean() < 0.75
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(kept_pairs(*shape, dtype, "cpu"), kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_non_finite_gradients_arrive_at_kept_pairs_alone(dtype: torch.dtype) -> None:
    tensors = [torch.randn(1, 2, 150, 16, dtype=dtype).requires_grad_() for _ in "qkv"]
    dout = torch.randn(1, 2, 150, 16, dtype=dtype)
    dout[0, 0, 5, 3] = torch.inf
    dout[0, 1, 140, 2] = torch.nan
    found = {}
    for backend in ("reference", "cpu"):
        torch.manual_seed(12)
        out = anyflex.flex_attention(*tensors, dropout_p=0.5, backend=backend)
        found[backend] = torch.autograd.grad(out, tensors, dout)
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    for one, other in zip(*found.values(), strict=True):
        finite = one.isfinite()
        assert torch.equal(other.isfinite(), finite)
        torch.testing.assert_close(other[finite], one[finite], rtol=tolerance, atol=tolerance)
    (*_, dv), (*_, other) = found.values()
    assert torch.equal(dv.isinf(), other.isinf())
    assert torch.equal(dv.isnan(), other.isnan())
    assert 10 < dv[0, 0].isinf().sum() < 140  # of 150 keys, those that row 5 keeps
    assert 10 < dv[0, 1].isnan().sum() < 140
