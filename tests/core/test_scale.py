"""A scale that no kernel could take is refused before any is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import anyflex
from anyflex.errors import ArgumentError, BackendRefused

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


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_scale_whose_tangent_would_be_lost_is_refused(backend: str | None) -> None:
    query = torch.ones(1, 1, 4, 4)
    with forward_ad.dual_level():
        plain = torch.tensor(0.5)
        assert anyflex.flex_attention(query, query, query, scale=plain, backend=backend).shape  # type: ignore[arg-type]
        dual = forward_ad.make_dual(plain, torch.tensor(1.0))
        with pytest.raises(BackendRefused, match="scale .* forward-mode tangent"):
            anyflex.flex_attention(query, query, query, scale=dual, backend=backend)
    call = lambda scale: anyflex.flex_attention(query, query, query, scale=scale)  # noqa: E731
    with pytest.raises(BackendRefused, match="forward-mode|jvp"):
        torch.func.jvp(call, (torch.tensor(0.5),), (torch.tensor(1.0),))
