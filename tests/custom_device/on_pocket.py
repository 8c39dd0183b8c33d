"""Tests that run on the device "pocket": collected in a subprocess by test_custom_device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

import anyflex
from anyflex.registry import isolated
from anyflex.testing.oracle import dense_attention, dense_mask
from tests.custom_device.pocket import module
from tests.custom_device.pocket_plugin import PocketKernel

__all__: list[str] = []

POCKET = torch.device("pocket", 0)
LENGTHS = (40, 30)


@pytest.fixture(autouse=True)
def nothing_is_passed_over() -> Iterator[None]:
    """Make the warning about calls that fall back to the reference an error."""
    PocketKernel.launches.clear()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", anyflex.PerformanceWarning)
        yield


def on_reference() -> AbstractContextManager[Any]:
    return anyflex.use_backend("reference")


def some_query(dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    return torch.randn(1, 2, 16, 8, dtype=dtype).to(POCKET).requires_grad_(**options)


def leaves(where: torch.device | str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, LENGTHS[0], 16), (2, 2, LENGTHS[1], 16), (2, 2, LENGTHS[1], 24), (4,), (70,)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(where).requires_grad_() for tensor in drawn]


def mods(slopes: Tensor, table: Tensor) -> tuple[Any, Any]:
    document = (torch.arange(max(LENGTHS)) // 9).to(slopes.device)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.tanh(s / 2) * 2 + slopes[h] * (k - q) * 0.1 + table[q - k + 29]

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (document[q] == document[k]) | (k < 7)

    return score, mask


def attend(call: Callable[..., Any] = anyflex.flex_attention) -> list[Tensor]:
    """Out, lse, max_scores and the gradients of q, k, v and two captured tensors."""
    query, key, value, slopes, table = tensors = leaves(POCKET)
    score, mask = mods(slopes, table)
    structure = anyflex.create_block_mask(mask, None, None, *LENGTHS, BLOCK_SIZE=(16, 8))
    assert structure.device == POCKET  # where its captured tensor is
    out, aux = call(
        query,
        key,
        value,
        score,
        structure,
        enable_gqa=True,
        return_aux=anyflex.AuxRequest(lse=True, max_scores=True),
    )
    loss = (out * out).sum() + aux.lse.sum()
    return [out, aux.lse, aux.max_scores, *torch.autograd.grad(loss, tensors)]


def wanted() -> list[Tensor]:
    query, key, value, slopes, table = tensors = leaves("cpu")
    score, mask = mods(slopes, table)
    want = dense_attention(query, key, value, score, dense_mask(mask, 1, 1, *LENGTHS))
    loss = (want.out * want.out).sum() + want.lse.sum()
    return [want.out, want.lse, want.max_scores, *torch.autograd.grad(loss, tensors)]


def check(found: list[Tensor]) -> None:
    for there, here in zip(found, wanted(), strict=True):
        assert there.device == POCKET
        torch.testing.assert_close(there.cpu(), here)


@pytest.mark.parametrize("call", [torch_flex_attention, torch.compile(torch_flex_attention)])
def test_torch_refuses_such_a_device(call: Callable[..., Any]) -> None:
    query = some_query()
    with pytest.raises(ValueError, match="only supported on .* pocket"):
        call(query, query, query)


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_torch_s_call_reaches_the_plugin_once_it_is_rerouted(way: str) -> None:
    call = torch_flex_attention
    if way == "compiled":
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert "pocket" in anyflex.reroute_torch()
    try:
        check(attend(call))
    finally:
        anyflex.restore_torch()
    assert PocketKernel.launches


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_the_plugin_computes_forward_and_backward(way: str) -> None:
    call = anyflex.flex_attention
    if way == "compiled":
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    check(attend(call))
    directions = [direction for direction, _ in PocketKernel.launches]
    # The static op carries out and lse only: a kernel that saves more computes it anew.
    assert directions == ["forward", *["forward"] * (way == "compiled"), "backward"]
    assert all(devices == {POCKET} for _, devices in PocketKernel.launches)


def test_the_reference_computes_there_too() -> None:
    with on_reference():
        check(attend())
    assert not PocketKernel.launches


def test_without_the_plugin_the_reference_computes_and_warns() -> None:
    query = some_query()
    with isolated(), pytest.warns(anyflex.PerformanceWarning, match="no backend for pocket"):
        anyflex.flex_attention(query, query, query)


def test_the_registry_speaks_of_the_device() -> None:
    query = some_query()
    explanation = anyflex.explain(query, query, query)
    assert explanation.backend == "pocket"
    assert explanation.variant == "PocketKernel"
    assert explanation.selection.spec.device_type == "pocket"
    with pytest.raises(anyflex.BackendRefused, match="computes on cpu tensors.*are on pocket"):
        anyflex.flex_attention(query, query, query, backend="cpu")
    host = query.detach().cpu()
    with pytest.raises(anyflex.BackendRefused, match="computes on pocket tensors.*are on cpu"):
        anyflex.flex_attention(host, host, host, backend="pocket")


def test_what_the_plugin_refuses_is_told() -> None:
    query = some_query(torch.float16)
    with pytest.raises(anyflex.BackendRefused, match="float16"):
        anyflex.flex_attention(query, query, query, backend="pocket")
    with pytest.warns(anyflex.PerformanceWarning, match="pocket .*passed over.*float16"):
        assert anyflex.flex_attention(query, query, query).dtype is torch.float16


def test_a_mask_from_the_cpu_is_moved_once_with_its_captured_tensors() -> None:
    document = torch.arange(16) // 5
    mask = anyflex.create_block_mask(
        lambda b, h, q, k: document[q] == document[k], None, None, 16, 16, BLOCK_SIZE=4
    )
    query = some_query()
    there = anyflex.flex_attention(query, query, query, block_mask=mask)
    here = anyflex.flex_attention(*[query.detach().cpu()] * 3, block_mask=mask)
    torch.testing.assert_close(there.cpu(), here)
    assert mask.on(POCKET) is mask.on(POCKET)


@pytest.mark.parametrize("device", ["pocket", "pocket:0", POCKET], ids=str)
def test_masks_are_built_on_the_device_and_come_back(device: Any) -> None:
    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    mask = anyflex.create_block_mask(causal, None, None, 16, 16, device, BLOCK_SIZE=4)
    assert mask.device == POCKET
    assert mask.to(device) is mask
    assert mask.to("cpu").device.type == "cpu"
    assert mask == anyflex.create_block_mask(causal, None, None, 16, 16, BLOCK_SIZE=4)
    dense = anyflex.create_mask(causal, None, None, 4, 4, device)
    assert torch.equal(dense[0, 0].cpu(), torch.ones(4, 4, dtype=torch.bool).tril())


def test_the_public_backward_works_there() -> None:
    query = some_query(requires_grad=True)
    out, lse = anyflex.flex_attention(query, query, query, return_lse=True)
    (want,) = torch.autograd.grad(out.sum(), [query])
    given = out.detach(), lse.detach()
    found = anyflex.flex_attention_backward(torch.ones_like(out), query, query, query, *given)
    torch.testing.assert_close((found.query + found.key + found.value).cpu(), want.cpu())


def test_sinks_work_there() -> None:
    query, sink = some_query(), torch.zeros(2, device=POCKET)
    out, lse = anyflex.flex_attention(query, query, query, return_lse=True)
    found = anyflex.with_sinks(out, lse, sink)
    want = anyflex.with_sinks(out.detach().cpu(), lse.detach().cpu(), sink.cpu())
    torch.testing.assert_close(found.cpu(), want)


def test_a_mod_that_no_graph_can_hold_runs_there() -> None:
    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + torch.special.i0(s)

    query = some_query()
    with pytest.warns(anyflex.PerformanceWarning, match="runs on the reference"):
        there = anyflex.flex_attention(query, query, query, score)
        here = anyflex.flex_attention(*[query.detach().cpu()] * 3, score)
    torch.testing.assert_close(there.cpu(), here)


def test_mixed_devices_are_named() -> None:
    query, table = some_query(), torch.randn(16)
    with pytest.raises(anyflex.ArgumentError, match="one device.*pocket:0.*cpu"):
        anyflex.flex_attention(query, query.cpu(), query)
    with pytest.raises(anyflex.ArgumentError, match=r"table.*is on cpu.*\.to\('pocket:0'\)"):
        anyflex.flex_attention(query, query, query, lambda s, b, h, q, k: s + table[k])


def test_deterministic_gradients_are_given_there() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        check(attend())
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def with_method(name: str, method: Any) -> Iterator[None]:
    """The device's module, with one more function."""
    setattr(module, name, method)
    try:
        yield
    finally:
        delattr(module, name)


def test_autocast_casts_there_where_the_device_has_it() -> None:
    query = some_query()
    entered: list[bool] = []

    class Watching(nullcontext[None]):
        def __enter__(self) -> None:
            entered.append(torch.is_autocast_enabled("pocket"))

    with (
        with_method("get_amp_supported_dtype", lambda: [torch.bfloat16]),
        with_method("device", lambda device: Watching()),
        with_method("current_device", lambda: 1),
        torch.autocast("pocket", dtype=torch.bfloat16),
        isolated(scan=True),
    ):
        out = anyflex.flex_attention(query, query, query)
    assert out.dtype is torch.bfloat16
    assert entered == [False]  # autocast is off while a kernel runs


def test_a_device_is_selected_where_it_is_not_and_its_module_can_select_one() -> None:
    selected: list[torch.device] = []

    class Selecting(nullcontext[None]):
        def __init__(self, device: torch.device) -> None:
            super().__init__()
            selected.append(device)

    with with_method("device", Selecting), isolated(scan=True):
        check(attend())
        assert selected == []
        with with_method("current_device", lambda: 1):
            check(attend())
    assert selected == [POCKET, POCKET]


def test_of_several_devices_torch_selects_one_where_the_module_can_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    selected: list[int] = []

    class Selecting(nullcontext[None]):
        def __init__(self, index: int) -> None:
            super().__init__()
            selected.append(index)

    assert torch.accelerator.current_accelerator() == torch.device("pocket")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "device_index", Selecting)
    with isolated(scan=True):
        check(attend())
    assert selected == [0, 0]


def test_a_kernel_is_not_compiled_while_the_device_captures_a_graph() -> None:
    query = some_query()
    with (
        with_method("is_current_stream_capturing", lambda: True),
        isolated(scan=True),
        pytest.raises(anyflex.GraphCaptureError, match="backend pocket would have to compile"),
    ):
        anyflex.flex_attention(query, query, query)
