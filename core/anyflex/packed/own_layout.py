"""Packed calls on kernels that take packed sequences and pages as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from anyflex.contract.call import Outputs
from anyflex.contract.packed_rows import PackedRows
from anyflex.errors import BackendRefused, ModIndexError, ModTraceError
from anyflex.frontend.arguments import check_tensors, is_plain
from anyflex.frontend.checked_call import CheckedCall
from anyflex.frontend.eager_call import NO_MOD, inputs_of, named
from anyflex.mask_structure.device_views import MaskViews
from anyflex.mask_structure.static_runs import runs_of_kinds
from anyflex.mod_graph.block_graph import BlockGraph, block_graph
from anyflex.mod_graph.block_kinds import BlockGrid, block_kinds
from anyflex.mod_graph.graph import parse_graph
from anyflex.mod_graph.simplify import simplify
from anyflex.packed.packed import Packed, Step
from anyflex.packed.pages import check_pages
from anyflex.packed.row_blocks import BLOCK, row_blocks
from anyflex.registry.environment import check_indices
from anyflex.registry.forced_backends import names_in_force
from anyflex.runtime.launch import launch_forward
from anyflex.runtime.plan import Inputs, plan_for
from anyflex.tensors.dynamo_disabled import in_graph
from anyflex.tensors.torch_versions import dual_level
from anyflex.tracing.mod_types import MaskMod
from anyflex.tracing.trace import TracedMod
from anyflex.tracing.trace_cache import traced

__all__ = ["in_own_layout"]


def in_own_layout(
    checked: CheckedCall,
    step: Step,
    mask_mod: MaskMod | None,
    enable_gqa: bool,
    scales: tuple[Tensor | None, Tensor | None],
) -> Outputs | None:
    """Compute a packed call by a backend that takes it as it is, or return None: nobody does.

    Args:
        checked: query is [1, Hq, T, E]; key and value are [1, Hkv, S, E | Ev], or pools of pages;
            without block mask.
        step: whose rows are whose.
        scales: of key and value, as the user gave them.
    """
    query, key, value = checked.query, checked.key, checked.value
    packed = step.packed
    if in_graph() or 0 in (packed.sequences, *key.shape):
        return None
    # Stored keys and values stand for ones of the query's type.
    one_key, one_value = (_of_type(each[:1], query.dtype) for each in (key, value))
    check_tensors(query, one_key, one_value, enable_gqa)
    learns = any(each is not None and each.requires_grad for each in (query, key, value, *scales))
    if (learns and torch.is_grad_enabled()) or torch.is_autocast_enabled(packed.device.type):
        return None
    if not is_plain(query, key, value) or dual_level(forward_ad) >= 0:
        return None
    try:
        inputs, views = _inputs(checked, step, mask_mod)
    except ModTraceError as error:
        if not error.pure:
            raise
        return None
    if inputs.call.score_function is not None or True in inputs.request.gradients:
        return None
    call = inputs.call
    if key.dtype is not query.dtype:
        call.k_scale, call.v_scale = (
            _scale_of(each, scale) for each, scale in zip((key, value), scales, strict=True)
        )
    names = names_in_force(checked.backend)
    refused = "refused", inputs.request, query.dtype, key.shape, names
    if step.has(refused):
        return None
    try:
        plan = plan_for(inputs)
    except BackendRefused:
        step.once(refused, lambda: None)
        return None
    reads_values = packed.device.type == "cpu" or check_indices()
    if packed.page_table is not None and reads_values:
        step.once(("checked", *key.shape[:3:2]), lambda: check_pages(packed, *key.shape[:3:2]))
    if views is not None:
        call.mask = views()
    try:
        return launch_forward(plan, call)
    except ModIndexError as error:
        raise named(error, [*inputs.names[0], *inputs.names[1]]) from error.__cause__


def _of_type(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of this shape and type, without numbers."""
    return stored if stored.dtype is dtype else stored.new_empty((), dtype=dtype).expand_as(stored)


def _scale_of(stored: Tensor, scale: Tensor | None) -> Tensor:
    """Return the scale of each row of each head."""
    assert scale is not None
    if scale.dim() == 1:
        scale = scale[:, None]
    elif scale.dim() == 2:  # [S, Hkv], of packed rows
        scale = scale.T[None]
    return scale.expand(stored.shape[:3])


def _inputs(
    checked: CheckedCall, step: Step, mask_mod: MaskMod | None
) -> tuple[Inputs, Callable[[], MaskViews] | None]:
    """Return a call whose mask has no blocks yet, and what finds them."""
    length = checked.query.shape[2]
    rows = step.once(("rows", length), lambda: _rows(step.packed, length))
    if mask_mod is None:
        return inputs_of(checked, NO_MOD, None, packed=rows), None
    mask = traced(mask_mod, "mask", torch.float32, step.packed.device)

    def views() -> MaskViews:
        heads = checked.query.shape[1] if _reads_heads(mask.text) else 1
        key = mask.text, *map(id, mask.captured), *mask.ints, *mask.floats
        # The mask goes along: its captured tensors' ids are its own as long as it lives.
        return step.once(
            ("blocks", length, heads, *key), lambda: (_views(rows, mask, heads), mask)
        )[0]

    # A plan depends on the size of blocks alone.
    unseen = step.once(
        ("no blocks yet",),
        lambda: MaskViews(rows.slots.view(1, 1, -1), rows.slots, 0, 0, (BLOCK, BLOCK)),
    )
    return inputs_of(checked, mask, unseen, packed=rows), views


def _rows(packed: Packed, length: int) -> PackedRows:
    table = packed.page_table
    if table is not None and table.stride(1) != 1:
        table = table.contiguous()
    lowest = highest = None
    max_kv = packed.max_kv
    if packed.device.type == "cpu":
        ends = packed.q_starts + packed.q_offsets.diff()
        numbers = torch.stack([packed.q_starts, packed.slots, ends, packed.kv_lengths])
        lowest, highest = min(int(numbers.min()), 0), int(numbers.max())
        max_kv = int(packed.kv_lengths.max())
    return PackedRows(
        packed.q_offsets.contiguous(),
        packed.q_starts.contiguous(),
        packed.kv_lengths.contiguous(),
        packed.slots.contiguous(),
        packed.kv_offsets[:-1].contiguous() if table is None else None,
        table,
        None if packed.table_rows is None else packed.table_rows.contiguous(),
        packed.max_q,
        max_kv,
        lowest,
        highest,
        row_blocks(packed, length),
    )


@functools.lru_cache(maxsize=256)
def _reads_heads(text: str) -> bool:
    return "h" in parse_graph(text).inputs()


@functools.lru_cache(maxsize=256)
def _block_graph(text: str) -> BlockGraph:
    return block_graph(simplify(parse_graph(text)))


def _views(rows: PackedRows, mask: TracedMod, heads: int) -> MaskViews:
    """Return the structure of a mask: rows of blocks sequence after sequence, then those of rows
    that belong to nobody, and spare ones, without runs."""
    sequence, block = rows.blocks.unbind(1)
    there = (sequence >= 0) & (sequence < rows.slots.shape[0])
    owner = torch.where(there, sequence, 0)
    first = block * BLOCK
    q_lengths = rows.q_offsets.diff()[owner].clamp(max=rows.max_q) - first
    columns = max(-(-rows.max_kv // BLOCK), 1)
    blocks = _block_graph(mask.text)
    kinds = block_kinds(
        blocks,
        # Each row of blocks takes the place of a sequence.
        BlockGrid(heads, 1, columns, BLOCK, BLOCK),
        slots=rows.slots[owner],
        q_starts=rows.q_starts[owner] + first,
        q_lengths=torch.where(there, q_lengths, 0),
        kv_lengths=rows.kv_lengths[owner].clamp(max=rows.max_kv),
        captured=blocks.tensors([each.detach() for each in mask.captured], BLOCK, BLOCK),
        ints=mask.ints,
        floats=mask.floats,
    )
    lengths = rows.blocks.shape[0] * BLOCK, rows.max_kv
    return MaskViews(*runs_of_kinds(kinds[:, :, 0].transpose(0, 1)), *lengths, (BLOCK, BLOCK))
