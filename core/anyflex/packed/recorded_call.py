"""The traced half of a packed call: what torch.compile and export put into the graph."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.contract.call import Outputs
from anyflex.frontend.arguments import check_captured_devices
from anyflex.frontend.checked_call import CheckedCall
from anyflex.frontend.transforms import refuse_transforms
from anyflex.packed.own_layout import check_as_dense
from anyflex.packed.packed import Step
from anyflex.packed.packed_op import packed_op
from anyflex.packed.packed_request import PackedRequest, write_packed_request
from anyflex.runtime.plain_backend import takes
from anyflex.tensors.symbolic_numbers import number_tensors
from anyflex.tracing.mod_types import MaskMod
from anyflex.tracing.trace import TracedMod, trace_mod

__all__ = ["recorded"]


def recorded(
    checked: CheckedCall,
    step: Step,
    mask_mod: MaskMod | None,
    enable_gqa: bool,
    scales: tuple[Tensor | None, Tensor | None],
) -> Outputs | None:
    """Put a call's static op into the program, and return its outputs; None where nobody takes
    such calls as they are, or it needs gradients, which the op hasn't. Dynamo inlines this.

    Args:
        checked, step, mask_mod, enable_gqa, scales: as for `in_own_layout`.
    """
    query, key, value, score_mod, _, scale, aux, options, backend, *_ = checked
    if torch.is_autocast_enabled(query.device.type):
        return None
    if not takes("q_layout", query.device, query.dtype, backend, False):
        return None
    refuse_transforms()
    check_as_dense(query, key, value, enable_gqa)
    score = mask = TracedMod("", [], [], [], [])
    if score_mod is not None:
        wide = torch.float64 if query.dtype is torch.float64 else torch.float32
        score = trace_mod(score_mod, "score", wide, query.device)
    if mask_mod is not None:
        mask = trace_mod(mask_mod, "mask", device=query.device)
    k_scale, v_scale = scales
    stored = [] if k_scale is None or v_scale is None else [k_scale, v_scale]
    if torch.is_grad_enabled():
        for each in (query, key, value, *stored, *score.captured):
            if each.requires_grad:
                return None
    captured = [*score.captured, *[each.detach() for each in mask.captured]]
    check_captured_devices(query.device, captured, [*score.names, *mask.names])
    packed = step.packed
    table = packed.page_table
    keys_at = packed.kv_offsets if table is None else table
    lowest, highest = (1, 0) if packed.known is None else packed.known
    request = PackedRequest(
        score.text,
        mask.text,
        (len(score.captured), len(score.ints), len(score.floats)),
        table is not None,
        len(stored) > 0,
        aux.lse,
        aux.max_scores,
        options,
        backend,
        checked.batch_invariant,
    )
    rows = [packed.q_offsets, packed.q_starts, packed.kv_lengths, packed.slots, keys_at]
    numbers = number_tensors([scale, *score.floats, *mask.floats])
    sizes = [len(captured), packed.max_q, packed.max_kv, lowest, highest]
    return Outputs(
        *packed_op(
            query,
            key,
            value,
            [*rows, *stored, *captured, *numbers],
            [*sizes, *score.ints, *mask.ints],
            write_packed_request(request),
        )
    )
