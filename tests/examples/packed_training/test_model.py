"""The model: the keys that a position sees, and that every parameter is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import anyflex
from packed_training.gradient_check import (
    check_gradients,
    dense_attention,
    dense_mask,
)
from packed_training.model import ByteTransformer, packed_mask
from packed_training.sampling import sample_text

TOKENS = torch.tensor([[5, 6, 0, 7, 8, 9, 0, 3, 4, 5], [0, 9, 8, 7, 6, 5, 4, 3, 2, 1]])


def _logits(model: ByteTransformer, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens, anyflex.flex_attention).detach()


@pytest.mark.parametrize("changed", range(10))
def test_a_position_sees_its_own_document_up_to_itself(
    model: ByteTransformer, changed: int
) -> None:
    other = TOKENS.clone()
    other[0, changed] = 100 if TOKENS[0, changed] else 0
    before, after = _logits(model, TOKENS), _logits(model, other)
    differs = (before - after).abs().amax(-1) > 1e-6
    document = [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    if TOKENS[0, changed]:
        expected = [
            place >= changed and document[place] == document[changed] for place in range(10)
        ]
        assert differs[0].tolist() == expected
    assert not differs[1].any()


def test_the_mask_of_anyflex_is_the_matrix_of_the_check() -> None:
    mask = packed_mask(TOKENS)
    dense = anyflex.create_mask(mask.mask_mod, 2, 1, 10, 10)
    assert torch.equal(dense, dense_mask(TOKENS))


def test_the_dense_formula_gives_the_same_logits(model: ByteTransformer) -> None:
    dense = model(TOKENS, dense_attention, dense_mask(TOKENS))
    torch.testing.assert_close(_logits(model, TOKENS), dense.detach(), rtol=1e-4, atol=1e-5)


def _rows() -> torch.Tensor:
    rows = torch.randint(1, 256, (2, 81), generator=torch.Generator().manual_seed(0))
    rows[:, ::17] = 0
    return rows


def test_gradients_of_every_parameter_are_right(model: ByteTransformer) -> None:
    check = check_gradients(model, _rows(), anyflex.flex_attention)
    assert check.passed
    assert check.parameters == len(list(model.parameters()))
    assert 0 < check.error <= check.limit


def test_the_score_mods_parameters_get_gradients(model: ByteTransformer) -> None:
    model.loss(_rows(), anyflex.flex_attention).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def _wrong_scale(query: Any, key: Any, value: Any, **mods: Any) -> Any:
    return anyflex.flex_attention(query * 1.001, key, value, **mods)


def _cut_off(query: Any, key: Any, value: Any, **mods: Any) -> Any:
    """Right numbers forward; a part of the gradient of `value` is missing."""
    return anyflex.flex_attention(query, key, value, **mods) + 0.01 * (value.detach() - value)


def _not_a_number(query: Any, key: Any, value: Any, **mods: Any) -> Any:
    return anyflex.flex_attention(query, key, value, **mods) * float("nan")


@pytest.mark.parametrize("attention", [_wrong_scale, _cut_off, _not_a_number])
def test_the_check_finds_wrong_gradients(model: ByteTransformer, attention: Any) -> None:
    check = check_gradients(model, _rows(), attention)
    assert not check.passed
    assert not check.error <= check.limit


def test_text_begins_with_the_prompt_and_repeats_with_the_seed(model: ByteTransformer) -> None:
    def sample(seed: int) -> str:
        return sample_text(
            model, anyflex.flex_attention, prompt=b"def f", count=12, context=10, seed=seed
        )

    assert sample(1).startswith("def f")
    assert sample(1) == sample(1) != sample(2)
