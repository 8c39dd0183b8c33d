"""Answers of `cuda.torch` to specs: CPU tensors stand in for the device, nothing is computed."""

from __future__ import annotations

import torch

import anyflex
from anyflex.testing import posing


def explained(**more: object) -> dict[str, object]:
    query = torch.empty(1, 4, 256, 64, dtype=torch.bfloat16, requires_grad=True)
    with posing("cuda"):
        found = anyflex.explain(query, query, query, backend="cuda.torch", **more)
    return found.to_dict()


def test_training_is_taken() -> None:
    assert explained()["backend"] == "cuda.torch"


def test_blocks_of_any_size_are_taken() -> None:
    mask = anyflex.create_block_mask(
        lambda b, h, q, k: q >= k, None, None, 256, 256, BLOCK_SIZE=48
    )
    assert explained(block_mask=mask)["backend"] == "cuda.torch"


def test_a_score_mod_that_ignores_the_score_is_taken() -> None:
    assert explained(score_mod=lambda s, b, h, q, k: q * 0.5)["backend"] == "cuda.torch"


def test_captured_tensors_that_learn_are_refused() -> None:
    slopes = torch.zeros(4, requires_grad=True)
    found = explained(score_mod=lambda s, b, h, q, k: s + slopes[h])
    assert "the gradient of captured is not supported" in str(found)
