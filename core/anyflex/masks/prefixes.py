"""Prefixes and padding: keys that every query sees, or none."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anyflex.mods.factory_arguments import (
    INTEGERS,
    check_one_device,
    number_at,
    query_position,
    table_at,
)
from anyflex.tracing.mod_types import MaskMod

__all__ = ["padding", "prefix_lm", "shared_prefix"]


def prefix_lm(length: int | Tensor, offset: int | Tensor = 0) -> MaskMod:
    """Return the mask mod that is causal, except that everybody sees the first `length` keys.

    Args:
        length: of the prefix, at least 0. int; or int32 or int64 tensor, [] or [B].
        offset: of the query's place; see `anyflex.masks`.

    Raises:
        ArgumentTypeError: a wrong type or dtype.
        ArgumentError: a negative int, a tensor of a wrong rank, or tensors on different devices.

    Source: Dong et al. 2019, UniLM, arXiv:1905.03197; Raffel et al. 2019, T5, arXiv:1910.10683.
    """
    position = query_position("prefix_lm: offset", offset)
    prefix = number_at("prefix_lm: length", length, "B", 0)
    check_one_device("prefix_lm", length=length, offset=offset)

    def prefix_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return (kv_idx < prefix(b)) | (kv_idx <= position(b, q_idx))

    return prefix_mask


def shared_prefix(answers: Tensor, groups: Tensor | None = None) -> MaskMod:
    """Return the causal mask mod of prompts that are each followed by many answers.

    A token sees the prompt of its own group and, of the answers, its own: the prompt is computed
    once for all of them.

    Examples:
        >>> import torch
        >>> # a prompt of 3, answers of 2 and 3
        >>> answers = torch.tensor([-1, -1, -1, 0, 0, 1, 1, 1])
        >>> mask_mod = shared_prefix(answers)

    Args:
        answers: [S] or [B, S], signed integers: the number of a token's answer, negative in a
            prompt. Answers need no order; within one, and within a prompt, tokens come in order.
        groups: [S] or [B, S], integers: which prompt a token belongs to; None: there is one.

    Raises:
        ArgumentTypeError: no tensor, or one of another dtype.
        ArgumentError: a tensor of a wrong rank, or tensors on different devices.

    Source: Juravsky et al. 2024, Hydragen, arXiv:2402.05099.
    """
    signed = tuple(dtype for dtype in INTEGERS if dtype.is_signed)
    answer = table_at("shared_prefix: answers", answers, signed)
    group = None if groups is None else table_at("shared_prefix: groups", groups, INTEGERS)
    check_one_device("shared_prefix", answers=answers, groups=groups)

    def shared_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        mine = (answer(b, kv_idx) < 0) | (answer(b, q_idx) == answer(b, kv_idx))
        live = (kv_idx <= q_idx) & mine
        if group is not None:
            live = live & (group(b, q_idx) == group(b, kv_idx))
        return live

    return shared_mask


def padding(kv_lengths: int | Tensor, q_lengths: int | Tensor | None = None) -> MaskMod:
    """Return the mask mod that is live where key, and query, are within the entry's length.

    Args:
        kv_lengths: how many keys are real, at least 0. int; or int32 or int64 tensor, [] or [B].
        q_lengths: how many queries are; rows of the others are dead: out 0, lse -inf. None: all.

    Raises:
        ArgumentTypeError: a wrong type or dtype.
        ArgumentError: a negative int, a tensor of a wrong rank, or tensors on different devices.

    Source: common practice.
    """
    keys = number_at("padding: kv_lengths", kv_lengths, "B", 0)
    queries = None if q_lengths is None else number_at("padding: q_lengths", q_lengths, "B", 0)
    check_one_device("padding", kv_lengths=kv_lengths, q_lengths=q_lengths)

    def padding_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        live = kv_idx < keys(b)
        return live if queries is None else live & (q_idx < queries(b))

    return padding_mask
