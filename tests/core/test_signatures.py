"""The public functions have torch's signatures, and block masks torch's methods."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import anyflex

FUNCTIONS = "flex_attention create_block_mask create_mask and_masks or_masks noop_mask".split()
ADDED = {"flex_attention": ["dropout_p", "sinks", "backend"], "create_block_mask": ["exact"]}
"""Keyword-only parameters that anyflex adds."""

LISTS = {"as_tuple", "full_kv_indices", "full_kv_num_blocks", "kv_indices", "kv_num_blocks"}
"""Members of torch's index lists: `to_torch()` has them."""


def parameters(function: Any) -> list[tuple[str, object, object]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_torchs_parameters(name: str) -> None:
    ours = parameters(getattr(anyflex, name))
    added = [each[0] for each in ours if each[0] in ADDED.get(name, [])]
    assert added == ADDED.get(name, [])
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for each, kind, _ in ours if each in added)
    ours = [each for each in ours if each[0] not in added]
    theirs = parameters(getattr(torch_flex, name))
    if torch.__version__ >= "2.13":
        assert ours == theirs
    else:  # fewer parameters, and other devices by default
        assert [each[0] for each in theirs] == [each[0] for each in ours][: len(theirs)]


@pytest.mark.parametrize("name", ["AuxRequest", "AuxOutput"])
def test_an_auxiliary_tuple_has_torchs_fields(name: str) -> None:
    ours, theirs = getattr(anyflex, name), getattr(torch_flex, name)
    assert ours._fields == theirs._fields
    assert ours._field_defaults == theirs._field_defaults


def test_a_block_mask_has_torchs_methods() -> None:
    ours, theirs = anyflex.BlockMask, torch_flex.BlockMask
    public = {name for name in vars(theirs) if not name.startswith("_")}
    assert {name for name in public if not hasattr(ours, name)} - LISTS == set()
    for name in sorted(public - LISTS):
        if callable(getattr(theirs, name)):
            wanted, found = parameters(getattr(theirs, name)), parameters(getattr(ours, name))
            assert [each[0] for each in found][: len(wanted)] == [each[0] for each in wanted], name
