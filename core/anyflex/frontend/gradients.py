"""flex_attention_backward: gradients from an lse and a delta that come from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyflex.contract.call import GradInputs, Saved
from anyflex.errors import ArgumentTypeError
from anyflex.frontend.arguments import is_plain
from anyflex.frontend.checked_call import CheckedCall, check
from anyflex.frontend.custom_ops import flex_attention_backward_op
from anyflex.frontend.eager_call import gather
from anyflex.frontend.op_call import op_arguments
from anyflex.frontend.transforms import refuse_transforms
from anyflex.runtime.launch import launch_backward
from anyflex.runtime.plan import plan_for
from anyflex.runtime.saved_tensor_checks import check_like
from anyflex.tensors.storage_checks import check_readable
from anyflex.tracing.mod_types import ScoreMod

__all__ = ["AttentionGradients", "flex_attention_backward"]


class AttentionGradients(NamedTuple):
    """Gradients that `flex_attention_backward` returns.

    Args:
        query, key, value: gradients, shaped and typed like the tensors.
        captured: (captured tensor, its gradient) for each tensor that score_mod reads and that
            requires grad.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    captured: tuple[tuple[Tensor, Tensor], ...]


def flex_attention_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    dlse: Tensor | None = None,
    delta: Tensor | None = None,
    backend: str | None = None,
) -> AttentionGradients:
    """Compute the gradients of one `flex_attention` whose softmax was completed elsewhere.

    In ring attention and other schemes that split the keys, each part's probabilities are
    ``exp(score - lse)`` with the lse of the whole row, so lse and delta come from outside.

    Args:
        dout: [B, Hq, L, Ev], gradient of the whole row's out.
        query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, backend: as
            for `flex_attention`, of this part.
        out: [B, Hq, L, Ev], the whole row's out; read only where `delta` is not given.
        lse: [B, Hq, L], the whole row's lse, float32 (float64 for float64 inputs).
        dlse: [B, Hq, L], gradient of the whole row's lse, or None.
        delta: [B, Hq, L], sum of dout * out over Ev, or None to compute it from `out`.

    Raises:
        ArgumentError, ArgumentTypeError: as `flex_attention`, and for tensors of a wrong shape,
            dtype or device.
        BackendRefused: no backend takes the call.

    Examples:
        >>> import torch, anyflex
        >>> q, k, v = torch.randn(3, 1, 2, 16, 8).unbind(0)
        >>> out, aux = anyflex.flex_attention(
        ...     q, k, v, return_aux=anyflex.AuxRequest(lse=True))
        >>> anyflex.flex_attention_backward(torch.ones_like(out), q, k, v, out, aux.lse).key.shape
        torch.Size([1, 2, 16, 8])
    """
    call = check(
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale,
        enable_gqa,
        dlse is not None,
        kernel_options,
        None,
        backend,
    )
    query, key, value = call.query, call.key, call.value
    _check_given(query, value, dout=dout, out=out)
    _check_given(query, value, lse=lse, dlse=dlse, delta=delta)
    given = (dout, dlse, delta, out, lse)
    if torch.compiler.is_dynamo_compiling():
        captured, found = _through_op(given, call)
    elif not is_plain(query, key, value):
        from anyflex.frontend.tensor_subclasses import naming_subclasses

        with naming_subclasses(
            dout=dout, query=query, key=key, value=value, out=out, lse=lse, dlse=dlse, delta=delta
        ):
            captured, found = _through_op(given, call)
    else:
        with torch.enable_grad():
            inputs = gather(call)
        captured = list(inputs.read)  # the user's own, which gradients are told of
        if delta is None:
            check_readable("dout", dout)
            check_readable("out", out)
            delta = (dout.to(lse.dtype) * out).sum(-1)
        wanted = (True, True, True, *inputs.request.gradients[3:])
        inputs.request = inputs.request._replace(gradients=wanted, needs_lse=True)
        with torch.no_grad():
            dq, dk, dv, gradients = launch_backward(
                plan_for(inputs), inputs.call, Saved(out, lse), GradInputs(dout, dlse, delta)
            )
        found = [dq, dk, dv, *gradients]
    dq, dk, dv, *gradients = found
    assert dq is not None and dk is not None and dv is not None
    pairs = [(t, g) for t, g in zip(captured, gradients, strict=True) if g is not None]
    return AttentionGradients(dq, dk, dv, tuple(pairs))


def _through_op(
    tensors: tuple[Any, ...], call: CheckedCall
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Call the static op, and return the captured tensors, and the gradients of query, key, value
    and of each of these, None where none is wanted."""
    dout, dlse, delta, out, lse = tensors
    refuse_transforms()
    with torch.enable_grad():
        arguments, captured, wanted = op_arguments(call, every_gradient=True)
    with torch.no_grad():
        if delta is None:
            delta = (dout.to(lse.dtype) * out).sum(-1)
        found = flex_attention_backward_op(
            dout,
            dlse,
            delta,
            call.query,
            call.key,
            call.value,
            out,
            lse,
            None,
            None,
            *arguments,
        )
    return captured, [g if flag else None for g, flag in zip(found, wanted, strict=True)]


def _check_given(query: Tensor, value: Tensor, **tensors: Tensor | None) -> None:
    rows = query.shape[:3]
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    for name, tensor in tensors.items():
        if tensor is None and name in ("dlse", "delta"):
            continue
        per_row = name not in ("dout", "out")
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(f"{name} must be a Tensor, got {type(tensor).__name__}.")
        shape = rows if per_row else (*rows, value.shape[3])
        check_like(name, tensor, shape, wide if per_row else query.dtype, query.device)
