"""Pairs of score and mask mod that have broken implementations, against the dense formula."""

from __future__ import annotations

import pytest
import torch

import anyflex
from anyflex.testing.mods import MASK_MODS, SCORE_MODS, Sizes
from anyflex.testing.oracle import dense_attention, dense_mask
from anyflex.testing.results import Forward, Results, gradients
from tests.oracles.differences import differences

__all__: list[str] = []

pytestmark = pytest.mark.usefixtures("float64_numbers")

COMBINATIONS = {
    # (score mod, mask mod): (L, S, kv batch)
    ("alibi_learned", "window_head"): (129, 200, 2),
    ("bias_transposed", "random_spans"): (129, 200, 2),
    ("softcap", "causal_bottom_right"): (150, 70, 2),
    ("dead_rows_by_score", "causal"): (129, 129, 2),
    ("ignores_score", "doc_permuted"): (100, 140, 2),
    ("nan_one_pair", "dead_columns"): (64, 96, 2),
    ("big_scores", "first_block_dead"): (40, 257, 2),
    ("very_low", "all_false"): (65, 65, 2),
    ("key_norm_gqa", "padding"): (90, 130, 1),
    ("temperature", "decode_position"): (1, 300, 2),
    ("graphormer", "block_table_head"): (100, 120, 2),
    ("scatter_collide", "causal"): (1024, 1024, 2),
    ("mixed_tables", "batch_head_mix"): (70, 90, 2),
    ("rounded", "hash_mask"): (129, 257, 2),
}


@pytest.mark.parametrize("names", COMBINATIONS, ids="-".join)
def test_a_combination_that_has_broken_implementations(names: tuple[str, str]) -> None:
    q_length, kv_length, kv_batch = COMBINATIONS[names]
    large = q_length >= 1024
    batch = 1 if large else 2
    sizes = Sizes(batch, 2 if large else 4, 2, q_length, kv_length)
    generator = torch.Generator().manual_seed(7)
    score = SCORE_MODS[names[0]].make(sizes, generator, torch.float64)
    mask = MASK_MODS[names[1]].make(sizes, generator, torch.float64)
    if names[0] == "nan_one_pair":
        mask.leaves["ok"][0] = False
    if names[1] == "all_false":
        assert not dense_mask(mask.function(), 1, 1, q_length, kv_length).any()

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    query = draw(batch, sizes.heads, q_length, 8).requires_grad_()
    key = draw(min(kv_batch, batch), sizes.kv_heads, kv_length, 8).requires_grad_()
    value = draw(min(kv_batch, batch), sizes.kv_heads, kv_length, 5).requires_grad_()
    dout, dlse = draw(*query.shape[:3], 5), draw(*query.shape[:3])
    inputs = {"dq": query, "dk": key, "dv": value, **score.learned}

    live = dense_mask(mask.function(), batch, sizes.heads, q_length, kv_length)
    forward = dense_attention(query, key, value, score.function(), live)
    wanted = Results(forward, gradients(forward, inputs, dout, dlse, missing_is_zero=True))

    torch.use_deterministic_algorithms(True)
    try:
        block_mask = anyflex.create_block_mask(
            mask.function(), batch, sizes.heads, q_length, kv_length, BLOCK_SIZE=(32, 128)
        )
        out, aux = anyflex.flex_attention(
            query,
            key,
            value,
            score.function(),
            block_mask,
            enable_gqa=True,
            return_aux=anyflex.AuxRequest(lse=True, max_scores=True),
        )
        forward = Forward(out, aux.lse, aux.max_scores)
        found = Results(forward, gradients(forward, inputs, dout, dlse, missing_is_zero=False))
    finally:
        torch.use_deterministic_algorithms(False)
    assert differences(found, wanted) == []


@pytest.mark.parametrize("name", ["ignores_score", "constant_score", "rounded"])
def test_a_score_mod_without_derivative_gives_exact_zeros(name: str) -> None:
    sizes = Sizes(1, 2, 1, 20, 30)
    generator = torch.Generator().manual_seed(3)
    score = SCORE_MODS[name].make(sizes, generator, torch.float64)
    query, key, value = (
        torch.randn((1, 2, length, 4), generator=generator).requires_grad_()
        for length in (20, 30, 30)
    )
    anyflex.flex_attention(query, key, value, score.function()).square().sum().backward()
    for tensor in (query, key):
        assert tensor.grad is not None
        assert not tensor.grad.any()
    assert value.grad is not None and value.grad.any()


def test_a_nan_stays_in_its_row() -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn((1, 2, 20, 4), generator=generator) for _ in range(3))
    score = SCORE_MODS["nan_one_pair"].make(Sizes(1, 2, 1, 20, 20), generator, torch.float64)
    out = anyflex.flex_attention(query, key, value, score.function())
    assert out[:, :, 1].isnan().all()
    assert out[:, :, [0, *range(2, 20)]].isfinite().all()


def test_captured_tensors_may_change_in_value_and_length() -> None:
    generator = torch.Generator().manual_seed(5)
    for length in (40, 73):
        sizes = Sizes(1, 2, 1, length, length)
        score = SCORE_MODS["bias_twice"].make(sizes, generator, torch.float64)
        mask = MASK_MODS["doc_sorted"].make(sizes, generator, torch.float64)
        query, key, value = (torch.randn((1, 2, length, 4), generator=generator) for _ in "qkv")
        block_mask = anyflex.create_block_mask(mask.function(), 1, 1, length, length)
        live = dense_mask(mask.function(), 1, 1, length, length)
        wanted = Results(dense_attention(query, key, value, score.function(), live))
        out = anyflex.flex_attention(query, key, value, score.function(), block_mask)
        expected = Results(Forward(wanted.forward.out))
        assert differences(Results(Forward(out)), expected) == []
