"""Calls with sinks: by a kernel that has them, or by one that has not and then by core."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anyflex.frontend.attention_sinks import with_sinks
from anyflex.frontend.checked_call import CheckedCall
from anyflex.runtime.plain_backend import takes
from anyflex.tensors.dynamo_disabled import in_graph

__all__ = ["attend_with_sinks", "in_kernels"]


def in_kernels(call: CheckedCall, packed: bool = False) -> bool:
    """Whether the call's kernel shall apply its sinks, not `with_sinks` to what the kernel gives.

    It doesn't where a gradient may arrive at lse: that is of a softmax without sinks, which the
    backward pass of one with sinks doesn't compute.

    Args:
        call: with sinks.
        packed: it is for kernels that take packed sequences as they are. These have no backward,
            so that of the tensors only the sinks may learn; and in a recorded program no sinks.
    """
    query, sinks = call.query, call.sinks
    learns = False
    if torch.is_grad_enabled():
        read = (sinks,) if packed else (query, call.key, call.value, sinks)
        learns = any(tensor is not None and tensor.requires_grad for tensor in read)
        # A score mod may read a tensor that learns.
        learns = learns or (call.score_mod is not None and not packed)
    if (learns and (packed or call.aux.lse)) or (packed and in_graph()):
        return False
    return takes("sinks", query.device, query.dtype, call.backend, learns)


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
