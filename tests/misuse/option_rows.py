"""Rows 33 to 50: grouped queries, outputs and options."""

from __future__ import annotations

import torch

from anyflex import AuxRequest
from anyflex.errors import ArgumentError, ArgumentTypeError, ModTraceError
from tests.misuse.row import Attend, Table, inputs

__all__ = ["TABLE"]

TABLE = Table()
wrong, legal = TABLE.wrong, TABLE.legal


@wrong(33, ArgumentError, r"\b4\b", r"\b2\b", "enable_gqa=True", compiled=True)
def grouped_heads_without_enable_gqa(attend: Attend) -> None:
    attend(*inputs(heads=4, kv_heads=2))


@wrong(34, ArgumentError, r"\b5\b", r"\b2\b", "remainder|multiple", compiled=True)
def heads_are_not_a_multiple(attend: Attend) -> None:
    attend(*inputs(heads=5, kv_heads=2), enable_gqa=True)


@wrong(35, ArgumentError, r"\b2\b", r"\b4\b", "swap", compiled=True)
def fewer_query_heads(attend: Attend) -> None:
    attend(*inputs(heads=2, kv_heads=4), enable_gqa=True)


@wrong(36, ArgumentTypeError, "enable_gqa", "bool", "str", compiled=True)
def enable_gqa_is_a_string(attend: Attend) -> None:
    attend(*inputs(heads=4, kv_heads=2), enable_gqa="no")


@wrong(37, ArgumentError, "return_lse", "return_aux", compiled=True)
def both_ways_to_ask_for_lse(attend: Attend) -> None:
    attend(*inputs(), return_lse=True, return_aux=AuxRequest(lse=True))


@wrong(38, ArgumentTypeError, "return_aux", r"AuxRequest\(lse=True\)", compiled=True)
def return_aux_is_true(attend: Attend) -> None:
    attend(*inputs(), return_aux=True)


@wrong(38, ArgumentTypeError, "return_aux", "lse", "bool", "list")
def aux_request_of_a_list(attend: Attend) -> None:
    attend(*inputs(), return_aux=AuxRequest(lse=[1]))  # type: ignore[arg-type]


@wrong(39, ArgumentTypeError, "return_aux", r"AuxRequest\(lse=True\)", compiled=True)
def return_aux_is_a_dict(attend: Attend) -> None:
    attend(*inputs(), return_aux={"lse": True})


# torch's own error, as for any tensor without grad_fn.
@wrong(40, RuntimeError, "does not require grad|not differentiable")
def gradient_through_max_scores(attend: Attend) -> None:
    query, key, value = (tensor.requires_grad_() for tensor in inputs())
    _, aux = attend(query, key, value, return_aux=AuxRequest(max_scores=True))
    aux.max_scores.sum().backward()


@wrong(41, TypeError, "is_causal")
def is_causal(attend: Attend) -> None:
    attend(*inputs(), is_causal=True)


@wrong(41, TypeError, "dropout'")
def dropout_by_another_name(attend: Attend) -> None:
    attend(*inputs(), dropout=0.1)


@wrong(41, ArgumentError, "dropout_p", "at least 0", "below 1", r"got 1\.0", compiled=True)
def dropout_of_everything(attend: Attend) -> None:
    attend(*inputs(), dropout_p=1.0)


@wrong(41, ArgumentError, "dropout_p", r"got -0\.1", compiled=True)
def negative_dropout(attend: Attend) -> None:
    attend(*inputs(), dropout_p=-0.1)


@wrong(41, ArgumentError, "dropout_p", "got nan", compiled=True)
def dropout_is_nan(attend: Attend) -> None:
    attend(*inputs(), dropout_p=float("nan"))


@wrong(41, ArgumentTypeError, "dropout_p", "float", "Tensor", r"\.item\(\)", compiled=True)
def dropout_is_a_tensor(attend: Attend) -> None:
    attend(*inputs(), dropout_p=torch.tensor(0.1))


@wrong(41, ArgumentTypeError, "dropout_p", "float", "bool", compiled=True)
def dropout_is_true(attend: Attend) -> None:
    attend(*inputs(), dropout_p=True)


@wrong(41, ArgumentTypeError, "sinks", r"\[2\]", "got float", compiled=True)
def sinks_are_a_number(attend: Attend) -> None:
    attend(*inputs(), sinks=0.5)


@wrong(41, ArgumentError, "sinks", r"\[2\]", "each query head", r"got \[1, 2\]", compiled=True)
def sinks_of_two_dimensions(attend: Attend) -> None:
    attend(*inputs(), sinks=torch.zeros(1, 2))


@wrong(41, ArgumentTypeError, "sinks must be floating", "int64", compiled=True)
def sinks_of_ints(attend: Attend) -> None:
    attend(*inputs(), sinks=torch.zeros(2, dtype=torch.int64))


# Known to torch, so no backend's own: the message says whose the nearest key is.
@wrong(42, ArgumentError, "BLOK_M", "BLOCK_M", "torch's keys|reference", compiled=True)
def misspelt_option(attend: Attend) -> None:
    attend(*inputs(), kernel_options={"BLOK_M": 64})


@wrong(43, ArgumentTypeError, "kernel_options", "dict", "list", compiled=True)
def options_are_a_list(attend: Attend) -> None:
    attend(*inputs(), kernel_options=[("BLOCK_M", 64)])


@wrong(44, ArgumentError, "BLOCK_M", "-1")
def negative_tile(attend: Attend) -> None:
    attend(*inputs(), kernel_options={"BLOCK_M": -1})


@wrong(44, ArgumentError, "BLOCK_M", r"\b0\b")
def tile_of_nothing(attend: Attend) -> None:
    attend(*inputs(), kernel_options={"BLOCK_M": 0})


@wrong(44, ArgumentError, "BLOCK_M", r"\b48\b")
def odd_tile(attend: Attend) -> None:
    attend(*inputs(), kernel_options={"BLOCK_M": 48})


@wrong(44, (ArgumentError, ArgumentTypeError), "BLOCK_M", "64")
def tile_in_quotes(attend: Attend) -> None:
    attend(*inputs(), kernel_options={"BLOCK_M": "64"})


@wrong(46, ArgumentError, "BACKEND", r"backend=", compiled=True)
def backend_among_the_options(attend: Attend) -> None:
    attend(*inputs(), kernel_options={"BACKEND": "X"})


@wrong(48, ArgumentTypeError, "block_mask", "create_block_mask", compiled=True)
def score_mod_as_block_mask(attend: Attend) -> None:
    attend(*inputs(), block_mask=lambda s, b, h, q, k: s)


@wrong(48, ArgumentTypeError, "block_mask", "create_block_mask", compiled=True)
def mask_mod_as_block_mask(attend: Attend) -> None:
    attend(*inputs(), block_mask=lambda b, h, q, k: q >= k)


@wrong(49, ArgumentTypeError, "block_mask", "create_block_mask", compiled=True)
def dense_tensor_as_block_mask(attend: Attend) -> None:
    attend(*inputs(), block_mask=torch.ones(16, 16, dtype=torch.bool))


@wrong(
    50,
    (ArgumentTypeError, ModTraceError),
    r"\b5\b|score, b, h",
    r"\b4\b",
    compiled=True,
)
def score_and_mask_mod_are_swapped(attend: Attend) -> None:
    attend(*inputs(), lambda b, h, q, k: q >= k)
