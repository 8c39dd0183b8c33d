"""Results on an Apple GPU, for owners of a Mac; skipped elsewhere, with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex import masks
from anyflex.plugin import ArgumentError
from anyflex.testing import Conformance

pytestmark = pytest.mark.mps

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class TestConformance(Conformance):
    """The quick subset; `anyflex conformance --backend mps --require all` runs everything."""

    backend = "mps"
    require = ("forward", "backward", "decode")
    quick = True


def within(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 0, "atol": 1e-4 if dtype is torch.float32 else 4e-2}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_call_on_the_device_is_computed_by_this_backend(
    dtype: torch.dtype, head_dim: int
) -> None:
    query = torch.randn(1, 4, 300, head_dim, dtype=dtype, device="mps", requires_grad=True)
    key, value = (torch.randn(1, 2, 500, head_dim, dtype=dtype, device="mps") for _ in range(2))
    found = anyflex.explain(query, key, value, enable_gqa=True)
    assert found.to_dict()["backend"] == "mps"
    out = anyflex.flex_attention(query, key, value, enable_gqa=True)
    (dq,) = torch.autograd.grad(out.sum(), query)
    exact = query.detach().cpu().double().requires_grad_()
    keys, values = (each.cpu().double().repeat_interleave(2, 1) for each in (key, value))
    right = torch.softmax(exact @ keys.mT / head_dim**0.5, dim=-1) @ values
    (wanted,) = torch.autograd.grad(right.sum(), exact)
    torch.testing.assert_close(out.detach().cpu().double(), right.detach(), **within(dtype))
    torch.testing.assert_close(dq.cpu().double(), wanted, **within(dtype))


def modified(bias: Tensor) -> Tensor:
    """Return the causal result of a score mod that captures `bias`, on its device."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 2, 200, 64, generator=generator).to(bias) for _ in range(3)
    )
    if bias.device.type == "mps":
        mask = anyflex.create_block_mask(masks.causal(), None, None, 200, 200, device="mps")
        return anyflex.flex_attention(
            query, key, value, lambda score, b, h, q_idx, kv_idx: score + bias[h, kv_idx], mask
        )
    scores = query @ key.mT / 8 + bias[None, :, None, :]
    below = torch.ones(200, 200, dtype=torch.bool).tril()
    return torch.softmax(scores.masked_fill(~below, -torch.inf), dim=-1) @ value


def test_gradients_of_captured_tensors_are_those_of_the_dense_formula() -> None:
    start = torch.randn(2, 200, dtype=torch.float64)
    on_device = start.float().to("mps").requires_grad_()
    exact = start.clone().requires_grad_()
    out, right = modified(on_device), modified(exact)
    torch.testing.assert_close(out.detach().cpu().double(), right.detach(), rtol=0, atol=1e-4)
    (found,) = torch.autograd.grad(out.sum(), on_device)
    (wanted,) = torch.autograd.grad(right.sum(), exact)
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=0, atol=1e-3)


def test_a_decoding_call_gives_the_dense_result() -> None:
    query = torch.randn(2, 8, 1, 128, device="mps", dtype=torch.float16)
    key, value = (torch.randn(2, 2, 3000, 128, device="mps", dtype=torch.float16) for _ in "kv")
    out = anyflex.flex_attention(query, key, value, enable_gqa=True)
    keys, values = (each.cpu().double().repeat_interleave(4, 1) for each in (key, value))
    right = torch.softmax(query.cpu().double() @ keys.mT / 128**0.5, dim=-1) @ values
    torch.testing.assert_close(out.cpu().double(), right, rtol=0, atol=4e-3)


def test_launches_in_parts_give_equal_results(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (torch.randn(1, 2, 300, 64, device="mps") for _ in range(3))
    query.requires_grad_()

    def results() -> tuple[Tensor, Tensor]:
        out = anyflex.flex_attention(query, key, value, backend="mps")
        return out.detach(), *torch.autograd.grad(out.sum(), query)

    whole = results()
    monkeypatch.setattr("anyflex_mps.command_buffers._MOST_WORK", 1)
    monkeypatch.setattr("anyflex_mps.command_buffers._LEAST_GROUPS", 0)
    assert all(map(torch.equal, results(), whole))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matrix_units_give_the_dense_result_or_refuse_by_name(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(1, 4, 300, 128, device="mps", dtype=dtype) for _ in range(3))
    try:
        out = anyflex.flex_attention(
            query, key, value, backend="mps", kernel_options={"mps": {"mpp": True}}
        )
    except ArgumentError as error:
        assert "mpp" in str(error)
        pytest.skip(str(error))
    exact = [each.cpu().double() for each in (query, key, value)]
    right = torch.nn.functional.scaled_dot_product_attention(*exact)
    torch.testing.assert_close(out.cpu().double(), right, **within(dtype))
