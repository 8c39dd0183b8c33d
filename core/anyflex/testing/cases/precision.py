"""Precision that a type promises, in cases where less of it would show."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.testing.attention_case import ALL, QKV
from anyflex.testing.case_types import Group, row

__all__ = ["CASES"]

CASES = Group("precision")
BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def far_from_zero(tensors: dict[str, Tensor]) -> None:
    """Move keys and values away from 0, and make weights almost equal.

    The gradient of query is a covariance of key and value under the weights: offsets cancel in
    it, unless the sum of dout * out that is subtracted has another out than the weights give.
    """
    tensors["query"].mul_(0.1)
    tensors["key"].add_(4.0)
    tensors["value"].add_(4.0)


def constant_columns(tensors: dict[str, Tensor]) -> None:
    """All weights are equal, and each column of value is a constant between 1 and 2: out is that
    constant, and sums up to it grow along the row."""
    tensors["query"].zero_()
    columns = torch.linspace(1.0, 2.0, tensors["value"].shape[-1], dtype=torch.float64)
    tensors["value"].copy_(columns.expand_as(tensors["value"]))


def one_large_score(tensors: dict[str, Tensor]) -> None:
    """Value is 1; the first key's score is larger than the others', which are equal: all other
    weights are one number, whose rounding would add up."""
    tensors["value"].fill_(1.0)
    tensors["query"].fill_(1.0)
    tensors["key"].zero_()
    heads = tensors["key"].shape[1]
    steps = torch.arange(1, heads + 1, dtype=torch.float64)
    tensors["key"][:, :, 0] = (0.07 * steps).view(1, -1, 1)


def four_times(tensors: dict[str, Tensor]) -> None:
    """Scores of about 4, where a step of a 16-bit type is large enough to see."""
    tensors["query"].mul_(4.0)


def sixty_four(tensors: dict[str, Tensor]) -> None:
    """Products of query and key that sum to 64 * 64 * 64, which float16 can't hold although it
    holds the scores."""
    for name in ("query", "key", "value"):
        tensors[name].fill_(64.0)


CASES.compare(
    {"insists": True, "gradients": QKV},
    tanh=row("tanh is right to float32's digits", (16, 16), score_mod="softcap"),
    cosine=row("cos is right to float32's digits", (16, 16), score_mod="rope_like", gradients=ALL),
    exponential=row(
        "exp is right to float32's digits", (16, 16), score_mod="scalar_learned", gradients=ALL
    ),
    float32_products=row(
        "products of float32 inputs keep float32's digits", (64, 64), head_dims=(64, 64)
    ),
    float32_products_long=row(
        "the same for more rows and a larger head dim",
        (130, 130),
        head_dims=(128, 128),
        mask_mod="causal",
        quick=False,
    ),
    tf32=row(
        "where torch allows float32 products in TF32, they keep that many digits at least",
        (64, 64),
        head_dims=(64, 64),
        products="high",
        score_mod="softcap",
    ),
    tf32_long=row(
        "the same for more rows and a larger head dim",
        (200, 300),
        head_dims=(128, 128),
        products="high",
        mask_mod="causal",
        dlse=True,
        quick=False,
    ),
    tf32_decoding=row(
        "the same for one query row",
        (1, 300),
        head_dims=(64, 64),
        products="high",
        gradients=frozenset(),
        quick=False,
    ),
)
CASES.compare(
    {},
    float16_scores=row(
        "scores of float16 inputs are summed in float32",
        (2, 2),
        heads=(1, 1),
        head_dims=(64, 64),
        dtype=FLOAT16,
        values=sixty_four,
    ),
    long_row=row(
        "out is summed in float32 over a long row",
        (1, 4096),
        head_dims=(64, 64),
        dtype=BFLOAT16,
        values=constant_columns,
    ),
    long_rows=row(
        "out is summed in float32 over long rows, many at once",
        (70, 4096),
        heads=(1, 1),
        dtype=BFLOAT16,
        values=constant_columns,
        gradients=QKV,
        quick=False,
    ),
    sum_of_weights=row(
        "weights are summed before they are rounded: a constant value comes out constant, and lse "
        "keeps its digits",
        (4, 1000),
        heads=(8, 8),
        dtype=BFLOAT16,
        values=one_large_score,
    ),
    sum_of_weights_long=row(
        "the same for more rows", (70, 300), heads=(8, 8), dtype=FLOAT16, values=one_large_score
    ),
    delta=row(
        "backward subtracts the sum of dout * out of an out that was not rounded",
        (64, 3000),
        heads=(1, 1),
        dtype=BFLOAT16,
        values=far_from_zero,
        gradients=QKV,
        rounded_delta=False,
    ),
    float64=row("float64 is computed in float64", (4, 4), dtype=FLOAT64, gradients=QKV, dlse=True),
    float64_scale=row(
        "a scale that float32 can't hold is a float64 to float64 inputs",
        (4, 4),
        scale=0.3,
        dtype=FLOAT64,
        gradients=QKV,
        dlse=True,
    ),
    float64_constants=row(
        "a mod's constants are float64s to float64 scores",
        (20, 30),
        dtype=FLOAT64,
        score_mod="many_digits",
        gradients=QKV,
    ),
    float64_mods=row(
        "mods of float64 scores are computed in float64",
        (70, 90),
        dtype=FLOAT64,
        score_mod="squared_table",
        mask_mod="causal",
        gradients=ALL,
        dlse=True,
    ),
)
CASES.compare(
    row(
        "scores have float32's digits when the score mod gets them, whatever the inputs have",
        (70, 90),
        insists=True,
        score_mod="softcap",
        mask_mod="causal",
        scale=0.3,  # no power of two: multiplying a 16-bit query by it rounds
        values=four_times,
        rounded_inputs=False,
    ),
    scores_of_a_mod_bfloat16=row(dtype=BFLOAT16),
    scores_of_a_mod_float16=row(dtype=FLOAT16),
)
CASES.compare(
    {
        "insists": True,
        "mask_mod": "causal_bottom_right",
        "gradients": QKV,
        "dlse": True,
        "quick": False,
    },
    **{
        f"{kv_length}_keys_of_{head_dim}_{str(dtype).removeprefix('torch.')}": row(
            f"{kv_length} keys of head dim {head_dim} in {dtype}",
            (33, kv_length),
            head_dims=(head_dim, head_dim),
            dtype=dtype,
        )
        for dtype in (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)
        for kv_length, head_dim in ((64, 256), (1024, 64), (2048, 128))
    },
)
