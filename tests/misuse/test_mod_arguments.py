"""Mods that take other arguments than they are given, also where no signature tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import anyflex
from anyflex.errors import BlockMaskError, ModTraceError
from anyflex.mods import compose

__all__: list[str] = []

QUERY = torch.zeros(1, 1, 8, 4)
SCORE = r"score_mod can't be called as f\(score, b, h, q_idx, kv_idx\), with 5 arguments: .*"
MASK = r"mask_mod can't be called as f\(b, h, q_idx, kv_idx\), with 4 arguments: .*"


class OfThree(torch.nn.Module):
    def forward(self, x: Any, y: Any, z: Any) -> Any:
        return x


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def named(b: Any, h: Any, q: Any, k: Any, *, window: Any) -> Any:
    return q - k < window


def scaled(score: Any, b: Any, h: Any, q: Any, k: Any, *, by: Any) -> Any:
    return score * by


def of_three(x: Any, y: Any, z: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("mod", "message"),
    [
        (scaled, "missing 1 required keyword-only argument: 'by'"),
        (int, "at most 2 arguments"),
        (compose(scaled), "missing 1 required keyword-only argument: 'by'"),
    ],
)
def test_a_score_mod_of_other_arguments_is_refused(mod: Any, message: str) -> None:
    with pytest.raises(ModTraceError, match=SCORE + message):
        anyflex.flex_attention(QUERY, QUERY, QUERY, mod)


@pytest.mark.parametrize(
    ("mod", "message"),
    [
        (named, "missing 1 required keyword-only argument: 'window'"),
        (anyflex.or_masks(named), "missing 1 required keyword-only argument: 'window'"),
    ],
)
def test_a_mask_mod_of_other_arguments_is_refused(mod: Any, message: str) -> None:
    with pytest.raises(BlockMaskError, match=MASK + message):
        anyflex.create_block_mask(mod, 1, 1, 8, 8)


@pytest.mark.parametrize("join", [anyflex.and_masks, anyflex.or_masks])
def test_a_joined_mask_mod_of_other_arguments_is_refused_by_its_position(
    join: Callable[..., Any],
) -> None:
    with pytest.raises(BlockMaskError, match=f"^{join.__name__}: argument 1 takes 3 positional"):
        join(causal, of_three)


def test_a_composed_score_mod_of_other_arguments_is_refused_by_its_position() -> None:
    with pytest.raises(ModTraceError, match=r"^compose: argument 2 takes 4 .* called as f\(score"):
        compose(lambda s, b, h, q, k: s, lambda *everything: everything[0], causal)


def test_members_that_take_anything_or_have_defaults_are_right() -> None:
    window = anyflex.and_masks(causal, lambda *_: _[2] >= 0, lambda b, h, q, k, n=3: q < k + n)
    kept = torch.ones(8, 8, dtype=torch.bool).tril().triu(-2)
    assert torch.equal(anyflex.create_mask(window, 1, 1, 8, 8, device="cpu")[0, 0], kept)


def test_a_type_error_of_the_mod_s_own_stays_what_it_is() -> None:
    with pytest.raises(TypeError, match=r"of_three\(\) missing 2 required") as caught:
        anyflex.flex_attention(QUERY, QUERY, QUERY, lambda s, b, h, q, k: of_three(*[s]))
    assert not isinstance(caught.value, ModTraceError)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (ModTraceError, lambda: anyflex.flex_attention(QUERY, QUERY, QUERY, OfThree())),
        (ModTraceError, lambda: compose(OfThree())),
        (BlockMaskError, lambda: anyflex.create_block_mask(OfThree(), 1, 1, 8, 8)),
        (BlockMaskError, lambda: anyflex.and_masks(causal, OfThree())),
    ],
)
def test_a_module_of_other_arguments_is_refused(error: Any, call: Any) -> None:
    with pytest.raises(error, match="takes 3 positional arguments; it is called as f"):
        call()
