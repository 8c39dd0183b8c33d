"""Gradients of an eager call: one ``autograd.Function`` around a planned launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.contract.call import Call, GradInputs, Saved
from anyflex.errors import ArgumentError, BackendRefused, PluginError
from anyflex.frontend.custom_ops import flex_attention_backward_op
from anyflex.runtime.launch import launch_checked_backward, launch_forward
from anyflex.runtime.plan import Inputs, Plan
from anyflex.runtime.saved_tensor_checks import as_saved, kept_name, layout_of
from anyflex.tensors.storage_checks import captured_name, check_captured, check_readable
from anyflex.tensors.symbolic_numbers import number_tensors
from anyflex.tensors.torch_versions import (
    break_graph,
    is_batched,
    kept_out_of_graphs,
)

__all__ = ["FlexAttention", "not_twice"]


class FlexAttention(torch.autograd.Function):
    """out, and lse and max_scores where they are asked for. Sinks are the last captured tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        inputs: Inputs,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *captured: Tensor,
    ) -> Tensor | tuple[Tensor, ...]:
        call, request = inputs.call, inputs.request
        outputs = launch_forward(plan, call, save=True)
        out, lse = outputs.out, outputs.lse
        assert lse is not None
        ctx.set_materialize_grads(False)
        saved = (query, key, value, out, lse, *captured, *outputs.saved)
        ctx.save_for_backward(*saved)
        # These layouts follow from the shapes, for which calls share `kept`.
        kept = call.kept
        assert kept is not None
        layouts = kept.get("anyflex.saved")
        if layouts is None:
            layouts = kept["anyflex.saved"] = [layout_of(tensor) for tensor in saved[:5]]
        # No tensor of the call may stay reachable but through save_for_backward: that would miss
        # changes in place, and keep memory that hooks were to move away.
        ctx.rest = (
            plan,
            [*layouts, *map(layout_of, saved[5:])],
            call.mask,
            len(captured),
            call.ints,
            call.floats,
            call.scale,
            call.score_function,
            call.mask_function,
            # But a mod that runs through vmap reads its own tensors anyway, not the saved ones.
            call.captured if call.score_function or call.mask_function else None,
            request.lse,
            inputs.names,
            call.kept,
            call.dropout,
        )
        if not request.lse and not request.max_scores:
            return out
        results = [out]
        if request.lse:
            results.append(lse)
        if request.max_scores:
            assert outputs.max_scores is not None
            ctx.mark_non_differentiable(outputs.max_scores)
            results.append(outputs.max_scores)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *aux: Tensor | None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # compiled autograd
            return _traced_backward(ctx, dout, *aux)
        (
            plan, layouts, views, count, ints, floats, scale, score_function, mask_function, read,
            with_lse, names, kept, dropout,
        ) = ctx.rest  # fmt: skip
        query, key, value, out, lse, *others = as_saved(
            ctx.saved_tensors,
            layouts,
            plan.device,
            lambda position: _name(position, count, names),
        )
        end = count - len(plan.sinks)
        captured = tuple(others[:end])
        if read is not None:
            captured = read
        call = Call(
            query,
            key,
            value,
            views,
            captured,
            ints,
            floats,
            scale,
            score_function,
            mask_function,
            kept,
            dropout,
            sinks=others[end] if plan.sinks else None,
        )
        dlse = aux[0] if with_lse else None
        dout = torch.zeros_like(out) if dout is None else dout.resolve_neg()
        try:
            # The saved tensors are checked already.
            check_readable("dout, the gradient that arrives at out,", dout)
            if dlse is not None:
                dlse = dlse.resolve_neg()
                check_readable("dlse, the gradient that arrives at lse,", dlse)
            if read:
                check_captured(read, names)
            dq, dk, dv, dcaptured = launch_checked_backward(
                plan, call, Saved(out, lse, tuple(others[count:])), GradInputs(dout, dlse)
            )
        except (PluginError, ArgumentError) as error:
            if not (is_batched(dout) or (dlse is not None and is_batched(dlse))):
                raise
            raise BackendRefused(
                "gradients of flex_attention can't be batched (is_grads_batched=True, "
                "vectorize=True): ask for one at a time",
                {"reference": "batched gradients are not implemented"},
            ) from error
        gradients = [dq, dk, dv, *dcaptured]
        if torch.is_grad_enabled():
            arrived = [dout] if dlse is None else [dout, dlse]
            gradients = not_twice(gradients, [query, key, value, *arrived, *others[:count]])
        return (None, None, *gradients)


def _traced_backward(ctx: Any, dout: Tensor | None, *aux: Tensor | None) -> Any:
    """Call the static op. Dynamo inlines this."""
    (
        plan, _, views, count, ints, floats, scale, score_function, mask_function, _,
        with_lse, _, _, dropout,
    ) = ctx.rest  # fmt: skip
    if score_function is not None or mask_function is not None:
        break_graph(
            "score_mod or block_mask's mask_mod can't be traced, and its backward runs through "
            "vmap: write it with the operations of anyflex's documentation, or call backward "
            "outside of compiled autograd"
        )
        return _backward_outside_graphs(ctx, dout, *aux)
    query, key, value, out, lse, *others = ctx.saved_tensors
    captured, kept = others[:count], others[count:]
    saved = saved_by = None
    if kept:
        saved = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in kept])
        saved_by = torch.full((1,), plan.mark, dtype=torch.int64, device="cpu")
    structure: list[Tensor] = []
    block_size: tuple[int, ...] = ()
    if views is not None:
        structure = [views.offsets, views.runs]
        block_size = views.block_size
    numbers = [scale, *floats]
    if dropout is not None:
        numbers += [dropout.p, dropout.seed]
    gradients = flex_attention_backward_op(
        torch.zeros_like(out) if dout is None else dout,
        aux[0] if with_lse else None,
        None,
        query,
        key,
        value,
        out,
        lse,
        saved,
        saved_by,
        [*structure, *captured, *number_tensors(numbers)],
        [len(structure), count, *ints, *block_size],
        plan.request,
    )
    wanted = [*plan.gradients, *[dtype is not None for dtype in plan.accumulators], *plan.sinks]
    return (
        None,
        None,
        *[gradient if flag else None for gradient, flag in zip(gradients, wanted, strict=True)],
    )


_backward_outside_graphs = kept_out_of_graphs(FlexAttention.backward)

_SAVED = ("query", "key", "value", "out", "lse")


def _name(position: int, captured: int, names: tuple[list[str], list[str]]) -> str:
    """Return the name of a saved tensor, by its position, for messages."""
    if position < len(_SAVED):
        return _SAVED[position]
    position -= len(_SAVED)
    if position < captured:
        return captured_name(position, names)
    return kept_name(position - captured)


class _NotTwice(torch.autograd.Function):
    """Passes gradients on, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise BackendRefused(
            "flex_attention is not differentiable twice: its gradients were asked for with "
            "create_graph=True and then differentiated",
            {"reference": "second derivatives are not implemented"},
        )


def not_twice(gradients: list[Tensor | None], sources: list[Tensor]) -> list[Tensor | None]:
    """Make a second differentiation through `gradients` a BackendRefused."""
    given = [gradient for gradient in gradients if gradient is not None]
    passed = iter(_NotTwice.apply(len(given), *given, *sources))  # type: ignore[no-untyped-call]
    return [None if gradient is None else next(passed) for gradient in gradients]
