"""Huge finite scores on a GPU: the softmax of a row is that of its differences.

q and k are small integers and the scale is 1/8: all scores are exact, so that ties are ties.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import anyflex

__all__: list[str] = []

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device on this machine"
)

LOWEST = torch.finfo(torch.float32).min
KEYS = 700
ROWS = (5, 300)
"""Row counts: decoding, and tiles with a ragged last one."""
Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def padding(count: int) -> Tensor:
    """The lowest float at every third key, and at 64 adjacent ones, else 0."""
    index = torch.arange(count, device="cuda")
    return torch.where((index % 3 == 0) | ((index >= 128) & (index < 192)), LOWEST, 0.0)


def made(name: str, rows: int) -> Score | None:
    of_rows, of_keys = padding(rows), padding(KEYS)
    mods: dict[str, Score | None] = {
        "no mod": None,
        "all lowest": lambda s, b, h, q, k: s + LOWEST,
        "lowest in some rows": lambda s, b, h, q, k: s + of_rows[q],
        "lowest by rows and keys": lambda s, b, h, q, k: torch.where(
            of_rows[q] + of_keys[k] < 0, LOWEST, s
        ),
        "highest": lambda s, b, h, q, k: s - LOWEST,
        "up": lambda s, b, h, q, k: s + 2.0**20,
        "down": lambda s, b, h, q, k: s - 2.0**20,
        "below the bounds": lambda s, b, h, q, k: s - 60000.0,
        "between the bounds": lambda s, b, h, q, k: s - 300000.0,
        "further down in some rows": lambda s, b, h, q, k: s + of_rows[q] * 2.0**-98,
        "far apart": lambda s, b, h, q, k: s * 2.0**24,
        "ever farther": lambda s, b, h, q, k: s + (k // 40) * 300000.0,
    }
    return mods[name]


NAMES = (
    "no mod", "all lowest", "lowest in some rows", "lowest by rows and keys", "highest", "up",
    "down", "below the bounds", "between the bounds", "further down in some rows", "far apart",
    "ever farther",
)  # fmt: skip


def drawn(rows: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows + dim)
    q = torch.randint(-2, 3, (2, 4, rows, dim), generator=generator)
    k = torch.randint(-2, 3, (2, 2, KEYS, dim), generator=generator)
    v = torch.randn(2, 2, KEYS, dim, generator=generator)
    return [x.to("cuda", dtype).requires_grad_() for x in (q, k, v)]


def dense(q: Tensor, k: Tensor, v: Tensor, mod: Score | None) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_scores) in float64, of scores that float32 holds as kernels have them."""
    k, v = (x.double().repeat_interleave(2, 1) for x in (k, v))
    scores = (q.double() @ k.mT / 8).float()
    if mod is not None:
        at = (torch.arange(n, device="cuda") for n in scores.shape)
        b, h, i, j = at
        scores = mod(scores, b[:, None, None, None], h[:, None, None], i[:, None], j)
    scores = scores.double()
    highest = scores.amax(-1).detach()
    lse = highest + (scores - highest[..., None]).logsumexp(-1)
    return scores.softmax(-1) @ v, lse, highest


@pytest.mark.parametrize(
    ("backend", "dtype", "dim"),
    [
        ("cuda", torch.bfloat16, 128),
        ("cuda", torch.float16, 64),
        ("cuda.triton", torch.bfloat16, 128),
        ("cuda.triton", torch.float32, 64),
    ],
)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", NAMES)
def test_huge_scores_are_right(
    name: str, rows: int, dim: int, dtype: torch.dtype, backend: str
) -> None:
    """Forward with all of its outputs, and gradients of all inputs."""
    leaves = drawn(rows, dim, dtype)
    mod = made(name, rows)
    out, aux = anyflex.flex_attention(
        *leaves, mod, scale=0.125, enable_gqa=True, backend=backend,
        return_aux=anyflex.AuxRequest(lse=True, max_scores=True),
    )  # fmt: skip
    assert isinstance(out, Tensor) and aux.lse is not None and aux.max_scores is not None
    wanted, lse, highest = dense(*leaves, mod)
    close = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.double(), wanted, atol=close, rtol=close)
    torch.testing.assert_close(aux.lse.double(), lse, atol=2e-5, rtol=1e-6)
    torch.testing.assert_close(aux.max_scores.double(), highest, atol=1e-5, rtol=1e-6)
    if name == "far apart":
        # Its gradients are 2^24 times rounding.
        return
    generator = torch.Generator("cuda").manual_seed(4)
    dout = torch.randn(out.shape, generator=generator, device="cuda").to(dtype)
    dlse = torch.randn(lse.shape, generator=generator, device="cuda")
    found = torch.autograd.grad((out, aux.lse), leaves, (dout, dlse))
    right = torch.autograd.grad((wanted, lse), leaves, (dout.double(), dlse.double()))
    # Where no row is far, weights come from lse, which is rounded.
    close = max(close, 2.0**-7) if name == "below the bounds" else close
    for gradient, expected in zip(found, right, strict=True):
        size = float(expected.abs().max()) + 1.0
        torch.testing.assert_close(gradient, expected, atol=close * size, rtol=close)


@pytest.mark.parametrize("backend", ["cuda", "cuda.triton"])
@pytest.mark.parametrize("rows", ROWS)
def test_huge_products_are_right(rows: int, backend: str) -> None:
    """Queries and keys of the largest numbers of float16: all scores are ties, and gradients are
    finite."""
    q = torch.full((1, 2, rows, 128), 4e4, device="cuda").half().requires_grad_()
    k = torch.full((1, 2, KEYS, 128), 4e4, device="cuda").half().requires_grad_()
    v = torch.randn(1, 2, KEYS, 128, device="cuda").half().requires_grad_()
    out = anyflex.flex_attention(q, k, v, backend=backend)
    assert isinstance(out, Tensor)
    mean = v.float().mean(2, keepdim=True).expand_as(out)
    torch.testing.assert_close(out.float(), mean, atol=2e-3, rtol=2e-3)
    for gradient in torch.autograd.grad(out, (q, k, v), torch.full_like(out, 1e-3)):
        assert not gradient.isnan().any()


@pytest.mark.parametrize("backend", ["cuda", "cuda.triton"])
@pytest.mark.parametrize("rows", ROWS)
def test_a_dead_row_beside_far_ones_stays_dead(rows: int, backend: str) -> None:
    q, k, v = drawn(rows, 64, torch.float16)
    mask = anyflex.create_block_mask(
        lambda b, h, i, j: i != 3, None, None, rows, KEYS, device="cuda"
    )
    out, lse = anyflex.flex_attention(
        q, k, v, made("all lowest", rows), mask, return_lse=True, enable_gqa=True, backend=backend
    )
    assert (out[:, :, 3] == 0).all() and (lse[:, :, 3] == -torch.inf).all()
    assert (lse[:, :, 4:] == LOWEST).all() and out.isfinite().all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()
