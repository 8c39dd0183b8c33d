"""A constant index that leaves a captured tensor, found while the mod is traced."""

from __future__ import annotations

import pytest
import torch

import anyflex
from anyflex.errors import ModIndexError

TABLE = torch.zeros(16)


def test_of_a_score_mod() -> None:
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ModIndexError, match=r"shape \[16\] outside .*index 100") as told:
        anyflex.flex_attention(q, q, q, lambda s, b, h, i, j: s + TABLE[100])
    assert told.value.file == __file__


def test_of_a_mask_mod() -> None:
    with pytest.raises(ModIndexError, match=r"shape \[16\] outside .*index -17"):
        anyflex.create_block_mask(lambda b, h, i, j: TABLE[-17] > j, None, None, 4, 4)
