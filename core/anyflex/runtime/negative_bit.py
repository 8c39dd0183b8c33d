"""Resolving torch's negative bit before a kernel reads memory.

The imaginary part of a conjugated tensor is a view whose memory holds the negatives of its
elements. It is copied before a call is planned: the spec tells the copy's strides. torch's
dispatcher copies for the static ops.
"""

from __future__ import annotations

from anyflex.contract.call import Call

__all__ = ["resolved"]


def resolved(call: Call) -> Call:
    """Return the call with tensors whose memory holds their elements: itself in the usual case.

    Copies are differentiable. Captured tensors of untraced mods stay: such a mod reads its own
    tensors, and gradients find these.
    """
    untraced = call.score_function is not None or call.mask_function is not None
    given = (call.query, call.key, call.value, *(() if untraced else call.captured))
    if True not in [tensor.is_neg() for tensor in given]:
        return call
    query, key, value, *captured = [tensor.resolve_neg() for tensor in given]
    return Call(
        query,
        key,
        value,
        call.mask,
        call.captured if untraced else tuple(captured),
        call.ints,
        call.floats,
        call.scale,
        call.score_function,
        call.mask_function,
    )
