"""Error of `fast_tanh` on a Hopper GPU: 2^-11 of the cap, as docs/cuda.md says.

With one key lse is a row's only score, after the cap; a gradient that arrives at lse is weighted
by the cap's slope alone, which is 1 less the square of the tanh.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import anyflex

__all__: list[str] = []

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="there is no Hopper GPU on this machine",
)

ROWS = 4096


@pytest.mark.parametrize("cap", [1.0, 20.0, 50.0, 256.0])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_capped_score_is_off_by_a_2048th_of_the_cap_at_most(dim: int, cap: float) -> None:
    generator = torch.Generator().manual_seed(dim)
    # Scores from beyond one end of the cap to beyond the other.
    spread = torch.linspace(-4, 4, ROWS)[:, None] * cap * math.sqrt(dim)
    k = torch.randn(1, 4, 1, dim, generator=generator)
    q = spread * k / k.square().sum(-1, keepdim=True)
    q, k = (x.to("cuda", torch.bfloat16) for x in (q, k))
    v = torch.randn(1, 4, 1, dim, device="cuda", dtype=torch.bfloat16)
    # Kernels with the fast tanh: all three, or forward alone, while backward is the portable
    # kernels'.
    for x in (q, k, v):
        x.requires_grad_()

    def capped(s: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return cap * torch.tanh(s / cap)

    options = {"cuda": {"fast_tanh": True}}
    asked: dict[str, Any] = {
        "score_mod": capped,
        "kernel_options": options,
        "return_aux": anyflex.AuxRequest(lse=True),
    }
    assert "fast tanh" in str(anyflex.explain(q, k, v, **asked).variant)
    _, aux = anyflex.flex_attention(q, k, v, **asked)
    assert aux.lse is not None
    (found,) = torch.autograd.grad(aux.lse.sum(), q)

    scale = 1 / math.sqrt(dim)
    q, k = q.detach().double(), k.detach().double()
    tanh = torch.tanh(q @ k.mT * scale / cap)
    off = (aux.lse.double() - cap * tanh[..., 0]).abs().max().item()
    assert off <= cap * 2**-11 * 1.01, off / cap
    # It must differ from tanh itself, or nothing has been tested.
    assert off > cap * 2**-20
    wanted = (1 - tanh.square()) * k * scale
    bound = k.abs() * scale * 2**-10 + wanted.abs() * 2**-7
    assert bool(((found.double() - wanted).abs() <= bound).all())
