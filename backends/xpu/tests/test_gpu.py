"""Results on an Intel GPU, for owners of one. Elsewhere the tests are skipped, with the reason."""

from __future__ import annotations

import pytest
import torch

import anyflex
from anyflex.testing import Conformance

pytestmark = pytest.mark.xpu


class TestConformance(Conformance):
    """The quick subset; `anyflex conformance --backend xpu --require all` runs everything."""

    backend = "xpu"
    require = ("forward", "backward", "decode")
    quick = True


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_call_on_the_device_is_computed_by_this_backend(dtype: torch.dtype) -> None:
    query = torch.randn(1, 4, 300, 64, dtype=dtype, device="xpu", requires_grad=True)
    key, value = (torch.randn(1, 2, 500, 64, dtype=dtype, device="xpu") for _ in range(2))
    found = anyflex.explain(query, key, value, enable_gqa=True)
    assert found.to_dict()["backend"] == "xpu"
    out = anyflex.flex_attention(query, key, value, enable_gqa=True)
    (dq,) = torch.autograd.grad(out.sum(), query)
    exact = query.detach().cpu().double().requires_grad_()
    keys, values = (each.cpu().double().repeat_interleave(2, 1) for each in (key, value))
    right = torch.softmax(exact @ keys.mT / 8, dim=-1) @ values
    (wanted,) = torch.autograd.grad(right.sum(), exact)
    tolerance = {"rtol": 0, "atol": 1e-4 if dtype is torch.float32 else 4e-2}
    torch.testing.assert_close(out.detach().cpu().double(), right.detach(), **tolerance)
    torch.testing.assert_close(dq.cpu().double(), wanted, **tolerance)


def test_products_of_float32_are_not_rounded_to_tf32() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 1, 256, 64, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    right = torch.softmax(query @ key.mT / 8, dim=-1) @ value
    out = anyflex.flex_attention(*(each.float().to("xpu") for each in (query, key, value)))
    # tf32 keeps 10 bits of mantissa, and would err by 1e-3 here.
    torch.testing.assert_close(out.cpu().double(), right, rtol=0, atol=2e-5)
