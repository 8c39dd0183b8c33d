"""Masks that are bands, and structures that agree with their band or don't."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from anyflex_flash4.bands import Band, find_band, follows
from torch import Tensor

import anyflex
from anyflex.plugin import FULL, MaskViews, ModGraph, parse_graph
from anyflex.testing import posing

MaskMod = Callable[..., Tensor]
OFFSET = torch.tensor(3)


def graph_of(mask_mod: MaskMod) -> ModGraph | None:
    query = torch.empty(1, 1, 256, 64, dtype=torch.bfloat16)
    mask = anyflex.create_block_mask(mask_mod, None, None, 256, 256)
    with posing("cuda", arch="sm_90"):
        explanation = anyflex.explain(query, query, query, block_mask=mask, backend="reference")
    return explanation.selection.spec.mask_graph


@pytest.mark.parametrize(
    ("mask_mod", "band"),
    [
        (lambda b, h, q, k: q >= k, Band(0, None)),
        (lambda b, h, q, k: k <= q, Band(0, None)),
        (lambda b, h, q, k: k < q + 1, Band(0, None)),
        (lambda b, h, q, k: q - k >= 0, Band(0, None)),
        (lambda b, h, q, k: -(k - q) > -1, Band(0, None)),
        (lambda b, h, q, k: q > k, Band(1, None)),
        (lambda b, h, q, k: (q >= k) & (q - k < 64), Band(0, 63)),
        (lambda b, h, q, k: (q - k <= 64) & (k <= q), Band(0, 64)),
        (lambda b, h, q, k: (q - k <= 5) & (k - q <= 7), Band(-7, 5)),
        (lambda b, h, q, k: k - 2 <= q, Band(-2, None)),
        (anyflex.masks.causal(), Band(0, None)),
        (anyflex.masks.causal_window(64), Band(0, 63)),
    ],
)
def test_a_band_is_recognised(mask_mod: MaskMod, band: Band) -> None:
    assert find_band(graph_of(mask_mod)) == band


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q, k: (q >= k) | (k < 10),
        lambda b, h, q, k: q >= 2 * k,
        lambda b, h, q, k: q + k >= 3,
        lambda b, h, q, k: q >= k + h,
        lambda b, h, q, k: q >= k + OFFSET,
        lambda b, h, q, k: q.to(torch.int8) >= k.to(torch.int8),
        lambda b, h, q, k: q.float() >= k.float(),
        lambda b, h, q, k: q == k,
        lambda b, h, q, k: (q // 16) >= (k // 16),
        lambda b, h, q, k: q >= 5,
    ],
)
def test_another_mask_is_no_band(mask_mod: MaskMod) -> None:
    assert find_band(graph_of(mask_mod)) is None


@pytest.mark.parametrize(
    ("band", "arguments"),
    [
        (Band(0, None), {"causal": True}),
        (Band(0, 63), {"window_size_left": 63, "window_size_right": 0}),
        (Band(-7, None), {"window_size_left": None, "window_size_right": 7}),
        (Band(None, 5), {"window_size_left": 5, "window_size_right": None}),
        (Band(1, None), None),
        (Band(None, -1), None),
    ],
)
def test_a_band_becomes_arguments_where_there_are_some(
    band: Band, arguments: dict[str, object] | None
) -> None:
    assert band.arguments() == arguments


def test_a_window_s_length_may_be_a_number_of_the_call() -> None:
    graph = parse_graph(
        "input i64 - q_idx;input i64 - kv_idx;sub i64 0,1 -;number i64 - i1;lt bool 2,3 -;=4"
    )
    assert find_band(graph, (7, 40)) == Band(None, 39)
    assert find_band(graph, (7, 1 << 40)) is None


def views_of(mask_mod: MaskMod, q: int, kv: int, size: int) -> MaskViews:
    mask = anyflex.create_block_mask(mask_mod, None, None, q, kv, BLOCK_SIZE=size)
    return MaskViews(mask.offsets, mask.runs, q, kv, (size, size))


@pytest.mark.parametrize("lengths", [(256, 256), (200, 300), (300, 200), (64, 64)])
def test_a_mask_that_was_built_follows_its_band_and_no_other(lengths: tuple[int, int]) -> None:
    window = views_of(lambda b, h, q, k: (q >= k) & (q - k < 64), *lengths, 32)
    assert follows(window, Band(0, 63))
    # A block that isn't listed hides pairs of a wider one.
    assert not follows(window, Band(0, None)) or max(lengths) <= 64
    assert not follows(window, Band(-100, 100))


def test_structure_that_says_something_else_is_seen() -> None:
    # Structure wins: a block on the diagonal that is called FULL lets all of its pairs through.
    views = views_of(lambda b, h, q, k: q >= k, 256, 256, 128)
    full = views.runs.clone()
    full[:, 2] = FULL
    assert follows(views, Band(0, None))
    assert not follows(MaskViews(views.offsets, full, 256, 256, (128, 128)), Band(0, None))
    fewer = views.runs[:1]
    offsets = torch.tensor([[[0, 1, 1]]], dtype=torch.int32)
    assert not follows(MaskViews(offsets, fewer, 256, 256, (128, 128)), Band(0, None))
