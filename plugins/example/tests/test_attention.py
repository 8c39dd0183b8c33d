"""Results and gradients against a dense formula, and the backend's refusals.

The conformance kit asks far more; these are quick to read and to debug. They follow the backend's
declaration: its dtypes and options, and a call that it refuses is a skipped test.
"""

from __future__ import annotations

import pytest
import torch
from anyflex_example.backend import ExampleBackend
from dense import dense_attention
from torch import Tensor

import anyflex

DECLARED = ExampleBackend.capabilities
SLOPES = torch.tensor([0.5, -0.25, 0.125, 0.3125])
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
}
EXACT = next(dtype for dtype in TOLERANCE if dtype in DECLARED.dtypes)
"""The declared type with the most digits."""


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def rows_without_keys(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q > 2) & (k < 20 + 4 * h)


def first_keys_only(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k + b < 30


MASKS = {
    "none": (None, None, None),
    "causal": (causal, None, None),
    "a mask for each head": (rows_without_keys, None, 4),
    "a mask for each batch": (first_keys_only, 2, None),
}


def tensors(
    device: torch.device, dtype: torch.dtype, kv_batch: int = 2, kv_heads: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """q [2, 4, 41, 16], k [., ., 53, 16], v [., ., 53, 24]: no length is a multiple of a block."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 41, 16), (kv_batch, kv_heads, 53, 16), (kv_batch, kv_heads, 53, 24))
    query, key, value = (
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in shapes
    )
    return query, key, value


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    limit = TOLERANCE[dtype] * max(1.0, float(wanted.nan_to_num(0, 0, 0).abs().amax()))
    torch.testing.assert_close(found.cpu().double(), wanted, atol=limit, rtol=0)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", sorted(DECLARED.dtypes, key=str), ids=str)
def test_results_and_gradients_are_the_formula_s(
    name: str, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    mask_mod, mask_batch, mask_heads = MASKS[name]
    mask = None
    if mask_mod is not None:
        mask = anyflex.create_block_mask(
            mask_mod, mask_batch, mask_heads, 41, 53, device=device, BLOCK_SIZE=16
        )
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    slopes = SLOPES.to(device, wide).requires_grad_()
    bias = torch.linspace(-1, 1, 53, device=device, dtype=wide).requires_grad_()
    strength = torch.tensor(0.75, device=device, dtype=wide, requires_grad=True)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(score * strength) + slopes[h] * (k - q) / 16 + slopes[b] * bias[k]

    inputs = tensors(device, dtype)
    out, aux = anyflex.flex_attention(
        *inputs,
        score_mod,
        mask,
        enable_gqa=True,
        return_aux=anyflex.AuxRequest(lse=True),
        backend=backend,
    )
    learned = (*inputs, slopes, bias, strength)
    loss = out.double().sin().sum() + aux.lse.double().masked_fill(aux.lse.isinf(), 0).sum()
    gradients = torch.autograd.grad(loss, learned)

    # The formula sees the same numbers, on the CPU and in float64.
    inputs = tuple(each.detach().cpu().double().requires_grad_() for each in inputs)
    slopes = SLOPES.double().requires_grad_()
    bias = bias.detach().cpu().double().requires_grad_()
    strength = torch.tensor(0.75).double().requires_grad_()
    wanted, wanted_lse = dense_attention(*inputs, score_mod, mask_mod)
    # The loss is a function of the rounded out.
    rounded = wanted + (out.detach().cpu().double() - wanted.detach())
    loss = rounded.sin().sum() + wanted_lse.masked_fill(wanted_lse.isinf(), 0).sum()
    assert_near(out.detach(), wanted.detach(), dtype)
    assert_near(aux.lse.detach(), wanted_lse.detach(), torch.float32)
    wanted_gradients = torch.autograd.grad(loss, (*inputs, slopes, bias, strength))
    for found, expected in zip(gradients, wanted_gradients, strict=True):
        assert_near(found, expected, dtype)


@pytest.mark.parametrize(("kv_batch", "kv_heads"), [(1, 2), (2, 1), (1, 4)])
def test_keys_that_heads_and_batches_share_get_complete_sums(
    kv_batch: int, kv_heads: int, backend: str, device: torch.device
) -> None:
    inputs = tensors(device, EXACT, kv_batch, kv_heads)
    out = anyflex.flex_attention(*inputs, enable_gqa=True, backend=backend)
    found = torch.autograd.grad(out.sin().sum(), inputs)
    inputs = tuple(each.detach().cpu().double().requires_grad_() for each in inputs)
    wanted, _ = dense_attention(*inputs)
    for mine, expected in zip(found, torch.autograd.grad(wanted.sin().sum(), inputs), strict=True):
        assert_near(mine, expected, EXACT)


@pytest.mark.parametrize("keys", [0, 1, 15, 16, 17, 33])
def test_the_steps_of_the_softmax_change_nothing(
    keys: int, backend: str, device: torch.device
) -> None:
    query, key, value = tensors(device, EXACT)
    # Larger scores come later, so that each step raises the maximum.
    key = key[:, :, :keys] * torch.arange(1.0, keys + 1, device=device).view(-1, 1).to(EXACT)
    value = value[:, :, :keys]
    choices = {
        name: each.choices[0] for name, each in ExampleBackend.options.items() if each.choices
    }
    out = anyflex.flex_attention(
        query,
        key,
        value,
        enable_gqa=True,
        backend=backend,
        kernel_options={backend: choices},
    )
    wanted, _ = dense_attention(query.cpu(), key.cpu(), value.cpu())
    assert_near(out.detach(), wanted.detach().nan_to_num(0), EXACT)


def test_what_is_at_dead_keys_reaches_nothing(backend: str, device: torch.device) -> None:
    mask = anyflex.create_block_mask(
        first_keys_only, 2, None, 41, 53, device=device, BLOCK_SIZE=16
    )

    def results(*inputs: Tensor) -> tuple[Tensor, ...]:
        out = anyflex.flex_attention(*inputs, None, mask, enable_gqa=True, backend=backend)
        return (out, *torch.autograd.grad(out.sin().sum(), inputs))

    query, key, value = tensors(device, EXACT)
    wanted = results(query, key, value)
    with torch.no_grad():
        key[:, :, 30:] = torch.nan
        value[:, :, 30:40] = torch.nan
        value[:, :, 40:] = -torch.inf
    for found, expected in zip(results(query, key, value), wanted, strict=True):
        assert torch.equal(found, expected)


def test_what_is_at_live_keys_does(backend: str, device: torch.device) -> None:
    query, key, value = tensors(device, EXACT)
    mask = anyflex.create_block_mask(causal, None, None, 41, 53, device=device, BLOCK_SIZE=16)
    with torch.no_grad():
        value[:, :, 10] = torch.inf
        key[:, :, 20] = torch.nan
    out = anyflex.flex_attention(query, key, value, None, mask, enable_gqa=True, backend=backend)
    assert out[:, :, :10].isfinite().all()
    assert (out[:, :, 10:20] == torch.inf).all()
    assert out[:, :, 20:].isnan().all()


def test_the_structure_of_a_mask_wins_over_its_function(
    backend: str, device: torch.device
) -> None:
    query, key, value = tensors(device, EXACT)
    mask = anyflex.create_block_mask(
        lambda b, h, q, k: k < 32, None, None, 41, 53, device=device, BLOCK_SIZE=16
    )
    mask = anyflex.BlockMask.from_runs(
        mask.offsets,
        mask.runs,
        seq_lengths=(41, 53),
        block_size=16,
        mask_mod=lambda b, h, q, k: k < 0,
    )
    out = anyflex.flex_attention(query, key, value, None, mask, enable_gqa=True, backend=backend)
    wanted, _ = dense_attention(query.cpu(), key[:, :, :32].cpu(), value[:, :, :32].cpu())
    assert_near(out.detach(), wanted.detach(), EXACT)


def test_a_live_read_outside_of_a_captured_tensor_is_an_error(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type != "cpu":
        pytest.skip("devices look for it under ANYFLEX_CHECK_INDICES=1 only")
    query, key, value = tensors(device, EXACT)
    table = torch.zeros(50, device=device)
    with pytest.raises(anyflex.ModIndexError):
        anyflex.flex_attention(
            query,
            key,
            value,
            lambda s, b, h, q, k: s + table[k],
            enable_gqa=True,
            backend=backend,
        )


def test_what_is_not_declared_is_refused_with_the_reason(
    backend: str, device: torch.device
) -> None:
    width = DECLARED.head_dim_max + DECLARED.head_dim_multiple
    wide = torch.zeros(1, 1, 8, width, device=device, dtype=EXACT)
    with pytest.raises(anyflex.BackendRefused, match=f"head dim E = {width} is not supported"):
        anyflex.flex_attention(wide, wide, wide, backend=backend)


def test_calls_under_way_at_once_share_nothing(backend: str, device: torch.device) -> None:
    from concurrent.futures import ThreadPoolExecutor

    query, key, value = (each.detach() for each in tensors(device, EXACT))

    def attend(factor: int) -> Tensor:
        return anyflex.flex_attention(query * factor, key, value, enable_gqa=True, backend=backend)

    serial = [attend(factor) for factor in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for found, wanted in zip(pool.map(attend, range(8)), serial, strict=True):
            assert torch.equal(found, wanted)
