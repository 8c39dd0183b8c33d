"""The traced half of a call: what torch.compile and export put into the graph, one static op."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.frontend.arguments import check_captured_devices
from anyflex.frontend.checked_call import CheckedCall
from anyflex.frontend.custom_ops import flex_attention_op
from anyflex.frontend.dropout_seed import draw_seed
from anyflex.frontend.transforms import refuse_transforms
from anyflex.runtime.op_request import Request, write_request
from anyflex.runtime.saved_for_backward import NOTHING, saved_bytes
from anyflex.tensors.dynamo_errors import fail
from anyflex.tensors.stand_in import posed_as
from anyflex.tensors.symbolic_numbers import number_tensors
from anyflex.tensors.tensor_facts import fp32_precision
from anyflex.tracing.trace import TracedMod, trace_mod

__all__ = ["op_arguments", "run_op"]


def run_op(call: CheckedCall) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Call the static op and return out, lse and max_scores, None for what isn't asked for."""
    refuse_transforms()
    arguments, _, _ = op_arguments(call)
    out, lse, max_scores, *_ = flex_attention_op(call.query, call.key, call.value, *arguments)
    return out, lse if call.aux.lse else None, max_scores if call.aux.max_scores else None


def op_arguments(
    call: CheckedCall, every_gradient: bool = False
) -> tuple[tuple[list[Tensor], list[int], str], list[Tensor], list[bool]]:
    """Return what the static ops take after query, key and value (tensors, ints, request), the
    captured tensors among them, and whether a gradient is wanted of query, key, value and each
    captured tensor. `every_gradient`: query, key and value need not require it."""
    query, key, value, score_mod, block_mask, scale, aux, options, backend, dropout_p, *_ = call
    sinks = call.sinks
    score = TracedMod("", [], [], [], [])
    if score_mod is not None:
        wide = query.dtype is torch.float64
        score = trace_mod(
            score_mod, "score", torch.float64 if wide else torch.float32, query.device
        )
    mask = TracedMod("", [], [], [], [])
    structure: list[Tensor] = []
    block_size: tuple[int, ...] = ()
    if block_mask is not None:
        structure = [block_mask.offsets, block_mask.runs]
        if block_mask.mark is not None:
            structure = [*structure, block_mask.mark]
        if block_mask.offsets.is_meta and not query.is_meta:
            fail(
                "BlockMaskError",
                "this block mask is on meta, where it has no values, and can't move to "
                f"{query.device}",
            )
        block_size = block_mask.BLOCK_SIZE
        if block_mask.traced is not None:
            mask = block_mask.traced
        elif block_mask.opaque is not None:
            fail(
                "ModTraceError",
                "block_mask's mask_mod could not be traced, and runs through vmap in eager calls "
                "only",
                operation="mask_mod",
                hint="Write it with the operations of the table in the documentation.",
            )
    captured = [*score.captured, *mask.captured]
    check_captured_devices(query.device, captured, [*score.names, *mask.names])
    grad_mode = torch.is_grad_enabled()
    gradients = [
        every_gradient or (grad_mode and tensor.requires_grad) for tensor in (query, key, value)
    ]
    gradients += [grad_mode and tensor.requires_grad for tensor in score.captured]
    gradients += [False for _ in mask.captured]
    needs_backward = any(gradients)
    sink_gradient: tuple[bool, ...] = ()
    if sinks is not None:
        sink_gradient = (grad_mode and sinks.requires_grad,)
        captured = [*captured, sinks]
    posed = posed_as(query.device)
    saved = NOTHING
    if needs_backward and not every_gradient:  # else no forward of this call runs
        saved = saved_bytes(query.device, query.dtype, backend)
    numbers = number_tensors([scale, *score.floats, *mask.floats])
    drops = False  # a plain bool: Dynamo can't write a comparison of symbols into the request
    if dropout_p != 0:
        drops = True
        numbers += [*number_tensors([dropout_p]), draw_seed()]
    request = Request(
        score.text,
        mask.text,
        (len(score.captured), len(score.ints), len(score.floats)),
        aux.lse,
        aux.max_scores,
        aux.lse or needs_backward or True in sink_gradient,
        tuple(gradients),
        backend,
        options,
        posed,
        saved,
        fp32_precision(query.dtype, query.device.type if posed is None else posed[0]),
        drops,
        sinks=sink_gradient,
    )
    ints = [len(structure), len(captured), *score.ints, *mask.ints, *block_size]
    return ([*structure, *captured, *numbers], ints, write_request(request)), captured, gradients
