"""Layouts of query, key and value in memory. The kit's other cases are mostly contiguous."""

from __future__ import annotations

import dataclasses
import typing

import torch
from torch import Tensor

from anyflex.testing.attention_case import QKV, Layout
from anyflex.testing.case_types import Group, row
from anyflex.testing.checking import compare, plain
from anyflex.testing.session import ConformanceFailure, NotApplicable, Session

__all__ = ["CASES"]

CASES = Group("layouts")

CASES.compare(
    {"batch": 2, "mask_mod": "causal", "gradients": QKV},
    **{
        f"{layout}{suffix}": row(
            f"query, key, value and arriving gradients that are {layout} in memory",
            lengths,
            head_dims=head_dims,
            dtype=dtype,
            layout=layout,
            dlse=suffix == "_long",
            quick=dtype is torch.float32,
        )
        for layout in typing.get_args(Layout)
        for suffix, lengths, head_dims, dtype in (
            ("", (4, 4), (16, 16), torch.float32),
            ("_long", (70, 133), (16, 16), torch.float32),
            # Head dims that kernels are written for, with few queries and with many.
            ("_64_channels", (4, 20), (64, 64), torch.float32),
            ("_128_channels", (1, 33), (128, 128), torch.float32),
            ("_128_channels_bfloat16", (70, 133), (128, 128), torch.bfloat16),
            ("_bfloat16", (70, 133), (16, 24), torch.bfloat16),
            ("_float16", (1, 133), (16, 16), torch.float16),
            ("_float64", (20, 33), (16, 24), torch.float64),
        )
    },
)

_FAR = 2**31
"""Number of elements that exceeds 32-bit integers."""


def _far_apart(tensor: Tensor, axis: int) -> Tensor:
    """Return a tensor [B, H, L, E] whose last batch (axis 0) or row (axis 2) is so far from its
    first. Only written pages take memory, where the system allows that."""
    step = -(-_FAR // (tensor.shape[axis] - 1) // 64) * 64 + 64
    strides = list(tensor.contiguous().stride())
    strides[axis] = step
    if axis == 2:
        # The rows of all batches and heads lie beside each other.
        strides[1] = tensor.shape[3]
        strides[0] = tensor.shape[1] * tensor.shape[3]
    length = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
    far = tensor.new_empty(length).as_strided(tensor.shape, strides)
    return far.copy_(tensor)


@CASES.behaviour()
def far_apart(session: Session) -> None:
    """Offsets of 2^31 elements and more, of batches or rows of query, key and value."""
    declared = session.backend.capabilities.dtypes
    narrow = [dtype for dtype in (torch.bfloat16, torch.float16) if dtype in declared]
    changes = {"dtype": narrow[0]} if narrow else {}
    case = plain(session, "far_apart", batch=2, mask_mod="causal", **changes)
    drawn = case.draw(session.device)
    for axis, what in ((0, "batches"), (2, "rows")):
        for name in ("query", "key", "value"):
            try:
                far = _far_apart(drawn.tensors[name], axis)
            except RuntimeError as error:
                raise NotApplicable(
                    f"there is no room for tensors of 2^31 elements: {error}"
                ) from error
            given = dataclasses.replace(drawn, tensors={**drawn.tensors, name: far})
            try:
                compare(session, case, given)
            except ConformanceFailure as error:
                raise ConformanceFailure(f"{what} of {name} far apart: {error}") from error
