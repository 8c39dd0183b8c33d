"""Products of float32 are rounded to TF32 where torch allows it, and only there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.testing.float32_precision import products_in

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device on this machine"
)


def results(packed: Tensor, backend: str, mask: anyflex.BlockMask) -> tuple[Tensor, ...]:
    """Out, and the gradient of query, key and value, which are packed."""
    packed = packed.clone().requires_grad_()
    out = anyflex.flex_attention(*packed, block_mask=mask, backend=backend)
    assert isinstance(out, Tensor)
    (grad,) = torch.autograd.grad(out, packed, packed.detach()[0])
    return out, grad


def by_torch(packed: Tensor) -> tuple[Tensor, ...]:
    """The same in float64."""
    packed = packed.double().requires_grad_()
    out = torch.nn.functional.scaled_dot_product_attention(*packed, is_causal=True)
    (grad,) = torch.autograd.grad(out, packed, packed.detach()[0])
    return out, grad


@pytest.fixture
def own_setting() -> Iterator[None]:
    """Restore CUDA's own setting to that of a new process."""
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.mark.parametrize("backend", ["cuda", "cuda.triton"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_the_error_is_that_of_the_type(
    backend: str, head_dim: int, own_setting: Iterator[None]
) -> None:
    torch.manual_seed(head_dim)
    packed = torch.randn(3, 2, 4, 500, head_dim, device="cuda")
    mask = anyflex.create_block_mask(
        lambda b, h, q, k: q >= k, None, None, 500, 500, device="cuda"
    )
    right = by_torch(packed)
    # Twice, because kernels for one setting must not serve another.
    for _ in range(2):
        for precision, least, most in (("highest", 0.0, 2e-5), ("high", 5e-5, 1e-2)):
            with products_in(precision):
                found = results(packed, backend, mask)
            for name, one, wanted in zip(("out", "grad"), found, right, strict=True):
                error = ((one - wanted).abs().max() / wanted.abs().max()).item()
                assert least <= error <= most, (name, precision)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    for one, wanted in zip(results(packed, backend, mask), right, strict=True):
        assert (one - wanted).abs().max() > 5e-5 * wanted.abs().max()


def test_decoding_rounds_them_too() -> None:
    torch.manual_seed(1)
    query = torch.randn(2, 8, 1, 128, device="cuda")
    key, value = torch.randn(2, 2, 2, 3000, 128, device="cuda").unbind(0)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(t.double() for t in (query, key, value)), enable_gqa=True
    )
    errors = []
    for precision in ("highest", "high"):
        with products_in(precision):
            out = anyflex.flex_attention(query, key, value, enable_gqa=True)
        assert isinstance(out, Tensor)
        errors.append((out - wanted).abs().max().item() / wanted.abs().max().item())
    assert errors[0] < 2e-5 < errors[1] < 1e-2
