"""The kernels with Intel's configurations in Triton's interpreter, against a dense formula.

This shows that tiles of these sizes, and the descriptors that kernels create, give right numbers;
it shows nothing about Intel's compiler. bf16 is left out: the interpreter multiplies its bits as
integers.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.testing import posing

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 is not set"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="there is no Triton to interpret with"
    ),
    # The interpreter warns thousands of times in a call, and pytest would keep each.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

Mod = Callable[..., Tensor]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q + 20


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [tensor.requires_grad_() for tensor in drawn]


def among_nans(tensor: Tensor) -> Tensor:
    """Return the tensor [B, H, rows, dims] in memory with NaN past each head's rows and past each
    row."""
    room = tensor.new_full(
        (*tensor.shape[:2], tensor.shape[2] + 64, tensor.shape[3] + 32), float("nan")
    )
    inside = room[:, :, : tensor.shape[2], : tensor.shape[3]]
    inside.copy_(tensor.detach())
    return inside.requires_grad_()


def dense(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None, mask: bool) -> Tensor:
    """Evaluate the formula in float64: ALiBi by `slopes` / 16 before the mask `causal`."""
    query, key, value = (tensor.double() for tensor in (query, key, value))
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    rows, keys = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])[None]
    if slopes is not None:
        scores = scores + slopes.double()[:, None, None] / 16 * (keys - rows)
    if mask:
        scores = scores.masked_fill(keys > rows + 20, float("-inf"))
    return torch.softmax(scores, dim=-1) @ value


def check(
    lengths: tuple[int, int],
    width: int,
    dtype: torch.dtype,
    *,
    mods: bool,
    value_width: int | None = None,
    poisoned: bool = False,
) -> None:
    """Compare out and all gradients."""
    shapes = (
        (1, 2, lengths[0], width),
        (1, 1, lengths[1], width),
        (1, 1, lengths[1], value_width or width),
    )
    query, key, value, slopes = draw(*shapes, (2,), dtype=dtype)
    if poisoned:
        query, key, value = (among_nans(tensor) for tensor in (query, key, value))
    tensors = (query, key, value, slopes)
    mask = anyflex.create_block_mask(causal, None, None, *lengths, BLOCK_SIZE=32) if mods else None

    def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + slopes[h] / 16 * (k - q)

    with posing("xpu"):
        out = anyflex.flex_attention(
            query, key, value, alibi if mods else None, mask, enable_gqa=True, backend="xpu"
        )
        wanted = tensors if mods else tensors[:3]
        dout = torch.ones_like(out) / 4
        gradients = torch.autograd.grad(out, wanted, dout)
    right = dense(query, key, value, slopes if mods else None, mods)
    right_gradients = torch.autograd.grad(right, wanted, dout.double())
    limit = 1e-5 if dtype is torch.float32 else 4e-3
    for got, exact in zip((out, *gradients), (right, *right_gradients), strict=True):
        expected = exact.detach()
        scale = max(1.0, float(expected.abs().max()))
        assert float((got.detach() - expected).abs().max()) <= limit * scale


@pytest.fixture
def describers(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Return, by kernel, where the descriptors of its last launch were created."""
    from anyflex_triton.building import Program

    found: dict[str, str | None] = {}
    launch = Program.launch

    def note(program: Program, grid: int, device: torch.device, values: Any) -> None:
        if "DESCRIBED" in program.constants:
            found[program.function.__name__] = program.constants["DESCRIBED"]  # type: ignore[assignment]
        launch(program, grid, device, values)

    monkeypatch.setattr(Program, "launch", note)
    return found


PREFILL = ("forward_kernel", "key_kernel", "query_kernel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_ragged_call_with_mods_and_grouped_heads(dtype: torch.dtype) -> None:
    check((75, 90), 40, dtype, mods=True)


@pytest.mark.parametrize("width", [64, 128, 192, 256])
def test_each_width_of_the_table(width: int) -> None:
    check((65, 70), width, torch.float16, mods=False)


def test_decoding() -> None:
    check((1, 150), 64, torch.float16, mods=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("lengths", [(74, 90), (64, 128)])
@pytest.mark.parametrize("mods", [True, False])
def test_kernels_make_descriptors_of_each_head(
    lengths: tuple[int, int],
    dtype: torch.dtype,
    mods: bool,
    describers: dict[str, str | None],
) -> None:
    """Cover different head dims, one of them not a power of two; lengths that end inside of tiles
    or with them; grouped heads; NaN in memory past rows and columns."""
    check(lengths, 48, dtype, mods=mods, value_width=32, poisoned=True)
    assert describers == dict.fromkeys(PREFILL, "kernel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_decoding_makes_descriptors(dtype: torch.dtype, describers: dict[str, str | None]) -> None:
    check((1, 151), 64, dtype, mods=False, value_width=32, poisoned=True)
    assert describers["decode_kernel"] == "kernel"
    # The streamed tensors, a query and its gradient, have one row.
    assert describers["key_kernel"] is None


def test_keys_that_nothing_sees_may_be_nan(describers: dict[str, str | None]) -> None:
    """The keys are in the middle of tiles, so that descriptors read them."""
    query, key, value = draw((1, 2, 80, 64), *[(1, 1, 96, 64)] * 2)
    with torch.no_grad():
        key[:, :, 40:50] = float("nan")
        value[:, :, 40:50] = float("nan")

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k < 40) | (k >= 50)

    mask = anyflex.create_block_mask(seen, None, None, 80, 96, BLOCK_SIZE=32)
    with posing("xpu"):
        out = anyflex.flex_attention(query, key, value, None, mask, enable_gqa=True, backend="xpu")
        got = torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
    live = [*range(40), *range(50, 96)]
    right = dense(query, key[:, :, live], value[:, :, live], None, False)
    wanted = torch.autograd.grad(right, (query, key, value), torch.ones_like(right))
    assert describers == dict.fromkeys(PREFILL, "kernel")
    for found, expected in zip((out, *got), (right, *wanted), strict=True):
        assert torch.allclose(found.double(), expected.double(), atol=1e-5)


def test_tensors_that_block_loads_do_not_take_come_by_pointers(
    describers: dict[str, str | None],
) -> None:
    check((75, 90), 24, torch.float16, mods=False)
    assert describers == dict.fromkeys(PREFILL, None)


@pytest.mark.parametrize("queries", [80, 1])
def test_calls_of_one_shape_are_asked_where_they_lie(
    queries: int, describers: dict[str, str | None]
) -> None:
    for offset, describer in ((0, "kernel"), (8, None), (0, "kernel"), (8, None)):
        query = torch.randn(1, 1, queries, 32).half().requires_grad_()
        memories = (torch.randn(64 * 32 + 8).half() for _ in range(2))
        key, value = (
            memory[offset : offset + 64 * 32].view(1, 1, 64, 32).requires_grad_()
            for memory in memories
        )
        leaves = query, key, value
        with posing("xpu"):
            out = anyflex.flex_attention(*leaves, backend="xpu")
            dout = torch.randn_like(out)
            got = torch.autograd.grad(out, leaves, dout)
        assert describers["decode_kernel" if queries == 1 else "forward_kernel"] == describer
        assert describers["query_kernel"] == describer
        right = dense(*leaves, None, False)
        wanted = torch.autograd.grad(right, leaves, dout.double())
        for found, expected in zip((out, *got), (right, *wanted), strict=True):
            assert torch.allclose(found.double(), expected.double(), atol=1e-2)


def test_what_block_loads_take() -> None:
    from anyflex_triton.arguments import is_blocked

    dense = torch.zeros(2, 3, 64, 32, dtype=torch.float16)
    assert is_blocked(dense)
    assert is_blocked(dense.transpose(1, 2))
    assert is_blocked(torch.zeros(1, 1, 75, 40, dtype=torch.float16))
    for other in (
        # Heads or the first element aren't aligned to 64 bytes, or rows not to 16.
        torch.zeros(1, 2, 75, 40, dtype=torch.float16),
        dense.flatten()[8 : 8 + 64 * 32].view(1, 1, 64, 32),
        torch.zeros(1, 1, 64, 36, dtype=torch.float16),
        # Rows are shorter than 64 bytes, contiguous or not.
        torch.zeros(1, 1, 64, 16, dtype=torch.float16),
        dense[..., :16],
        # Columns aren't contiguous, rows are expanded, or there is one row.
        dense.mT,
        dense[:, :, :1].expand(-1, -1, 64, -1),
        dense[:, :, :1],
        dense[:, :, :0],
        # Rows are 2**24 bytes apart.
        torch.zeros((1 << 23) + 32, dtype=torch.float16).as_strided(
            (1, 1, 2, 32), (0, 0, 1 << 23, 1)
        ),
    ):
        assert not is_blocked(other)


def test_no_descriptor_is_made_outside_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intel's compiler makes block loads only of descriptors that the kernel creates itself."""
    from anyflex_triton import kernel_signatures

    def refuse(*arguments: object) -> None:
        raise AssertionError("a descriptor is made for an Intel GPU")

    monkeypatch.setattr(kernel_signatures, "descriptor_of", refuse)
    check((64, 64), 64, torch.float16, mods=False)
