"""Every mod of the list gives the same under torch.compile(fullgraph=True) as eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.testing.mods import MASK_MODS, SCORE_MODS, Mod, Sizes
from tests.soak import SOAK

__all__: list[str] = []

SIZES = Sizes(2, 4, 2, 21, 37)


def inputs(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, 21, 8), (2, 2, 37, 8), (2, 2, 37, 6)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def compiled(attend: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(attend, backend="eager", fullgraph=True)


@pytest.mark.parametrize("name", list(SCORE_MODS)[:: 1 if SOAK else 16])
def test_a_compiled_score_mod(name: str) -> None:
    mod = SCORE_MODS[name].make(SIZES, torch.Generator().manual_seed(1))
    tensors = [*inputs(2), *mod.learned.values()]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return anyflex.flex_attention(query, key, value, mod.function(), enable_gqa=True)

    compare(attend, mod, tensors)


@pytest.mark.parametrize("name", list(MASK_MODS)[:: 1 if SOAK else 16])
def test_a_compiled_call_with_a_block_mask(name: str) -> None:
    mask = MASK_MODS[name].make(SIZES, torch.Generator().manual_seed(1))
    score = SCORE_MODS["alibi_learned"].make(SIZES, torch.Generator().manual_seed(3))
    block_mask = anyflex.create_block_mask(mask.function(), 2, 4, 21, 37, BLOCK_SIZE=16)
    tensors = [*inputs(2), *score.learned.values()]
    score_mod = score.function()

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return anyflex.flex_attention(query, key, value, score_mod, block_mask, enable_gqa=True)

    compare(attend, score, tensors)


def compare(attend: Callable[..., Tensor], mod: Mod, tensors: list[Tensor]) -> None:
    wanted = attend(*tensors[:3])
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(9))
    wanted_grads = torch.autograd.grad(wanted, tensors, weights)
    found = compiled(attend)(*tensors[:3])
    grads = torch.autograd.grad(found, tensors, weights)
    for a, b in zip([found, *grads], [wanted, *wanted_grads], strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_the_function_itself_can_be_compiled() -> None:
    mod = SCORE_MODS["t5_buckets"].make(SIZES, torch.Generator().manual_seed(1))
    mask = anyflex.create_block_mask(lambda b, h, q, k: q >= k - 3, 1, 1, 21, 37, BLOCK_SIZE=16)
    query, key, value = inputs(2)
    request = anyflex.AuxRequest(lse=True, max_scores=True)
    arguments: Any = (query, key, value, mod.function(), mask, 0.3, True)
    wanted, wanted_aux = anyflex.flex_attention(*arguments, return_aux=request)
    for fullgraph in (False, True):
        torch._dynamo.reset()
        attend = torch.compile(anyflex.flex_attention, backend="eager", fullgraph=fullgraph)
        found, aux = attend(*arguments, return_aux=request)
        assert torch.equal(found, wanted)
        assert torch.equal(aux.lse, wanted_aux.lse)
        assert torch.equal(aux.max_scores, wanted_aux.max_scores)
