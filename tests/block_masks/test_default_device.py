"""torch's default device doesn't matter: masks are built and read on the CPU.

A program that computes on another device often makes it the default for new tensors. Here that is
meta, on which any value that is read raises.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import anyflex
from anyflex import masks
from anyflex.errors import ArgumentError, BlockMaskError
from anyflex.frontend.checked_call import CheckedCall
from anyflex.frontend.custom_ops import flex_attention_op
from anyflex.frontend.op_call import op_arguments

__all__: list[str] = []

IDS = torch.arange(256) // 20
RANDOM = torch.randint(0, 50, (256,), generator=torch.Generator().manual_seed(3))
PLACES = torch.rand(256, generator=torch.Generator().manual_seed(4))
TABLE = PLACES[:, None] * PLACES < 0.2
ROWS = torch.stack([IDS, RANDOM])
EDGES, PARENTS = torch.tensor([0, 10, 70, 256]), torch.tensor([-1, 0, 0, 1, 1])

MASKS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, k: q >= k,
    "documents": lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k),
    "random ids": lambda b, h, q, k: RANDOM[q] == RANDOM[k],
    "ids by batch entry": lambda b, h, q, k: ROWS[b, q] == ROWS[b, k],
    "table": lambda b, h, q, k: TABLE[q, k],
    "floats": lambda b, h, q, k: torch.tanh(PLACES[q] * 2 - PLACES[k].exp()) < 0.1,
    "casts": lambda b, h, q, k: (
        torch.where(q > 99, (q >= k).float(), PLACES[k] + (b % 2)).minimum(PLACES[q]) > 0.4
    ),
    "hash": lambda b, h, q, k: (q * 7919 + k * 104729) % 97 != 5,
    "rows from the end": lambda b, h, q, k: IDS[q - 256] == IDS[k],
    "not traceable": lambda b, h, q, k: torch.special.bessel_j0((q - k).float()) > 0.1,
}


@pytest.mark.parametrize("name", sorted(MASKS))
def test_masks_are_built_as_ever(name: str) -> None:
    def build() -> anyflex.BlockMask:
        return anyflex.create_block_mask(MASKS[name], 2, 1, 256, 200, BLOCK_SIZE=16)

    wanted = build()
    with torch.device("meta"):
        found = build()
    assert found == wanted


USES: dict[str, Callable[[anyflex.BlockMask], Any]] = {
    "rows": lambda mask: mask.row_slice(5, 90),
    "rows of blocks": lambda mask: mask[:, :, 1:5],
    "every other row of blocks": lambda mask: mask[:, :, ::2],
    "chosen rows of blocks": lambda mask: mask[0, 0, [3, 0]],
    "longer": lambda mask: mask.extend(250, 256),
    "transposed": lambda mask: mask.views().transposed().runs,
    "dense": lambda mask: mask.to_dense(),
    "drawn": lambda mask: mask.to_string(),
    "html": lambda mask: mask._repr_html_(),
    "torch's and back": lambda mask: anyflex.BlockMask.from_torch(mask.to_torch()),
    "runs": lambda mask: anyflex.BlockMask.from_runs(
        mask.offsets, mask.runs, seq_lengths=(256, 200), block_size=16, mask_mod=mask.mask_mod
    ),
}


@pytest.mark.parametrize("name", sorted(USES))
def test_masks_are_used_as_ever(name: str) -> None:
    mask_mod = MASKS["documents"]
    first, second = (
        anyflex.create_block_mask(mask_mod, 1, 1, 256, 200, BLOCK_SIZE=16) for _ in range(2)
    )
    wanted = USES[name](first)
    with torch.device("meta"):
        found = USES[name](second)
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    else:
        assert found == wanted


def test_ready_made_masks_are_made_as_ever() -> None:
    for make in (lambda: masks.document_offsets(EDGES), lambda: masks.tree(PARENTS)):
        wanted = anyflex.create_mask(make(), 1, 1, 5, 5)
        with torch.device("meta"):
            made = make()
        assert torch.equal(anyflex.create_mask(made, 1, 1, 5, 5), wanted)


def test_attention_with_a_mask_is_what_it_is() -> None:
    mask = anyflex.create_block_mask(MASKS["documents"], 1, 1, 256, 256, BLOCK_SIZE=16)
    query = torch.linspace(-1, 1, 256 * 8).view(1, 1, 256, 8)

    def bias(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score - (q - k) * 0.1

    wanted = anyflex.flex_attention(query, query, query, bias, block_mask=mask)
    with torch.device("meta"):
        found = anyflex.flex_attention(query, query, query, bias, block_mask=mask)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["compiled", "watched"])
def test_attention_through_the_static_op_is_what_it_is(way: str) -> None:
    query = torch.linspace(-1, 1, 20 * 8).view(1, 1, 20, 8).requires_grad_()

    def attend(query: torch.Tensor) -> torch.Tensor:
        out = anyflex.flex_attention(query, query, query, lambda s, b, h, q, k: s - (q - k) * 0.1)
        assert isinstance(out, torch.Tensor)
        return out

    wanted = attend(query)
    (gradient,) = torch.autograd.grad(wanted.square().sum(), query)
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with torch.device("meta"):
        if way == "compiled":
            found = compiled(query)
        else:
            with FlopCounterMode(display=False):
                found = attend(query)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        (again,) = torch.autograd.grad(found.square().sum(), query)
    torch.testing.assert_close(again, gradient, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["eager", "watched", "compiled"])
def test_a_mask_on_meta_is_refused(way: str) -> None:
    mask = anyflex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 20, 20).to("meta")
    query = torch.ones(1, 1, 20, 8)
    torch._dynamo.reset()
    attend = anyflex.flex_attention
    if way == "compiled":
        attend = torch.compile(attend, backend="aot_eager")
    watching = FlopCounterMode(display=False) if way == "watched" else nullcontext()
    with watching, pytest.raises(BlockMaskError, match="on meta, where it has no values"):
        attend(query, query, query, block_mask=mask)


def test_the_static_op_takes_no_tensor_of_meta_among_others() -> None:
    query = torch.ones(1, 1, 20, 8)
    mask = anyflex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 20, 20)
    call = CheckedCall(query, query, query, None, mask, 1.0, anyflex.AuxRequest(), (), None, 0)
    arguments, _, _ = op_arguments(call)
    (offsets, runs, *numbers), *rest = arguments
    moved = [offsets.to("meta"), runs.to("meta"), *numbers]
    with pytest.raises(ArgumentError, match="another tensor of the call on meta"):
        flex_attention_op(query, query, query, moved, *rest)
