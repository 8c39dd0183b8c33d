"""Launch: allocate the outputs of a planned call and run its kernel, forward or backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from anyflex.contract.call import Call, GradInputs, Grads, Outputs, Saved
from anyflex.errors import AnyflexError, GraphCaptureError
from anyflex.registry.cached_state import STATE
from anyflex.runtime.compiled_kernel import kernel_failed, launched, no_memory
from anyflex.runtime.kernel_cache import is_capturing
from anyflex.runtime.plan import Plan
from anyflex.runtime.saved_for_backward import cut
from anyflex.runtime.saved_tensor_checks import check_backward
from anyflex.runtime.workspace import allocate, give_back, take
from anyflex.tensors.storage_checks import check_readable
from anyflex.tensors.tensor_facts import empty_dense

__all__ = [
    "allocate_saved_bytes",
    "launch_backward",
    "launch_checked_backward",
    "launch_forward",
]

_THEIR_OWN = (AnyflexError, torch.OutOfMemoryError)
"""Exceptions of a kernel that pass unchanged, because users catch them."""

_PRODUCTS = 1 << 26
"""Elements of dout and out that are multiplied at a time for the gradient of sinks."""

_CONTIGUOUS = torch.contiguous_format
"""Strides of a contiguous tensor may be anything where a size is 1; tensors for a kernel have last
stride 1."""


def launch_forward(
    plan: Plan,
    call: Call,
    *,
    save: bool = False,
    saved_bytes: Tensor | None = None,
    memory: Tensor | None = None,
) -> Outputs:
    """Run forward and return its outputs.

    Args:
        plan: the call's plan.
        call: its tensors and numbers.
        save: let the kernel leave its saved outputs for backward.
        saved_bytes: memory that this is cut from, if it fits.
        memory: for out, which is else allocated: of its shape, type and dimension order.

    Raises:
        AllocationError: there is not enough memory.
        GraphCaptureError: a device graph is being captured, and the call drops weights.
        PluginError: the kernel raised; what it raised is the cause.
    """
    spec = plan.spec
    query = call.query
    if call.dropout is not None and is_capturing(plan.device_type):
        raise GraphCaptureError(
            "dropout_p is not 0 while a device graph is being captured: each replay would drop "
            "the same weights. Leave flex_attention out of the graph, or pass dropout_p=0."
        )
    lse = max_scores = workspace = None
    saved: tuple[Tensor, ...] = ()
    try:
        if memory is not None:
            out = memory
        elif plan.same_dims and query.is_contiguous():
            out = torch.empty_like(query, memory_format=_CONTIGUOUS)
        else:
            out = empty_dense(query, spec.value_head_dim)
        if spec.needs_lse or plan.max_scores:
            batch, heads, length, _ = query.shape
            # Not a torch.Size: torch takes a microsecond longer to read one than a tuple.
            rows = (batch, heads, length)
            if spec.needs_lse:
                if query.dtype is plan.accumulate:
                    lse = query.new_empty(rows)
                else:
                    lse = query.new_empty(rows, dtype=plan.accumulate)
            if plan.max_scores:
                max_scores = query.new_empty(rows, dtype=plan.accumulate)
    except (RuntimeError, MemoryError) as error:
        if failure := no_memory(plan.compiled, error):
            raise failure from error
        raise
    try:
        if save and plan.saves:
            specs = plan.kernel.saved_outputs(call)
            if saved_bytes is None:
                saved = allocate(query.device, specs)
            else:
                saved = cut(saved_bytes, specs, new=True) or ()
        if plan.works:
            workspace = take(plan.device, plan.kernel.workspace(call, "forward"))
        outputs = Outputs(out, lse, max_scores, saved, workspace.tensors if workspace else ())
        if plan.checks_reads:
            from anyflex.reference.forward import check_reads

            check_reads(spec, call)
        device = None if plan.guard is None else plan.guard()
        returned: object  # annotated as None; a plugin may return anything
        if device is None and not torch.is_autocast_enabled(plan.device_type):
            returned = plan.kernel.forward(call, outputs)
        else:
            with _guard(plan, device):
                returned = plan.kernel.forward(call, outputs)
        if returned is not None:
            raise _returned("forward", returned)
        if workspace:
            give_back(workspace)
    except _THEIR_OWN:
        raise
    except (Exception, SystemExit) as error:
        raise kernel_failed(plan.compiled, error) from error
    hooks = STATE.hooks
    if hooks is not None and hooks.listening:
        launched(plan.compiled, call)
    return outputs


def allocate_saved_bytes(plan: Plan, size: int) -> Tensor:
    """Return memory for the bytes that forward leaves behind the static op.

    Raises:
        AllocationError: there is none.
        torch.OutOfMemoryError: there is none on an accelerator.
    """
    try:
        return torch.empty(size, dtype=torch.uint8, device=plan.device)
    except (RuntimeError, MemoryError) as error:
        if failure := no_memory(plan.compiled, error):
            raise failure from error
        raise


def launch_backward(
    plan: Plan,
    call: Call,
    saved: Saved,
    grad: GradInputs,
    *,
    saved_bytes: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[Tensor | None]]:
    """Check the tensors of a backward, then `launch_checked_backward`.

    Raises:
        ArgumentError: a tensor can't be read (`anyflex.tensors.storage_checks`).
        AllocationError, PluginError: from `launch_checked_backward`.
    """
    # As `anyflex.frontend.eager_call.gather` does with forward's tensors.
    saved = Saved(saved.out.resolve_neg(), saved.lse.resolve_neg(), saved.extras)
    dlse, delta = (t if t is None else t.resolve_neg() for t in (grad.dlse, grad.delta))
    grad = GradInputs(grad.dout.resolve_neg(), dlse, delta)
    check_backward(call, saved, grad)
    return launch_checked_backward(plan, call, saved, grad, saved_bytes)


def launch_checked_backward(
    plan: Plan,
    call: Call,
    saved: Saved,
    grad: GradInputs,
    saved_bytes: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[Tensor | None]]:
    """Run backward and return the gradients of query, key, value, each captured tensor and the
    sinks, if there are any; None where none is asked for.

    Args:
        plan: the call's plan.
        call: its tensors and numbers.
        saved: what forward left; extras may lack, and are then cut from `saved_bytes` or computed.
        grad: the gradients that arrive.
        saved_bytes: memory in which this plan's forward left its saved outputs.

    Raises:
        AllocationError: there is not enough memory.
        PluginError: the kernel raised; what it raised is the cause.
    """
    of_sinks: list[Tensor | None] = []
    if call.sinks is not None:
        try:
            lse, of_sinks = _through_sinks(call.sinks, saved, grad, True in plan.sinks)
        except (RuntimeError, MemoryError) as error:
            if failure := no_memory(plan.compiled, error):
                raise failure from error
            raise
        if not plan.spec.needs_backward:
            return None, None, None, [*[None for _ in call.captured], *of_sinks]
        saved = Saved(saved.out, lse, saved.extras)
    if saved_bytes is not None:
        check_readable("what the kernel keeps for backward", saved_bytes)
    query, key, value = call.query, call.key, call.value
    workspace = None
    accumulators: list[Tensor | None] = []
    try:
        # The usual case is tested here: calling empty_dense costs as much again.
        dq, dk, dv = [
            None
            if not wanted
            else torch.empty_like(tensor, memory_format=_CONTIGUOUS)
            if tensor.is_contiguous()
            else empty_dense(tensor)
            for tensor, wanted in zip((query, key, value), plan.gradients, strict=True)
        ]
        if plan.spec.kv_broadcast and not query.shape[0]:
            # No kernel has to work on an empty batch; the keys that it shares have gradients.
            for gradient in (dk, dv):
                if gradient is not None:
                    gradient.zero_()
        for tensor, dtype in zip(call.captured, plan.accumulators, strict=True):
            if dtype is None:
                accumulators.append(None)
            elif tensor.dtype is dtype and tensor.is_contiguous():
                accumulators.append(torch.zeros_like(tensor))
            else:  # an expanded tensor's gradient is dense
                accumulators.append(tensor.new_zeros(tensor.shape, dtype=dtype))
    except (RuntimeError, MemoryError) as error:
        if failure := no_memory(plan.compiled, error):
            raise failure from error
        raise
    try:
        if plan.own_backward and plan.works:
            workspace = take(query.device, plan.kernel.workspace(call, "backward"))
        grads = Grads(dq, dk, dv, tuple(accumulators), workspace.tensors if workspace else ())
        device = None if plan.guard is None else plan.guard()
        if device is None and not torch.is_autocast_enabled(plan.device_type):
            _backward(plan, call, saved, grad, grads, saved_bytes)
        else:
            with _guard(plan, device):
                _backward(plan, call, saved, grad, grads, saved_bytes)
        if workspace:
            give_back(workspace)
    except _THEIR_OWN:
        raise
    except (Exception, SystemExit) as error:
        raise kernel_failed(plan.compiled, error) from error
    hooks = STATE.hooks
    if plan.own_backward and hooks is not None and hooks.listening:
        launched(plan.compiled, call)
    if plan.casts:
        accumulators = [
            None if accumulator is None else accumulator.to(tensor.dtype)
            for tensor, accumulator in zip(call.captured, accumulators, strict=True)
        ]
    return dq, dk, dv, [*accumulators, *of_sinks]


def _through_sinks(
    sinks: Tensor, saved: Saved, grad: GradInputs, wanted: bool
) -> tuple[Tensor, list[Tensor | None]]:
    """Return lse with the sinks in it, -inf in dead rows, and the gradient of the sinks.

    A sink's weight is w, its value 0: its score's gradient is w (0 - delta).
    """
    lse, each = saved.lse, sinks[:, None]
    dead = lse == -torch.inf
    whole = torch.where(dead, lse, torch.logaddexp(lse, each))
    if not wanted:
        return whole, [None]
    # Not exp(sink - whole): a sink of infinity has all the weight.
    heads = max(1, _PRODUCTS * sinks.numel() // max(1, saved.out.numel()))
    parts = zip(*(torch.split(each, heads, 1) for each in (grad.dout, saved.out)), strict=True)
    delta = torch.cat([(dout.to(lse.dtype) * out).sum(-1) for dout, out in parts], 1)
    gradient = torch.sigmoid(each - lse) * delta
    return whole, [-gradient.masked_fill_(dead, 0).sum((0, 2))]


@contextmanager
def _guard(plan: Plan, device: Any) -> Iterator[None]:
    """Context of a kernel's run: its device, and no autocast. Core has cast q, k and v; a kernel
    made of torch's products would otherwise have its float32 scores rounded once more.

    Args:
        device: of `Plan.guard`.
    """
    autocast: Any = nullcontext()
    # Only where it is on: a device without autocast refuses to switch it off.
    if torch.is_autocast_enabled(plan.device_type):
        autocast = torch.autocast(plan.device_type, enabled=False)
    with autocast, device or nullcontext():
        yield


def _returned(method: str, value: object) -> TypeError:
    """Return the error for a kernel that returns something instead of filling its outputs: the
    value would be lost silently."""
    return TypeError(
        f"{method}() returned a {type(value).__name__}: it must fill the tensors that it is given "
        "and return None"
    )


def _backward(
    plan: Plan,
    call: Call,
    saved: Saved,
    grad: GradInputs,
    grads: Grads,
    saved_bytes: Tensor | None,
) -> None:
    if plan.own_backward:
        if plan.saves and not saved.extras:
            extras = None
            if saved_bytes is not None:
                extras = cut(saved_bytes, plan.kernel.saved_outputs(call))
            if extras is None:
                extras = _extras(plan, call, saved)
            saved = Saved(saved.out, saved.lse, extras)
        returned: object = plan.kernel.backward(  # type: ignore[func-returns-value]
            call, saved, grad, grads
        )
        if returned is not None:
            raise _returned("backward", returned)
    else:
        from anyflex.reference.backward import core_backward

        core_backward(plan.spec, call, saved, grad, grads)


def _extras(plan: Plan, call: Call, saved: Saved) -> tuple[Tensor, ...]:
    """Compute a kernel's saved outputs again, where only out and lse arrive here: they come from
    outside, or the static op had no memory for the saved outputs."""
    device = call.query.device
    extras = allocate(device, plan.kernel.saved_outputs(call))
    if not extras:  # none for this call
        return extras
    workspace = take(device, plan.kernel.workspace(call, "forward"))
    again = Outputs(
        torch.empty_like(saved.out),
        torch.empty_like(saved.lse),
        torch.empty_like(saved.lse) if "max_scores" in plan.spec.aux else None,
        extras,
        workspace.tensors,
    )
    plan.kernel.forward(call, again)
    give_back(workspace)
    return extras
