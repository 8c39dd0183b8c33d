"""Attention sinks: a score of each head that takes part in the softmax and has no value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.tensors.dynamo_errors import fail
from anyflex.tensors.symbolic_numbers import fixed

__all__ = ["as_kernels_read", "check_sinks", "checked_sinks", "with_sinks"]

_OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def with_sinks(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return what attention gives with one more score a head, `sink`, whose value is 0.

    A sink takes a part of each row's softmax, so that a head can attend to nothing. With Z the
    row's sum of exponentials, out * Z / (Z + exp(sink)) is ``out * sigmoid(lse - sink)``. It is
    differentiable in all three; lse passes its gradient on to query, key and captured tensors.
    `flex_attention` and `flex_attention_packed` take sinks themselves: this is for parts of rows,
    which are merged first.

    Args:
        out: [B, Hq, L, Ev]; float32, bfloat16, float16 or float64.
        lse: [B, Hq, L]; natural logarithm, float32, float64 for a float64 out: what
            `flex_attention` gives with ``return_aux=AuxRequest(lse=True)``.
        sink: [Hq], a floating dtype; usually learned. -inf is no sink.

    Returns:
        Tensor like `out`. Dead rows (lse -inf) are 0, and gradients of all three are 0 there.

    Raises:
        ArgumentTypeError: no tensors, or wrong dtypes.
        ArgumentError: shapes that don't fit, or different devices.

    Examples:
        >>> import torch, anyflex
        >>> q, k, v = torch.randn(3, 1, 2, 16, 8).unbind(0)
        >>> out, aux = anyflex.flex_attention(
        ...     q, k, v, return_aux=anyflex.AuxRequest(lse=True))
        >>> anyflex.with_sinks(out, aux.lse, torch.zeros(2)).shape
        torch.Size([1, 2, 16, 8])

    Source: a learned sink a head: OpenAI 2025, gpt-oss model card, arXiv:2508.10925; sinks: Xiao
    et al. 2023, StreamingLLM, arXiv:2309.17453.
    """
    _check(out, lse, sink)
    # Also where the sink is -inf a dead row's difference is -inf, and not NaN.
    dead = lse == -torch.inf
    difference = torch.where(dead, lse, lse - sink.to(lse.dtype)[:, None])
    share = torch.sigmoid(difference)[..., None]
    # One rounding: the product is formed in lse's type.
    return (out.to(lse.dtype) * share).to(out.dtype)


def checked_sinks(sinks: Any, query: Tensor, heads: int) -> Tensor:
    """Check the sinks of a call and return them as kernels read them.

    Args:
        heads: Hq.
    """
    check_sinks(sinks, query, heads)
    return as_kernels_read(sinks, query)


def check_sinks(sinks: Any, query: Tensor, heads: int) -> None:
    """Check the sinks of a call; arguments are those of `checked_sinks`."""
    _check_sink("sinks", sinks, query, heads)


def as_kernels_read(sinks: Tensor, query: Tensor) -> Tensor:
    """Return the sinks of a call in lse's dtype, contiguous."""
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    return sinks.to(wide).resolve_neg().contiguous()


def _check(out: Any, lse: Any, sink: Any) -> None:
    for name, tensor in (("out", out), ("lse", lse)):
        if not isinstance(tensor, Tensor):
            cure = ""
            if name == "lse" and type(tensor).__name__ == "AuxOutput":
                cure = " Give its .lse."
            fail(
                "ArgumentTypeError",
                f"with_sinks: {name} must be a Tensor, got {type(tensor).__name__}.{cure}",
            )
        if tensor.layout is not torch.strided:
            fail(
                "ArgumentError",
                f"with_sinks: {name} must be a strided tensor, got {tensor.layout}; use "
                f"{name}.to_dense().",
            )
    if out.dim() != 4:
        fail(
            "ArgumentError",
            f"with_sinks: out must have shape [B, Hq, L, Ev], got {list(out.shape)}.",
        )
    if out.dtype not in _OUT_DTYPES:
        fail(
            "ArgumentTypeError",
            "with_sinks: out must be one of float32, bfloat16, float16, float64; got "
            f"{out.dtype}.",
        )
    wide = torch.float64 if out.dtype is torch.float64 else torch.float32
    if lse.dtype is not wide:
        fail(
            "ArgumentTypeError",
            f"with_sinks: lse must be {wide} for an out of {out.dtype}, got {lse.dtype}.",
        )
    if lse.shape != out.shape[:3]:
        fail(
            "ArgumentError",
            f"with_sinks: lse must have shape {list(out.shape[:3])}, got {list(lse.shape)}.",
        )
    if lse.device != out.device:
        fail(
            "ArgumentError",
            f"with_sinks: out and lse must be on one device, got {out.device} and {lse.device}.",
        )
    _check_sink("with_sinks: sink", sink, out, out.shape[1])


def _check_sink(name: str, sink: Any, rows: Tensor, heads: int) -> None:
    """Check the sinks of `heads` query heads against a tensor of query rows."""
    if not isinstance(sink, Tensor):
        fail(
            "ArgumentTypeError",
            f"{name} must be a Tensor [{fixed(heads)}], one number for each query head, got "
            f"{type(sink).__name__}.",
        )
    if sink.layout is not torch.strided or sink.is_nested:
        fail(
            "ArgumentError",
            f"{name} must be a strided tensor, got {sink.layout}; use "
            f"{name.split(' ')[-1]}.to_dense().",
        )
    if not sink.dtype.is_floating_point:
        fail("ArgumentTypeError", f"{name} must be floating, got {sink.dtype}.")
    if sink.dim() != 1 or sink.shape[0] != heads:
        fail(
            "ArgumentError",
            f"{name} must have shape [{fixed(heads)}], one number for each query head, got "
            f"{[fixed(size) for size in sink.shape]}.",
        )
    if sink.device != rows.device:
        fail(
            "ArgumentError",
            f"{name} is on {sink.device}, the call's other tensors on {rows.device}: move it with "
            f".to({str(rows.device)!r}).",
        )
