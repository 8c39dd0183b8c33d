"""Signs that memory doesn't show.

The imaginary part of a conjugated tensor is a view with torch's negative bit: its elements are the
negatives of what lies in memory. Kernels read memory, so each such tensor is copied before a call
is planned: the copy's strides are what the spec must tell. The static ops need nothing of this:
torch's dispatcher copies for them.
"""

from __future__ import annotations

from anyflex.contract.call import Call, GradInputs, Saved

__all__ = ["shown", "shown_backward"]


def shown(call: Call) -> Call:
    """Return the call with tensors whose memory holds their elements: itself in the usual case.
    Copies are differentiable.

    What an untraced mod reads stays: the mod reads its own tensors, which gradients find again.
    """
    captured = call.captured
    untraced = call.score_function is not None or call.mask_function is not None
    if not (call.query.is_neg() or call.key.is_neg() or call.value.is_neg()):
        for tensor in captured:
            if tensor.is_neg() and not untraced:
                break
        else:
            return call
    if not untraced:
        captured = tuple([tensor.resolve_neg() for tensor in captured])
    return Call(
        call.query.resolve_neg(),
        call.key.resolve_neg(),
        call.value.resolve_neg(),
        call.mask,
        captured,
        call.ints,
        call.floats,
        call.scale,
        call.score_function,
        call.mask_function,
    )


def shown_backward(saved: Saved, grad: GradInputs) -> tuple[Saved, GradInputs]:
    """Return what arrives at backward likewise. out and lse come from the user where softmax was
    completed elsewhere."""
    if not (
        grad.dout.is_neg()
        or saved.out.is_neg()
        or saved.lse.is_neg()
        or (grad.dlse is not None and grad.dlse.is_neg())
        or (grad.delta is not None and grad.delta.is_neg())
    ):
        return saved, grad
    dlse, delta = (
        None if tensor is None else tensor.resolve_neg() for tensor in (grad.dlse, grad.delta)
    )
    return (
        Saved(saved.out.resolve_neg(), saved.lse.resolve_neg(), saved.extras),
        GradInputs(grad.dout.resolve_neg(), dlse, delta),
    )
