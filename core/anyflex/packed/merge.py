"""merge_attention: one result from two that attended to two parts of the keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.tensors.dynamo_errors import fail

__all__ = ["merge_attention"]


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what attention over both parts of the keys gives: (out, lse).

    For a prefix that many sequences share, attended to once, and the rest of each. It is
    differentiable.

    Args:
        out_a, out_b: [..., Ev], of one shape and dtype.
        lse_a, lse_b: [...], natural logarithm, float32, float64 for float64 outputs.

    Returns:
        out and lse like those of the parts. A row that both parts have no key for has out 0 and
        lse -inf. Sinks count once: merge what was made without them, and apply `with_sinks` last.

    Raises:
        ArgumentError, ArgumentTypeError: naming the argument.

    Examples:
        >>> import torch, anyflex
        >>> out, lse = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4)
        >>> whole, _ = anyflex.merge_attention(out, lse, out, torch.full_like(lse, -torch.inf))
        >>> torch.equal(whole, out)
        True

    Source: Milakov, Gimelshein 2018, Online normalizer calculation for softmax, arXiv:1805.02867.
    """
    _check(out_a, lse_a, out_b, lse_b)
    top = torch.maximum(lse_a, lse_b)
    top = torch.where(top == -torch.inf, 0.0, top)
    a, b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = a + b
    share = torch.where(total == 0, 1.0, total)
    # A dead part's out is 0, and stays out of the sum whatever it is multiplied by.
    out = (
        out_a.to(top.dtype) * (a / share)[..., None] + out_b.to(top.dtype) * (b / share)[..., None]
    )
    return out.to(out_a.dtype), top + torch.log(total)


def _check(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> None:
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if not isinstance(tensor, Tensor):
            fail(
                "ArgumentTypeError",
                f"merge_attention: {name} must be a Tensor, got {type(tensor).__name__}.",
            )
    wide = torch.float64 if out_a.dtype is torch.float64 else torch.float32
    shape = list(out_a.shape)
    for name, tensor, wanted, dtype in (
        ("out_b", out_b, shape, out_a.dtype),
        ("lse_a", lse_a, shape[:-1], wide),
        ("lse_b", lse_b, shape[:-1], wide),
    ):
        if list(tensor.shape) != wanted or tensor.dtype is not dtype:
            fail(
                "ArgumentError",
                f"merge_attention: {name} must be {wanted} in {dtype}, as out_a has {shape} in "
                f"{out_a.dtype}, got {list(tensor.shape)} in {tensor.dtype}.",
            )
        if tensor.device != out_a.device:
            fail(
                "ArgumentError",
                f"merge_attention: {name} must be on {out_a.device}, as out_a, got "
                f"{tensor.device}.",
            )
