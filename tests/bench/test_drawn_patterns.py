"""Masks and score mods of the benchmark whose tensors are drawn."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import Tensor

from anyflex.bench.case import BenchCase, make_inputs
from anyflex.bench.drawn_patterns import DRAWN_MASKS, DRAWN_MODS, PatternCall
from anyflex.bench.patterns import make_mask_mod, make_score_mod
from anyflex.bench.usage_errors import WrongUsage
from anyflex.tracing.trace import trace_mod

CPU = torch.device("cpu")


def call(*shape: int, dtype: torch.dtype = torch.float32, learns: bool = False) -> PatternCall:
    batch, heads, queries, keys = shape
    return PatternCall((batch, heads, queries, keys), CPU, dtype, learns)


def indices(*shape: int) -> list[Tensor]:
    return [
        torch.arange(size).reshape([size if i == axis else 1 for i in range(4)])
        for axis, size in enumerate(shape)
    ]


def live_pairs(text: str, queries: int, keys: int) -> Tensor:
    mask = make_mask_mod([text], call(1, 1, queries, keys))
    assert mask is not None
    found: Tensor = mask(*indices(1, 1, queries, keys))
    return found.expand(1, 1, queries, keys)[0, 0]


@pytest.mark.parametrize("percent", [1, 10, 60])
def test_each_row_of_blocks_has_the_share_of_them_and_one_at_least(percent: int) -> None:
    live = live_pairs(f"random_blocks:{percent}", 500, 1290)
    whole = live[:384, :1280].reshape(3, 128, 10, 128).float().mean((1, 3))
    assert set(whole.unique().tolist()) <= {0.0, 1.0}
    blocks = live[::128, ::128].sum(1)
    assert blocks.tolist() == [max(1, round(11 * percent / 100))] * 4
    assert torch.equal(live, live_pairs(f"random_blocks:{percent}", 500, 1290))


def test_a_draft_sees_the_prefix_and_its_ancestors() -> None:
    live = live_pairs("random_tree", 64, 100)
    assert bool(live[:, :36].all())
    own = live[:, 36:]
    assert bool(own.diagonal().all()) and not bool(own.triu(1).any())
    # Each draft sees what its parent, its last ancestor, sees.
    for draft in range(1, 64):
        parent = int(own[draft, :draft].nonzero().max())
        assert torch.equal(own[draft, :draft], own[parent, :draft])
    assert 64 < int(own.sum()) < 64 * 65 / 2


def biases(text: str, *shape: int) -> Tensor:
    mod = make_score_mod([text], call(*shape))
    assert mod is not None
    found: Tensor = mod(torch.zeros(shape), *indices(*shape))
    return found


def test_an_image_s_bias_is_a_sum_of_one_by_row_and_one_by_column() -> None:
    found = biases("random_image_bias:8", 2, 3, 40, 28)
    # The last row of the image has four keys.
    image = torch.nn.functional.pad(found, (0, 4)).reshape(2, 3, 40, 4, 8)[..., :3, :]
    of_row = image - image[..., :1, :]
    torch.testing.assert_close(of_row, of_row[..., :1].expand_as(of_row))
    of_column = image - image[..., :1]
    torch.testing.assert_close(of_column, of_column[..., :1, :].expand_as(of_column))
    assert len(of_row.unique()) > 100 and len(of_column.unique()) > 100
    assert not torch.equal(found[0], found[1])


def test_a_dense_bias_is_the_same_one_for_all_heads() -> None:
    found = biases("random_bias", 2, 3, 20, 30)
    assert torch.equal(found, found[:1, :1].expand_as(found))
    assert len(found[0, 0].unique()) == 600


def test_t5_s_keys_after_a_query_have_the_bias_of_its_own_place() -> None:
    found = biases("random_t5:32", 1, 3, 40, 60)
    bias = found[0].reshape(3, 40, 60)
    own = bias.diagonal(dim1=1, dim2=2)
    assert all(bool((bias[:, row, row:] == own[:, row, None]).all()) for row in range(40))
    assert all(len(each.unique()) > 8 for each in bias)


def test_a_table_learns_where_the_call_has_a_backward() -> None:
    case = BenchCase("a", (1, 2, 40, 8), (1, 2, 40, 8), "bfloat16", mods=("random_t5:8",))
    assert make_inputs(case, CPU).learned == ()
    (table,) = make_inputs(dataclasses.replace(case, directions=("backward",)), CPU).learned
    assert table.shape == (8, 2) and table.dtype == torch.float32 and table.requires_grad


def test_drawn_biases_have_query_s_dtype() -> None:
    of_call = call(1, 2, 8, 8, dtype=torch.bfloat16)
    for name in ("random_bias", "random_image_bias:4"):
        mod = make_score_mod([name], of_call)
        assert mod is not None
        captured = trace_mod(mod, "score").captured
        assert {tensor.dtype for tensor in captured} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("option", "text", "example"),
    [
        ("--mask", "random_documents", "random_documents:200,1800"),
        ("--mask", "random_documents:9,9", "random_documents:200,1800"),
        ("--mask", "random_documents:1,2,3", "random_documents:200,1800"),
        ("--mask", "random_blocks", "random_blocks:10"),
        ("--mask", "random_blocks:0", "random_blocks:10"),
        ("--mask", "random_blocks:101", "random_blocks:10"),
        ("--mask", "random_blocks:x", "random_blocks:10"),
        ("--mask", "random_tree:3", "random_tree"),
        ("--mod", "random_image_bias:0", "random_image_bias:64"),
        ("--mod", "random_t5", "random_t5:32"),
        ("--mod", "random_bias:1", "random_bias"),
    ],
)
def test_a_wrong_number_is_told_how_it_is_written(option: str, text: str, example: str) -> None:
    make = make_mask_mod if option == "--mask" else make_score_mod
    message = f"^{re.escape(f'{option} {text}: write it like {example}')}$"
    with pytest.raises(WrongUsage, match=message):
        make([text], call(1, 1, 8, 8))


def test_drafts_need_their_own_keys() -> None:
    with pytest.raises(WrongUsage, match="random_tree: 9 queries have 8 keys, not their own"):
        make_mask_mod(["random_tree"], call(1, 1, 9, 8))


def test_unknown_names_are_told_the_drawn_ones_too() -> None:
    for make, drawn in ((make_mask_mod, DRAWN_MASKS), (make_score_mod, DRAWN_MODS)):
        with pytest.raises(WrongUsage, match=f"known: .*{', '.join(drawn)}$"):
            make(["nowhere"], call(1, 1, 8, 8))
        assert all(pattern.example.startswith(name) for name, pattern in drawn.items())
