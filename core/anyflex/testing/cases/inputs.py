"""Inputs with non-finite values and very different magnitudes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from anyflex.testing.attention_case import ALL, QKV
from anyflex.testing.case_types import Group, row

__all__ = ["CASES"]

CASES = Group("inputs")


def nan_in_dead_keys(tensors: dict[str, Tensor]) -> None:
    """NaN in the last two keys and values, which causal rows don't reach."""
    for name in ("key", "value"):
        tensors[name][..., -2:, ::3] = math.nan


def infinity_in_dead_keys(tensors: dict[str, Tensor]) -> None:
    """Infinities in the last two keys and values, which causal rows don't reach."""
    tensors["key"][..., -2:, :] = math.inf
    tensors["value"][..., -1, :] = -math.inf


def nan_in_dead_rows(tensors: dict[str, Tensor]) -> None:
    """NaN in the last two queries."""
    tensors["query"][..., -2:, :] = math.nan


def infinite_gradient_of_dead_lse(tensors: dict[str, Tensor]) -> None:
    """Infinite gradients of dead rows' lse: those of lse ** 2 where lse is -inf."""
    tensors["dlse"][..., -2:] = -math.inf


def nan_in_later_keys(tensors: dict[str, Tensor]) -> None:
    """NaN in a key and in another key's value that some rows reach and earlier ones don't."""
    tensors["key"][..., 20, 0] = math.nan
    tensors["value"][..., 30, 1] = math.nan


def nan_in_a_query(tensors: dict[str, Tensor]) -> None:
    """One query row holds a NaN."""
    tensors["query"][0, 0, 1, 0] = math.nan


def infinity_in_a_key(tensors: dict[str, Tensor]) -> None:
    """A key whose scores are infinite, of the sign of the query's first element."""
    tensors["key"][..., 3, 0] = math.inf


def infinity_in_a_value(tensors: dict[str, Tensor]) -> None:
    """One element of one value is infinite."""
    tensors["value"][0, 0, 3, 0] = -math.inf


def larger_scores_later(tensors: dict[str, Tensor]) -> None:
    """Keys grow along the sequence, so that the running maximum rises from tile to tile."""
    length = tensors["key"].shape[2]
    tensors["key"].mul_(torch.linspace(0.1, 5.0, length, dtype=torch.float64).view(-1, 1))


def larger_scores_earlier(tensors: dict[str, Tensor]) -> None:
    """Keys shrink along the sequence."""
    length = tensors["key"].shape[2]
    tensors["key"].mul_(torch.linspace(5.0, 0.1, length, dtype=torch.float64).view(-1, 1))


def huge(tensors: dict[str, Tensor]) -> None:
    """Scores of some thousands, values near 1e4."""
    tensors["query"].mul_(30)
    tensors["key"].mul_(30)
    tensors["value"].mul_(5e3)


def tiny(tensors: dict[str, Tensor]) -> None:
    """Scores of about 1e-8, values near 1e-3."""
    for name, factor in (("query", 1e-4), ("key", 1e-4), ("value", 1e-3)):
        tensors[name].mul_(factor)


CASES.compare(
    {"gradients": QKV},
    nan_in_dead_keys=row(
        "NaN in a dead key or value doesn't reach any result",
        (10, 14),
        mask_mod="causal",
        values=nan_in_dead_keys,
        dlse=True,
    ),
    nan_in_dead_keys_and_mod=row(
        "NaN in a dead key doesn't reach a captured tensor's gradient",
        (70, 90),
        heads=(4, 2),
        score_mod="squared_table",
        mask_mod="causal",
        values=nan_in_dead_keys,
        gradients=ALL,
    ),
    infinity_in_dead_keys=row(
        "infinities in a dead key or value don't reach any result",
        (10, 14),
        mask_mod="causal",
        values=infinity_in_dead_keys,
    ),
    nan_in_dead_rows=row(
        "NaN in a query that sees no key doesn't reach any result",
        (40, 38),
        mask_mod="anti_causal",
        values=nan_in_dead_rows,
    ),
    infinite_gradient_of_dead_lse=row(
        "what arrives at lse of a row that sees no key is dropped",
        (40, 38),
        mask_mod="anti_causal",
        values=infinite_gradient_of_dead_lse,
        dlse=True,
    ),
    nan_for_some_rows=row(
        "NaN in a key or value reaches the rows that visit it, and no other",
        mask_mod="causal",
        values=nan_in_later_keys,
        gradients=frozenset({"q"}),
    ),
    nan_pair_is_dead=row(
        "a NaN that the mod makes at a masked pair doesn't reach any result",
        score_mod="nan_one_pair",
        mask_mod="anti_causal",
    ),
    nan_in_a_query=row(
        "a NaN in a query stays in its row",
        (37, 40),
        values=nan_in_a_query,
        gradients=frozenset({"q"}),
    ),
    nan_through_maximum=row(
        "NaN wins against a number in torch.maximum",
        (37, 40),
        score_mod="maximum_of_table",
        values=nan_in_a_query,
        gradients=frozenset(),
    ),
    nan_through_minimum=row(
        "NaN wins against a number in torch.minimum",
        (37, 40),
        score_mod="minimum_of_table",
        values=nan_in_a_query,
        gradients=frozenset(),
    ),
    infinity_in_a_key=row(
        "scores of +inf make their row of out NaN, scores of -inf their pair dead",
        (37, 40),
        values=infinity_in_a_key,
        aux=frozenset({"max_scores"}),
        gradients=frozenset(),
    ),
    infinity_in_a_value=row(
        "an infinite value reaches its own element of out",
        (37, 40),
        values=infinity_in_a_value,
        gradients=frozenset(),
    ),
    larger_scores_later=row(
        "sums so far are rescaled when the maximum rises", (70, 300), values=larger_scores_later
    ),
    larger_scores_earlier=row(
        "and stay where it doesn't", (70, 300), values=larger_scores_earlier
    ),
)
CASES.compare(
    row(
        heads=(4, 2),
        batch=2,
        mask_mod="causal_bottom_right",
        gradients=QKV,
        dlse=True,
        quick=False,
    ),
    **{
        f"{change.__name__}{suffix}": row(
            change.__doc__, (q_length, 150), dtype=dtype, values=change
        )
        for change in (huge, tiny, larger_scores_later, larger_scores_earlier)
        for suffix, q_length, dtype in (
            ("_float32", 70, torch.float32),
            ("_short", 5, torch.float32),
            ("_bfloat16", 70, torch.bfloat16),
            ("_float64", 70, torch.float64),
        )
    },
)
# Combinations of the acceptance list that have broken implementations.
CASES.compare(
    row(heads=(4, 2), batch=2, gradients=ALL, dlse=True),
    **{
        f"{score_mod}_and_{mask_mod}": row(
            f"score mod {score_mod} under mask {mask_mod}",
            (q_length, kv_length),
            kv_batch=kv_batch,
            score_mod=score_mod,
            mask_mod=mask_mod,
            quick=q_length * kv_length < 20000,
        )
        for score_mod, mask_mod, q_length, kv_length, kv_batch in (
            ("alibi_learned", "window_head", 70, 90, None),
            ("bias_transposed", "random_spans", 70, 90, None),
            ("softcap", "causal_bottom_right", 90, 70, None),
            ("dead_rows_by_score", "causal", 70, 90, None),
            ("ignores_score", "doc_permuted", 70, 90, None),
            ("nan_one_pair", "dead_columns", 20, 20, None),
            ("big_scores", "first_block_dead", 70, 150, None),
            ("very_low", "all_false", 20, 20, None),
            ("key_norm_gqa", "padding", 70, 90, 1),
            ("temperature", "decode_position", 1, 90, None),
            ("graphormer", "block_table_head", 70, 90, None),
            ("mixed_tables", "batch_head_mix", 70, 90, None),
            ("rope_like", "hash_mask", 70, 90, None),
            ("scatter_collide", "causal", 400, 400, None),
        )
    },
)
