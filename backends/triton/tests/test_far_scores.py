"""Scores that are finite but huge: a row's softmax depends on their differences alone.

q and k are small integers and the scale is 1/8: all scores are exact, so that ties are ties.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from soak import SOAK
from torch import Tensor

import anyflex
from anyflex.plugin import isolated, register
from anyflex.testing import posing

pytest.importorskip("triton", reason="there is no Triton to interpret with")

from anyflex_triton.backend import TritonBackend

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LOWEST = torch.finfo(torch.float32).min
Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with isolated(), posing("cuda"):
        register("cuda.mine", TritonBackend)
        yield


def integers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).float()


def tensors(rows: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return (
        integers(1, 2, rows, 16, seed=1).to(dtype),
        integers(1, 1, keys, 16, seed=2).to(dtype),
        torch.randn(1, 1, keys, 16, generator=torch.Generator().manual_seed(3)).to(dtype),
    )


def padding(count: int, lowest: float) -> Tensor:
    """Return `lowest` at every third place, and at sixteen neighbouring ones."""
    index = torch.arange(count)
    return torch.where((index % 3 == 0) | ((index >= 16) & (index < 32)), lowest, 0.0)


def made(name: str, rows: int, keys: int) -> Score:
    """Return a mod that makes huge scores."""
    of_rows, of_keys = padding(rows, LOWEST), padding(keys, LOWEST)
    mods: dict[str, Score] = {
        "all lowest": lambda s, b, h, q, k: s + LOWEST,
        "lowest in some rows": lambda s, b, h, q, k: s + of_rows[q],
        "lowest by rows and keys": lambda s, b, h, q, k: torch.where(
            of_rows[q] + of_keys[k] < 0, LOWEST, s
        ),
        "highest": lambda s, b, h, q, k: s - LOWEST,
        "up": lambda s, b, h, q, k: s + 2.0**20,
        "down": lambda s, b, h, q, k: s - 2.0**20,
        "further down in some rows": lambda s, b, h, q, k: s + of_rows[q] * 2.0**-98,
        "far apart": lambda s, b, h, q, k: s * 2.0**24,
        "ever farther": lambda s, b, h, q, k: s + (k // 40) * 300000.0,
    }
    return mods[name]


NAMES = (
    "all lowest", "lowest in some rows", "lowest by rows and keys", "highest", "up", "down",
    "further down in some rows", "far apart", "ever farther",
)  # fmt: skip


def dense(
    query: Tensor, key: Tensor, value: Tensor, mod: Score | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, lse, max_scores) in float64, from scores that float32 holds as kernels have
    them."""
    scores = (query.double() @ key.double().mT * scale).float()
    if mod is not None:
        b, h, q, k = (torch.arange(n) for n in scores.shape)
        scores = mod(scores, b[:, None, None, None], h[:, None, None], q[:, None], k)
    scores = scores.double()
    highest = scores.amax(-1).detach()
    # torch's own logsumexp loses the sum beside the lowest float: its gradient would be n weights
    # of 1.
    lse = highest + (scores - highest[..., None]).logsumexp(-1)
    return scores.softmax(-1) @ value.double(), lse, highest


def compared(
    query: Tensor, key: Tensor, value: Tensor, mod: Score | None, scale: float, backend: str
) -> None:
    """Forward's results are those of the dense formula."""
    wanted = dense(query, key, value, mod, scale)
    out, aux = anyflex.flex_attention(
        query, key, value, mod, scale=scale, enable_gqa=True, backend=backend,
        return_aux=anyflex.AuxRequest(lse=True, max_scores=True),
    )  # fmt: skip
    assert isinstance(out, Tensor)
    close = 1e-5 if query.dtype is torch.float32 else 4e-3
    torch.testing.assert_close(out.double(), wanted[0], atol=close, rtol=close)
    for found, right in zip((aux.lse, aux.max_scores), wanted[1:], strict=True):
        assert found is not None
        torch.testing.assert_close(found.double(), right, atol=1e-5, rtol=1e-6)


CALLS = list(itertools.product(NAMES, [5, 70], [torch.float32, torch.float16]))


@pytest.mark.parametrize(("name", "rows", "dtype"), CALLS[:: 1 if SOAK else 7])
def test_huge_scores_are_right(name: str, rows: int, dtype: torch.dtype) -> None:
    keys = 600 if rows == 5 else 330
    compared(*tensors(rows, keys, dtype), made(name, rows, keys), 0.125, "cuda.mine")


@pytest.mark.parametrize("rows", [5, 70])
def test_huge_products_are_right(rows: int) -> None:
    """Queries and keys are as large as float16 can be, without a mod; their sums are exact."""
    query = torch.full((1, 1, rows, 128), 2.0**15).half()
    key = query[:, :, :1].expand(1, 1, 130, 128).clone()
    key[:, :, 100:] *= 0.5
    value = torch.randn(1, 1, 130, 128, generator=torch.Generator().manual_seed(3)).half()
    compared(query, key, value, None, 128**-0.5, "cuda.mine")


@pytest.mark.parametrize("rows", [5, 70])
def test_a_dead_row_beside_far_ones_stays_dead(rows: int) -> None:
    query, key, value = tensors(rows, 100, torch.float32)
    mask = anyflex.create_block_mask(lambda b, h, q, k: q != 3, None, None, rows, 100)
    out, lse = anyflex.flex_attention(
        query, key, value, made("all lowest", rows, 100), mask, return_lse=True, enable_gqa=True,
        backend="cuda.mine",
    )  # fmt: skip
    assert (out[:, :, 3] == 0).all() and (lse[:, :, 3] == -torch.inf).all()
    others = [row for row in range(rows) if row != 3]
    mean = value.mean(2, keepdim=True).expand_as(out)
    torch.testing.assert_close(out[:, :, others], mean[:, :, others])
    assert (lse[:, :, others] == LOWEST).all()


@pytest.mark.parametrize(
    ("name", "rows", "dtype"),
    [call for call in CALLS if call[0] != "far apart"][:: 1 if SOAK else 7],
)
def test_gradients_of_huge_scores_are_right(name: str, rows: int, dtype: torch.dtype) -> None:
    keys = 130
    leaves = [tensor.requires_grad_() for tensor in tensors(rows, keys, dtype)]
    mod = made(name, rows, keys)
    out, lse = anyflex.flex_attention(
        *leaves, mod, scale=0.125, return_lse=True, enable_gqa=True, backend="cuda.mine"
    )
    right, right_lse, _ = dense(*leaves, mod, 0.125)
    dout, dlse = (
        torch.randn(t.shape, generator=torch.Generator().manual_seed(4)) for t in (out, lse)
    )
    found = torch.autograd.grad((out, lse), leaves, (dout.to(dtype), dlse))
    wanted = torch.autograd.grad((right, right_lse), leaves, (dout.to(dtype), dlse.double()))
    close = 2e-5 if dtype is torch.float32 else 2e-2
    for gradient, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, expected, atol=close, rtol=close)


def test_gradients_of_huge_products_are_finite() -> None:
    """Which key of near ones has the weight is up to the order of sums."""
    leaves = [(torch.randn(1, 1, 70, 128) * 1e4).half().requires_grad_() for _ in range(3)]
    out = anyflex.flex_attention(*leaves, backend="cuda.mine")
    assert isinstance(out, Tensor)
    assert out.isfinite().all()
    for gradient in torch.autograd.grad(out, leaves, torch.full_like(out, 1e-6)):
        assert not gradient.isnan().any()


@pytest.mark.parametrize("repeatable", [False, True])
def test_captured_gradients_of_far_rows_are_right(repeatable: bool) -> None:
    query, key, value = tensors(70, 130, torch.float32)
    slopes = torch.linspace(-0.5, 0.5, 130).requires_grad_()
    of_rows = padding(70, LOWEST * 2.0**-98)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(of_rows[q] < 0, -(2.0**30), s + slopes[k]) + slopes[k]

    dout = torch.randn(1, 2, 70, 16, generator=torch.Generator().manual_seed(4))
    torch.use_deterministic_algorithms(repeatable)
    try:
        out = anyflex.flex_attention(
            query, key, value, mod, scale=0.125, enable_gqa=True, backend="cuda.mine"
        )
        assert isinstance(out, Tensor)
        (found,) = torch.autograd.grad(out, slopes, dout)
    finally:
        torch.use_deterministic_algorithms(False)
    (wanted,) = torch.autograd.grad(dense(query, key, value, mod, 0.125)[0], slopes, dout.double())
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
