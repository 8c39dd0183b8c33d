"""Compiled calls use a mask's derived views, as eager calls do, and derive nothing again."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.mask_structure import views_registry
from anyflex.mask_structure.device_views import MaskViews

__all__: list[str] = []


def causal(length: int = 64) -> Any:
    return anyflex.create_block_mask(
        lambda b, h, q, k: q >= k, None, None, length, length, BLOCK_SIZE=16
    )


def found(mask: Any, offsets: Tensor | None = None, runs: Tensor | None = None) -> Any:
    return views_registry.find(
        mask.offsets if offsets is None else offsets,
        mask.runs if runs is None else runs,
        mask.seq_lengths,
        mask.BLOCK_SIZE,
    )


@pytest.mark.parametrize("way", ["made", "sliced", "rows", "extended", "runs", "pickled"])
def test_a_masks_views_are_found_by_its_tensors(way: str) -> None:
    mask = causal()
    if way == "sliced":
        mask = mask[0, 0, 1:3]
    elif way == "rows":
        mask = mask.row_slice(16, 32)
    elif way == "extended":
        mask = mask.extend(96, 96)
    elif way == "runs":
        mask = anyflex.BlockMask.from_runs(
            mask.offsets.clone(),
            mask.runs.clone(),
            seq_lengths=mask.seq_lengths,
            block_size=16,
            mask_mod=mask.mask_mod,
        )
    elif way == "pickled":
        state = mask.__getstate__()
        mask = type(mask).__new__(type(mask))
        mask.__setstate__(state)
    assert found(mask) is not None
    assert found(mask) is mask.views()
    assert found(mask, mask.offsets.detach()) is mask.views()


def test_other_memory_and_other_sizes_are_not_the_mask() -> None:
    mask = causal()
    assert found(mask, mask.offsets.clone()) is None
    assert found(mask, runs=mask.runs.clone()) is None
    assert found(mask, mask.offsets[:, :, :-1]) is None
    assert found(mask, runs=mask.runs[:-1]) is None
    assert found(mask, runs=mask.runs.as_strided(mask.runs.shape, (0, 1))) is None
    assert views_registry.find(mask.offsets, mask.runs, (64, 48), (16, 16)) is None
    assert views_registry.find(mask.offsets, mask.runs, (64, 64), (16, 8)) is None


def test_views_live_as_long_as_their_mask() -> None:
    mask = causal()
    offsets, runs, lengths, sizes = mask.offsets, mask.runs, mask.seq_lengths, mask.BLOCK_SIZE
    del mask
    gc.collect()
    assert views_registry.find(offsets, runs, lengths, sizes) is None


def test_masks_of_the_same_tensors_share_their_views() -> None:
    mask = causal()
    twin = copy.copy(mask)
    assert twin.views() is mask.views()
    del twin
    gc.collect()
    assert found(mask) is mask.views()


def test_a_mask_may_be_built_inside_of_a_transform() -> None:
    def build(x: Tensor) -> Tensor:
        mask = causal()
        assert mask.views() is mask.views()
        return x.sum()

    assert torch.func.grad(build)(torch.ones(3)).sum() == 3


def test_a_mask_of_inference_mode_is_found() -> None:
    with torch.inference_mode():
        mask = causal()
    assert found(mask) is mask.views()


def test_compiled_training_derives_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    transposed: list[MaskViews] = []
    transpose = MaskViews._transpose

    def counted(self: MaskViews) -> MaskViews:
        transposed.append(self)
        return transpose(self)

    monkeypatch.setattr(MaskViews, "_transpose", counted)
    copied: list[Any] = []
    monkeypatch.setattr("anyflex.frontend.custom_ops._copied_views", lambda *_: copied.append(_))
    torch._dynamo.reset()
    attention = torch.compile(anyflex.flex_attention, backend="aot_eager", fullgraph=True)
    query = torch.randn(1, 2, 64, 16, requires_grad=True)
    for mask in (causal(), anyflex.create_block_mask(
        lambda b, h, q, k: q <= k, None, None, 64, 64, BLOCK_SIZE=16
    )):  # fmt: skip
        for _ in range(3):
            wanted = torch.autograd.grad(
                anyflex.flex_attention(query, query, query, block_mask=mask).sum(), query
            )
            result = attention(query, query, query, block_mask=mask)
            assert torch.equal(torch.autograd.grad(result.sum(), query)[0], wanted[0])
    assert not copied
    assert len(transposed) <= 2
