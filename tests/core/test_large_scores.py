"""Gradients of the reference for rows whose lse, as a float, is too coarse for their weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import anyflex

LOWEST = torch.finfo(torch.float32).min
MODS: dict[str, Callable[..., Tensor]] = {
    "lowest": lambda s, b, h, q, k: s + LOWEST,
    "raised": lambda s, b, h, q, k: s + 2.0**20,
    "lowered": lambda s, b, h, q, k: s - 2.0**20,
}


@pytest.mark.parametrize("name", MODS)
def test_the_reference_sums_such_rows_anew(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    # Whole numbers and a scale of 1/8: scores are exact.
    query, key = (
        torch.randint(-2, 3, (1, 2, rows, 64), generator=generator).float() for rows in (30, 70)
    )
    value, dout = (torch.randn(1, 2, rows, 64, generator=generator) for rows in (70, 30))
    leaves = [each.requires_grad_() for each in (query, key, value)]
    out = anyflex.flex_attention(*leaves, MODS[name], backend="reference")
    found = torch.autograd.grad(out, leaves, dout)
    wide = [each.detach().double().requires_grad_() for each in leaves]
    scores = MODS[name](wide[0] @ wide[1].mT / 8, None, None, None, None)
    wanted = torch.autograd.grad(scores.softmax(-1) @ wide[2], wide, dout.double())
    for gradient, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient.double(), exact, rtol=1e-5, atol=1e-5)
