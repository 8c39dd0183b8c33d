"""A scale that no kernel could take is refused before any is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import anyflex
from anyflex.errors import ArgumentError

__all__: list[str] = []


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (2**63, "64 bits"),
        (-(10**400), "64 bits"),
        (torch.tensor(1.0, device="meta"), "meta"),
        (float("inf"), "finite"),
    ],
)
def test_a_scale_out_of_range_is_refused(scale: Any, message: str) -> None:
    query = torch.ones(1, 1, 4, 4)
    with pytest.raises(ArgumentError, match=message):
        anyflex.flex_attention(query, query, query, scale=scale)
