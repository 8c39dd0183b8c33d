"""Behaviour that only a machine with an accelerator shows: the reference there, moves, guards,
refusals."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex

__all__: list[str] = []

pytestmark = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="this machine has no accelerator"
)

LENGTHS = (70, 45)


def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, 0)


def leaves(where: torch.device | str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, LENGTHS[0], 16), (2, 2, LENGTHS[1], 16), (2, 2, LENGTHS[1], 24), (4,), (140,)]
    drawn = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    return [tensor.to(where).requires_grad_() for tensor in drawn]


def attend(
    tensors: list[Tensor], call: Callable[..., Any] = anyflex.flex_attention
) -> list[Tensor]:
    query, key, value, slopes, table = tensors
    document = (torch.arange(LENGTHS[0]) // 20).to(query.device)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.tanh(s / 2) * 2 + slopes[h] * (k - q) * 0.1 + table[q - k + 60]

    mask = anyflex.create_block_mask(
        lambda b, h, q, k: (document[q] == document[k]) | (k < 7),
        None,
        None,
        *LENGTHS,
        BLOCK_SIZE=(16, 32),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", anyflex.PerformanceWarning)
        out, aux = call(
            query,
            key,
            value,
            score,
            mask,
            enable_gqa=True,
            return_aux=anyflex.AuxRequest(lse=True, max_scores=True),
            backend="reference",
        )
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out).to(out.device)
    loss = (out * weights).sum() + aux.lse.sum()
    return [out, aux.lse, aux.max_scores, *torch.autograd.grad(loss, tensors)]


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_the_reference_gives_there_what_it_gives_on_a_cpu(way: str) -> None:
    call = anyflex.flex_attention
    if way == "compiled":
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    wanted = attend(leaves("cpu", torch.float64))
    found = attend(leaves(device(), torch.float64), call)
    for there, here in zip(found, wanted, strict=True):
        assert there.device == device()
        torch.testing.assert_close(there.cpu(), here, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_reference_in_the_types_of_accelerators(dtype: torch.dtype) -> None:
    wanted = attend([t.detach().double().requires_grad_() for t in leaves("cpu", dtype)])
    found = attend(leaves(device(), dtype))
    for there, here in zip(found, wanted, strict=True):
        budget = 40 * torch.finfo(dtype).eps * here.abs().max()
        assert (there.cpu().double() - here).abs().max() <= budget


def test_computing_on_the_reference_there_warns_with_the_cure() -> None:
    from anyflex.registry import isolated
    from anyflex.registry.fallback import forget_warnings

    query = torch.randn(1, 1, 4, 8, device=device())
    with isolated(reference="anyflex.reference.backend:ReferenceBackend"):
        forget_warnings()
        with pytest.warns(anyflex.PerformanceWarning, match=f"{device().type}.*slowly"):
            anyflex.flex_attention(query, query, query)


def test_a_captured_tensor_elsewhere_is_named() -> None:
    query = torch.randn(1, 1, 4, 8, device=device())
    table = torch.randn(4)
    with pytest.raises(anyflex.ArgumentError, match=rf"'?table'?.*cpu.*{device()}.*\.to"):
        anyflex.flex_attention(query, query, query, lambda s, b, h, q, k: s + table[k])


def test_tensors_on_two_devices_are_refused() -> None:
    query = torch.randn(1, 1, 4, 8, device=device())
    with pytest.raises(anyflex.ArgumentError, match=f"{device()}.*cpu"):
        anyflex.flex_attention(query, query.cpu(), query)


def test_a_mask_from_the_cpu_is_moved_once_with_its_captured_tensors() -> None:
    document = torch.arange(64) // 10
    mask = anyflex.create_block_mask(
        lambda b, h, q, k: document[q] == document[k], None, None, 64, 64, BLOCK_SIZE=16
    )
    query = torch.randn(1, 2, 64, 8, device=device())
    there = anyflex.flex_attention(query, query, query, block_mask=mask, backend="reference")
    here = anyflex.flex_attention(*[query.cpu()] * 3, block_mask=mask, backend="reference")
    torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-5)
    assert mask.on(device()) is mask.on(device())


def test_autocast_casts_there() -> None:
    query = torch.randn(1, 1, 4, 8, device=device())
    with torch.autocast(device().type, dtype=torch.bfloat16):
        out = anyflex.flex_attention(query, query, query, backend="reference")
    assert out.dtype is torch.bfloat16


def test_a_call_works_on_a_stream_of_its_own_and_from_another_current_device() -> None:
    query = torch.randn(1, 1, 40, 8, device=device(), dtype=torch.float64)
    wanted = anyflex.flex_attention(query, query, query, backend="reference")
    stream = torch.Stream(device())
    with stream:
        found = anyflex.flex_attention(query, query, query, backend="reference")
    stream.synchronize()
    torch.testing.assert_close(found, wanted)


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="this machine has one device")
def test_two_devices_of_a_kind_do_not_mix() -> None:
    query = torch.randn(1, 1, 4, 8, device=device())
    other = query.to(torch.device(device().type, 1))
    with pytest.raises(anyflex.ArgumentError, match=":0.*:1"):
        anyflex.flex_attention(query, other, query)
    out = anyflex.flex_attention(other, other, other, backend="reference")
    assert out.device == other.device
