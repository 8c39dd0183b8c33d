"""Auxiliary outputs: lse and max_scores."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.testing.attention_case import LSE, MAXIMA, QKV
from anyflex.testing.case_types import Group, row

__all__ = ["CASES"]

CASES = Group("aux")


def equal_scores(tensors: dict[str, Tensor]) -> None:
    """Make all scores 0."""
    tensors["query"].zero_()


def largest_at_the_end(tensors: dict[str, Tensor]) -> None:
    """The last key has each row's largest score."""
    tensors["query"].abs_().add_(0.5)
    tensors["key"][..., -1, :] = 3.0


CASES.compare(
    {},
    lse_of_two_keys=row(
        "lse is the natural logarithm of the sum of exponentials", (1, 2), aux=LSE
    ),
    lse_after_mods=row(
        "lse is that of the scores after score mod and mask",
        (4, 4),
        score_mod="alibi_abs",
        mask_mod="causal",
        aux=LSE,
    ),
    lse_digits=row(
        "lse has the digits of float32 also where query has fewer",
        (4, 4),
        dtype=torch.bfloat16,
        mask_mod="causal",
        values=equal_scores,
        aux=LSE,
    ),
    lse_digits_long=row(
        "the same for many rows",
        (100, 300),
        dtype=torch.float16,
        mask_mod="causal",
        values=equal_scores,
        aux=LSE,
    ),
    max_scores_after_mods=row(
        "max_scores is the row maximum after score mod and mask",
        score_mod="alibi_abs",
        mask_mod="causal",
        aux=MAXIMA,
    ),
    max_scores_of_one_row=row(
        "max_scores is the maximum after the score mod, of one row too",
        (1, 40),
        score_mod="alibi_abs",
        aux=MAXIMA,
    ),
    max_scores_in_the_last_tile=row(
        "max_scores looks at every key", (70, 300), values=largest_at_the_end, aux=MAXIMA
    ),
    max_scores_in_the_last_tile_of_one_row=row(
        "max_scores looks at every key of one row", (1, 300), values=largest_at_the_end, aux=MAXIMA
    ),
)
CASES.compare(
    row(lengths=(70, 90), heads=(4, 2), batch=2, score_mod="softcap", mask_mod="random_spans"),
    **{
        f"{'_and_'.join(sorted(aux)) or 'none'}{'_' + gradient if gradient else ''}": row(
            f"auxiliary outputs {', '.join(sorted(aux)) or 'none'}"
            + (", with gradients" if gradient else ""),
            aux=aux,
            gradients=QKV if gradient else frozenset(),
            dlse=gradient == "dlse",
        )
        for aux in (frozenset[str](), LSE, MAXIMA, LSE | MAXIMA)
        for gradient in ("", "dout", "dlse")
        if "lse" in aux or gradient != "dlse"
    },
)
