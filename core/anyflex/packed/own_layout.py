"""Packed calls on kernels that take packed sequences and pages as they are."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from anyflex.block_mask.mask_function import RebuiltMaskMod
from anyflex.contract.call import Call, Outputs
from anyflex.contract.packed_rows import PackedRows
from anyflex.errors import BackendRefused, ModIndexError, ModTraceError
from anyflex.frontend.arguments import check_tensors, is_plain
from anyflex.frontend.checked_call import CheckedCall
from anyflex.frontend.eager_call import NO_MOD, inputs_of, named, traced_score
from anyflex.mask_structure.device_views import MaskViews
from anyflex.mask_structure.static_runs import runs_of_kinds
from anyflex.mod_graph.block_graph import BlockGraph, block_graph
from anyflex.mod_graph.block_kinds import BlockGrid, block_kinds
from anyflex.mod_graph.graph import parse_graph
from anyflex.mod_graph.simplify import simplify
from anyflex.packed.core_layout import as_batch
from anyflex.packed.packed import Packed, Step
from anyflex.packed.pages import check_pages
from anyflex.packed.rebuilt_score_mod import RebuiltScoreMod
from anyflex.packed.row_blocks import BLOCK, offsets_within, row_blocks
from anyflex.registry.cached_state import STATE
from anyflex.registry.environment import check_indices
from anyflex.registry.forced_backends import names_in_force
from anyflex.runtime.launch import launch_forward
from anyflex.runtime.plan import Plan, plan_for
from anyflex.tensors import stand_in
from anyflex.tensors.storage_checks import PLAIN, bytes_of, check_readable
from anyflex.tensors.tensor_facts import determinism, fp32_precision, memories
from anyflex.tensors.torch_versions import dual_level
from anyflex.tracing.mod_types import MaskMod
from anyflex.tracing.trace import TracedMod
from anyflex.tracing.trace_cache import traced

__all__ = ["check_as_dense", "in_own_layout"]

_ALIGNMENT = 16
"""Bytes that kernels want a tensor's address to be a multiple of."""


class _Prepared(NamedTuple):
    """Plan, sequences and structure that calls of one kind share in a step.

    Args:
        plan: of these calls.
        rows: the step's sequences.
        views: structure of the mask, or None.
        kept: `Call.kept`.
        mask: the traced mask mod. The ids of its captured tensors are their own while it lives.
    """

    plan: Plan
    rows: PackedRows
    views: MaskViews | None
    kept: dict[object, Any]
    mask: TracedMod


def in_own_layout(
    checked: CheckedCall,
    step: Step,
    mask_mod: MaskMod | None,
    enable_gqa: bool,
    scales: tuple[Tensor | None, Tensor | None],
    out: Tensor | None = None,
) -> Outputs | None:
    """Compute a packed call by a backend that takes it as it is, or return None: nobody does.

    Layers of one kind share a plan and a structure: a layer's call is a lookup and a launch.

    Args:
        checked: query is [1, Hq, T, E]; key and value are [1, Hkv, S, E | Ev], or pools of pages;
            without block mask.
        step: whose rows are whose.
        scales: of key and value, as the user gave them.
        out: [T, Hq, Ev], memory that the results may be written to instead of new one.
    """
    query, key, value, score_mod, _, scale, aux, options, backend, _, sinks, same = checked
    device = step.packed.device
    if not is_plain(query, key, value) or dual_level(forward_ad) >= 0:
        return None
    if torch.is_autocast_enabled(device.type):
        return None
    score = mask = NO_MOD
    try:
        if isinstance(score_mod, RebuiltScoreMod):
            score = score_mod.traced
        elif score_mod is not None:
            score = traced_score(score_mod, query)
        if isinstance(mask_mod, RebuiltMaskMod):
            mask = mask_mod.traced
        elif mask_mod is not None:
            mask = traced(mask_mod, "mask", torch.float32, device)
    except ModTraceError as error:
        if not error.pure:
            raise
        return None
    captured = (*score.captured, *mask.captured)
    if torch.is_grad_enabled():
        for each in (query, key, value, *scales, *score.captured):
            if each is not None and each.requires_grad:
                return None
    for each in (query, key, value, *captured):
        if each.is_neg():
            return None
    ints, floats = (*score.ints, *mask.ints), (*score.floats, *mask.floats)
    names = score.names, mask.names
    posed = stand_in.current
    kind = (
        query.shape,
        key.shape,
        value.shape,
        query.stride(),
        key.stride(),
        value.stride(),
        query.dtype,
        key.dtype,
        memories(query, key, value, captured, names),
        score.text,
        mask.text,
        ints,
        floats,
        None if not captured else (_forms(captured), *map(id, mask.captured)),
        enable_gqa,
        aux,
        sinks is not None,
        same,
        repr(options) if options else None,  # 1, 1.0 and True are equal
        backend,
        names_in_force(backend),
        posed,
        fp32_precision(query.dtype, device.type if posed is None else posed[0]),
        determinism(),
        STATE.generation,
    )
    if sinks is not None:
        check_readable("sinks", sinks)
    prepared = step.once(kind, _prepare, checked, step, score, mask, enable_gqa)
    if prepared is None:
        return None
    call = Call(
        query,
        key,
        value,
        prepared.views,
        captured,
        ints,
        floats,
        scale,
        packed=prepared.rows,
        sinks=sinks,
    )
    call.kept = prepared.kept
    if key.dtype is not query.dtype:
        call.k_scale, call.v_scale = (
            _scale_of(each, scale) for each, scale in zip((key, value), scales, strict=True)
        )
    memory = None
    if out is not None and _is_apart(out, query, key, value, *captured, *scales, sinks):
        memory = as_batch(out)
    try:
        return launch_forward(prepared.plan, call, memory=memory)
    except ModIndexError as error:
        raise named(error, [*names[0], *names[1]]) from error.__cause__


def _is_apart(out: Tensor, query: Tensor, *read: Tensor | None) -> bool:
    """Whether a kernel may write its results to `out` while it reads the others: it lies as new
    memory would, and in none of theirs."""
    # New memory has the order of query's dimensions.
    if query.stride(1) > query.stride(2) and 1 not in query.shape[1:3]:
        return False
    if type(out) not in PLAIN or not out.is_contiguous() or out.is_neg():
        return False
    first = out.data_ptr()
    if first == 0 or first % _ALIGNMENT != 0:
        return False
    # Memory that torch didn't allocate, as numpy's, may be in several storages.
    end = first + out.nbytes
    return all(
        x is None or x.data_ptr() >= end or x.data_ptr() + bytes_of(x) <= first
        for x in (query, *read)
    )


def _forms(captured: tuple[Tensor, ...]) -> tuple[object, ...]:
    """Return what a call's checks of its captured tensors depend on, beside their texts."""
    return tuple([(each.device, each.layout) for each in captured])


def _prepare(
    checked: CheckedCall, step: Step, score: TracedMod, mask: TracedMod, enable_gqa: bool
) -> _Prepared | None:
    """Check a call, and return what those of its kind share; None where nobody takes them."""
    query, key, value = checked.query, checked.key, checked.value
    packed = step.packed
    if 0 in (packed.sequences, *key.shape):
        return None
    check_as_dense(query, key, value, enable_gqa)
    length = query.shape[2]
    rows = step.once(("rows", length), _rows, packed, length)
    views = None
    if mask.text:
        # A plan depends on the size of blocks alone.
        views = MaskViews(rows.slots.view(1, 1, -1), rows.slots, 0, 0, (BLOCK, BLOCK))
    try:
        inputs = inputs_of(checked, mask, views, packed=rows, score=score)
        plan = plan_for(inputs)
    except BackendRefused as refused:
        if checked.batch_invariant:
            raise BackendRefused(
                "batch_invariant=True needs a kernel that takes packed sequences as they are: "
                f"{refused}",
                refused.reasons,
            ) from refused
        return None
    looks = packed.known is None and (packed.device.type == "cpu" or check_indices())
    if packed.page_table is not None and looks:
        step.once(("checked", *key.shape[:3:2]), check_pages, packed, *key.shape[:3:2])
    if views is not None:
        heads = query.shape[1] if _reads_heads(mask.text) else 1
        numbers = mask.text, *mask.ints, *mask.floats, *map(id, mask.captured)
        views, _ = step.once(
            ("blocks", length, heads, numbers), lambda: (_views(rows, mask, heads), mask)
        )
    return _Prepared(plan, rows, views, plan.kept_by_packed(inputs.call, rows), mask)


def check_as_dense(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Check a packed call's tensors, or its pages, as a dense call of one batch. Dynamo inlines
    this."""
    # Stored keys and values stand for ones of the query's type.
    one_key, one_value = (_of_type(each[:1], query.dtype) for each in (key, value))
    check_tensors(query, one_key, one_value, enable_gqa)


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


def _rows(packed: Packed, length: int) -> PackedRows:
    table = packed.page_table
    if table is not None and table.stride(1) != 1:
        table = table.contiguous()
    lowest, highest = packed.known or (None, None)
    max_kv = packed.max_kv
    if packed.device.type == "cpu":
        max_kv = int(packed.kv_lengths.max())
    if packed.device.type == "cpu" and packed.known is None:
        ends = packed.q_starts + packed.q_offsets.diff()
        numbers = torch.stack([packed.q_starts, packed.slots, ends, packed.kv_lengths])
        lowest, highest = min(int(numbers.min()), 0), int(numbers.max())
    q_offsets = offsets_within(packed)
    return PackedRows(
        q_offsets,
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
        row_blocks(packed, q_offsets, length),
    )


@functools.lru_cache(maxsize=256)
def _reads_heads(text: str) -> bool:
    return "h" in parse_graph(text).inputs()


@functools.lru_cache(maxsize=256)
def _block_graph(text: str) -> BlockGraph:
    return block_graph(simplify(parse_graph(text)))


def _views(rows: PackedRows, mask: TracedMod, heads: int) -> MaskViews:
    """Return the structure of a mask: rows of blocks sequence after sequence, then those of
    padding rows, and spare ones, without runs."""
    sequence, block = rows.blocks.unbind(1)
    owner = sequence.clamp(0, rows.slots.shape[0] - 1)
    keys = rows.kv_lengths.clamp(max=rows.max_kv)
    numbers = torch.stack([rows.q_offsets.diff(), rows.q_starts, keys, rows.slots])[:, owner]
    q_length, start, kv_length, slot = numbers.unbind(0)
    first = block * BLOCK
    columns = max(-(-rows.max_kv // BLOCK), 1)
    blocks = _block_graph(mask.text)
    kinds = block_kinds(
        blocks,
        # Each row of blocks takes the place of a sequence.
        BlockGrid(heads, 1, columns, BLOCK, BLOCK),
        slots=slot,
        q_starts=start + first,
        q_lengths=(q_length - first) * (owner == sequence),
        kv_lengths=kv_length,
        captured=blocks.tensors([each.detach() for each in mask.captured], BLOCK, BLOCK),
        ints=mask.ints,
        floats=mask.floats,
    )
    size = rows.blocks.shape[0] * BLOCK, rows.max_kv
    return MaskViews(*runs_of_kinds(kinds[:, :, 0].transpose(0, 1)), *size, (BLOCK, BLOCK))
