"""Every score mod in float32, bfloat16 and float16, within budgets that come from the data.

A result may be off by a few times what rounding the inputs and the saved output in their own type
changes, and what float32 costs the same dense formula.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.testing.mods import SCORE_MODS, Mod, Sizes
from anyflex.testing.oracle import dense_attention, dense_mask
from anyflex.testing.results import Forward, Results, gradients
from tests.soak import SOAK

__all__: list[str] = []

SIZES = Sizes(2, 4, 2, 30, 41)


CASES = list(itertools.product(SCORE_MODS, (torch.float32, torch.bfloat16, torch.float16)))


@pytest.mark.parametrize(("name", "dtype"), CASES[:: 1 if SOAK else 2], ids=str)
def test_a_score_mod_in_a_lower_precision(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)
    mod = SCORE_MODS[name].make(SIZES, generator)
    shapes = [(2, 4, 30, 8), (2, 2, 41, 8), (2, 2, 41, 6)]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    dout = torch.randn((2, 4, 30, 6), generator=generator).to(dtype)
    dlse = torch.randn((2, 4, 30), generator=generator)
    live = dense_mask(lambda b, h, q, k: q + 15 >= k, 1, 1, 30, 41)

    exact = formula(tensors, mod, live, dout, dlse, torch.float64)
    rough = formula(tensors, mod, live, dout, dlse, torch.float32)
    noise = torch.finfo(dtype).eps
    shaken = [
        tensor.double() * (1 + noise * torch.randn(tensor.shape, generator=generator))
        for tensor in tensors
    ]
    # Backward reads the rounded output: its rounding acts like a change of dlse.
    rounding = noise * (dout.double() * exact["out"]).abs().sum(-1)
    shift = rounding * torch.randn(dlse.shape, generator=generator)
    moved = formula(shaken, mod, live, dout, dlse + shift, torch.float64)
    found = by_anyflex(tensors, mod, dout, dlse)
    assert found["out"].dtype is dtype
    assert found["lse"].dtype is found["max_scores"].dtype is torch.float32
    for name_of_grad, leaf in mod.learned.items():
        assert found[name_of_grad].dtype is leaf.dtype
    assert found["dq"].dtype is found["dk"].dtype is found["dv"].dtype is dtype
    for result, value in found.items():
        want = exact[result].double()
        gaps = (rough[result].double() - want).abs(), (moved[result].double() - want).abs()
        precision = torch.finfo(value.dtype).eps
        value = value.double()
        finite = want.isfinite() & value.isfinite()
        if mod.entry.smooth or result in ("out", "lse", "max_scores"):
            same = (want == value) | (want.isnan() & value.isnan())
            assert (same | finite).all(), result
        if finite.any():
            usual = sum(gap[finite].nan_to_num(0.0).max() for gap in gaps)
            budget = 8 * usual + 2 * precision * want[finite].abs().max()
            assert (value - want).abs()[finite].max() <= budget, result


def formula(
    tensors: list[Tensor],
    mod: Mod,
    live: Tensor,
    dout: Tensor,
    dlse: Tensor,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The dense formula in `dtype`, Python numbers included."""
    torch.set_default_dtype(dtype)
    try:
        query, key, value = (tensor.to(dtype).requires_grad_() for tensor in tensors)
        leaves = {
            name: leaf.detach().to(dtype).requires_grad_()
            if leaf.requires_grad and leaf.dtype is not torch.float64
            else leaf
            for name, leaf in mod.leaves.items()
        }
        widened = mod.with_leaves(leaves)
        forward = dense_attention(query, key, value, widened.function(), live)
        inputs = {"dq": query, "dk": key, "dv": value, **widened.learned}
        grads = gradients(forward, inputs, dout.to(dtype), dlse.to(dtype), missing_is_zero=True)
    finally:
        torch.set_default_dtype(torch.float32)
    return Results(forward, grads).named()


def by_anyflex(tensors: list[Tensor], mod: Mod, dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    query, key, value = (tensor.detach().requires_grad_() for tensor in tensors)
    mask = anyflex.create_block_mask(lambda b, h, q, k: q + 15 >= k, 1, 1, 30, 41, BLOCK_SIZE=16)
    out, aux = anyflex.flex_attention(
        query,
        key,
        value,
        mod.function(),
        mask,
        enable_gqa=True,
        return_aux=anyflex.AuxRequest(lse=True, max_scores=True),
    )
    forward = Forward(out, aux.lse, aux.max_scores)
    inputs = {"dq": query, "dk": key, "dv": value, **mod.learned}
    grads = gradients(forward, inputs, dout, dlse, missing_is_zero=False)
    return Results(forward, grads).named()
