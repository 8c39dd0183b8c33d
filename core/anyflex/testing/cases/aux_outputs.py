"""Auxiliary outputs: lse and max_scores."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.testing.attention_case import LSE, MAXIMA, QKV, AttentionCase
from anyflex.testing.case_types import Case, comparisons

__all__ = ["CASES"]

CASES: dict[str, Case] = {}


def equal_scores(tensors: dict[str, Tensor]) -> None:
    """Make all scores 0."""
    tensors["query"].zero_()


def largest_at_the_end(tensors: dict[str, Tensor]) -> None:
    """The last key has each row's largest score."""
    tensors["query"].abs_().add_(0.5)
    tensors["key"][..., -1, :] = 3.0


comparisons(
    CASES,
    AttentionCase(
        "aux/lse_of_two_keys",
        "lse is the natural logarithm of the sum of exponentials",
        q_length=1,
        kv_length=2,
        aux=LSE,
        quick=True,
    ),
    AttentionCase(
        "aux/lse_after_mods",
        "lse is that of the scores after score mod and mask",
        q_length=4,
        kv_length=4,
        score_mod="alibi_abs",
        mask_mod="causal",
        aux=LSE,
        quick=True,
    ),
    AttentionCase(
        "aux/lse_digits",
        "lse has the digits of float32 also where query has fewer",
        q_length=4,
        kv_length=4,
        dtype=torch.bfloat16,
        mask_mod="causal",
        values=equal_scores,
        aux=LSE,
        quick=True,
    ),
    AttentionCase(
        "aux/lse_digits_long",
        "the same for many rows",
        q_length=100,
        kv_length=300,
        dtype=torch.float16,
        mask_mod="causal",
        values=equal_scores,
        aux=LSE,
        quick=True,
    ),
    AttentionCase(
        "aux/max_scores_after_mods",
        "max_scores is the row maximum after score mod and mask",
        q_length=40,
        kv_length=40,
        score_mod="alibi_abs",
        mask_mod="causal",
        aux=MAXIMA,
        quick=True,
    ),
    AttentionCase(
        "aux/max_scores_of_one_row",
        "max_scores is the maximum after the score mod, of one row too",
        q_length=1,
        kv_length=40,
        score_mod="alibi_abs",
        aux=MAXIMA,
        quick=True,
    ),
    AttentionCase(
        "aux/max_scores_in_the_last_tile",
        "max_scores looks at every key",
        q_length=70,
        kv_length=300,
        values=largest_at_the_end,
        aux=MAXIMA,
        quick=True,
    ),
    AttentionCase(
        "aux/max_scores_in_the_last_tile_of_one_row",
        "max_scores looks at every key of one row",
        q_length=1,
        kv_length=300,
        values=largest_at_the_end,
        aux=MAXIMA,
        quick=True,
    ),
    *(
        AttentionCase(
            f"aux/{'_and_'.join(sorted(aux)) or 'none'}{'_' + gradient if gradient else ''}",
            f"auxiliary outputs {', '.join(sorted(aux)) or 'none'}"
            + (", with gradients" if gradient else ""),
            batch=2,
            heads=4,
            kv_heads=2,
            q_length=70,
            kv_length=90,
            score_mod="softcap",
            mask_mod="random_spans",
            aux=aux,
            gradients=QKV if gradient else frozenset(),
            dlse=gradient == "dlse",
            quick=True,
        )
        for aux in (frozenset[str](), LSE, MAXIMA, LSE | MAXIMA)
        for gradient in ("", "dout", "dlse")
        if "lse" in aux or gradient != "dlse"
    ),
)
