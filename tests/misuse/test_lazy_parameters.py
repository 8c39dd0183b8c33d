"""Parameters and buffers of lazy modules that were never called are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

import anyflex
from anyflex.errors import ArgumentTypeError

QUERY = torch.ones(1, 2, 8, 4)

CALLS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "query": ("query", lambda x: anyflex.flex_attention(x, QUERY, QUERY)),
    "key": ("key", lambda x: anyflex.flex_attention(QUERY, x, QUERY)),
    "value": ("value", lambda x: anyflex.flex_attention(QUERY, QUERY, x)),
    "read by a score mod": (
        "captured tensor 'x'",
        lambda x: anyflex.flex_attention(QUERY, QUERY, QUERY, lambda s, b, h, q, k: s * x[h]),
    ),
    "a number of a score mod": (
        "captured tensor 'x'",
        lambda x: anyflex.flex_attention(QUERY, QUERY, QUERY, lambda s, b, h, q, k: s * x),
    ),
    "summed by a score mod": (
        "captured tensor 'x'",
        lambda x: anyflex.flex_attention(QUERY, QUERY, QUERY, lambda s, b, h, q, k: s * x.sum()),
    ),
    "read by a mask mod": (
        "captured tensor 'x'",
        lambda x: anyflex.create_block_mask(lambda b, h, q, k: x[q] < k, None, None, 8, 8),
    ),
    "slopes": ("alibi: slopes", anyflex.mods.alibi),
    "sinks": (
        "with_sinks: sink",
        lambda x: anyflex.with_sinks(QUERY, torch.ones(1, 2, 8), x),
    ),
}


@pytest.mark.parametrize("kind", [UninitializedParameter, UninitializedBuffer])
@pytest.mark.parametrize("name", CALLS)
def test_a_parameter_without_a_shape_is_refused_by_name(
    name: str, kind: Callable[[], Tensor]
) -> None:
    said, call = CALLS[name]
    with pytest.raises(ArgumentTypeError, match=f"{said} is an Uninitialized.*call the lazy mod"):
        call(kind())
