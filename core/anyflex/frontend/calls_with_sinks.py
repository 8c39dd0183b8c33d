"""Calls with sinks: by a kernel that has them, or by one that has not and then by core."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anyflex.frontend.attention_sinks import with_sinks
from anyflex.frontend.checked_call import CheckedCall
from anyflex.runtime.plain_backend import takes

__all__ = ["attend_with_sinks", "in_kernels"]


def in_kernels(call: CheckedCall) -> bool:
    """Whether the call's kernel shall apply its sinks, not `with_sinks` to what the kernel gives.

    It doesn't where a gradient may arrive at lse: that is of a softmax without sinks, which the
    backward pass of one with sinks doesn't compute.
    """
    query = call.query
    if call.aux.lse and torch.is_grad_enabled():
        # A score mod may read a tensor that learns.
        if call.score_mod is not None:
            return False
        for tensor in (query, call.key, call.value, call.sinks):
            if tensor is not None and tensor.requires_grad:
                return False
    return takes("sinks", query.device, query.dtype, call.backend)


Results = tuple[Tensor, Tensor | None, Tensor | None]


def attend_with_sinks(call: CheckedCall, attend: Callable[[CheckedCall], Results]) -> Results:
    """Compute a checked call with sinks, inside of its kernel or after it.

    Args:
        attend: computes a checked call and returns out, lse and max_scores.
    """
    aux, sinks = call.aux, call.sinks
    if sinks is None or in_kernels(call):
        return attend(call)
    out, lse, max_scores = attend(call._replace(sinks=None, aux=aux._replace(lse=True)))
    assert lse is not None
    return with_sinks(out, lse, sinks), lse if aux.lse else None, max_scores
