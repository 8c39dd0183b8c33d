"""`create_block_mask` and `create_mask`: masks from mask mods."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.block_mask.block_mask import BlockMask
from anyflex.block_mask.dense_scan import live_boxes
from anyflex.block_mask.elementwise_evaluation import elements_of
from anyflex.block_mask.in_graphs import built_in_graph
from anyflex.block_mask.mask_function import trace_mask_mod
from anyflex.block_mask.structure_builder import built_runs, captured_device
from anyflex.errors import ModTraceError
from anyflex.intervals.evaluation import Domain
from anyflex.mask_structure.device_views import packed_views
from anyflex.mask_structure.run_checks import checked_block_size, checked_device, checked_length
from anyflex.mask_structure.runs import PARTIAL
from anyflex.tensors.allocation import failed_allocation
from anyflex.tensors.dynamo_disabled import in_graph, outside_graphs
from anyflex.tensors.dynamo_errors import fail
from anyflex.tracing.mod_types import MaskMod
from anyflex.tracing.trace import mod_kind, trace_mod

__all__ = ["create_block_mask", "create_mask"]


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | int | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
    *,
    exact: bool = False,
) -> BlockMask:
    """Return the block mask of a mask mod: torch's function, without the Q x KV tensor.

    A block all of whose elements inside the lengths are live is FULL, one without live elements
    is not listed, every other is PARTIAL. Ranges of the traced function decide most blocks; the
    elements of the others are looked at. After work worth 2^30 elements (a cell that ranges judge
    counts as 64) what is undecided stays PARTIAL, which is right and may be slower, with one
    PerformanceWarning. The work is done on the CPU; reading captured tensors from a device is the
    only synchronisation. Inside of ``torch.compile`` and ``torch.export`` it is one operation of
    the graph, which does the same when the program runs.

    Examples:
        >>> mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256)
        >>> mask.runs.tolist()  # [first block, end block, kind]; kind 1 is FULL, 2 PARTIAL
        [[0, 1, 2], [0, 1, 1], [1, 2, 2]]

    Args:
        mask_mod: ``f(b, h, q_idx, kv_idx) -> bool``.
        B, H: batch and head sizes, None for 1. What mask_mod doesn't read is built and stored
            once for all, and such a mask serves calls of any size.
        Q_LEN, KV_LEN: lengths in elements, 0 included.
        device: where the mask and its captured tensors shall be; None means where the captured
            tensors are, or the CPU.
        BLOCK_SIZE: int, or (q, kv).
        separate_full_blocks: False lists FULL blocks as PARTIAL: the same mask, slower.
        exact: look at everything, whatever it costs.
        _compile, compute_dq_write_order, dq_kv_order: accepted for torch's sake. Building needs
            no compiler, and deterministic gradients need nothing from the mask.

    Raises:
        BlockMaskError: a wrong argument, or a wrong signature or result of mask_mod.
        ModTraceError: mask_mod can't be a mask mod.
        ModIndexError: an element that is looked at is live and reads outside of a captured tensor.
            What building needn't look at is checked when the mask is used.
    """
    for name, flag in (
        ("separate_full_blocks", separate_full_blocks),
        ("dq_kv_order", dq_kv_order),
        ("exact", exact),
    ):
        if not isinstance(flag, bool):
            fail(
                "BlockMaskError",
                f"{name} must be a bool in create_block_mask, got {type(flag).__name__}",
            )
    if in_graph():
        sizes = B, H, Q_LEN, KV_LEN
        flags = separate_full_blocks, exact
        return built_in_graph(BlockMask, mask_mod, sizes, device, BLOCK_SIZE, flags)
    batch, heads, lengths = _sizes(B, H, Q_LEN, KV_LEN)
    block_size = checked_block_size(BLOCK_SIZE)
    wanted = None if device is None else checked_device(device)
    traced, opaque = trace_mask_mod(mask_mod, wanted)
    at_home = captured_device(traced)
    wanted = at_home if wanted is None else wanted
    # Tensors that an opaque function reads can't be moved, so it runs on the mask's device.
    elements = elements_of(traced, opaque, torch.device("cpu") if traced is not None else wanted)
    asked = batch, heads
    batch, heads = elements.grid(batch, heads)
    # The indices that an opaque mask mod reads aren't known, so a mask for one head may be wrong
    # for more.
    alone = {"b": batch, "h": heads} if traced is not None else {}
    zero_alone = tuple(i for i, size in alone.items() if size == 1 and i in elements.depends)
    runs = built_runs(elements, Domain(batch, heads, lengths, block_size), exact)
    if not separate_full_blocks:
        runs = runs._replace(kind=torch.full_like(runs.kind, PARTIAL))
    views = packed_views(runs, (batch, heads), lengths, block_size)
    return BlockMask._assembled(views, traced, opaque, mask_mod, zero_alone, asked).to(wanted)


@outside_graphs
def create_mask(
    mod_fn: Any,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | int | None = None,
) -> Tensor:
    """Return the dense mask of a mask mod or score mod as bool [B, H, Q_LEN, KV_LEN].

    An element is dead where the mask mod gives False, or the score mod gives -inf for score 0.
    B and H default to 1; `device` as in `create_block_mask`. Raises as it does, and
    AllocationError where there is no memory for it.
    """
    batch, heads, lengths = _sizes(B, H, Q_LEN, KV_LEN)
    wanted = None if device is None else checked_device(device)
    kind = mod_kind(mod_fn, "mod_fn")
    traced, opaque = None, None
    if kind == "mask":
        traced, opaque = trace_mask_mod(mod_fn, wanted)
    else:
        try:
            traced = trace_mod(mod_fn, "score")
        except ModTraceError as error:
            if not error.pure:
                raise
            opaque = mod_fn
    at_home = captured_device(traced)
    wanted = at_home if wanted is None else wanted
    elements = elements_of(traced, opaque, wanted, kind)
    shape = (batch, heads, *lengths)
    try:
        mask = torch.empty(shape, dtype=torch.bool, device=wanted)
    except (RuntimeError, MemoryError) as error:
        doing = f"there is not enough memory on {wanted} for the mask {list(shape)}"
        told = failed_allocation(doing, error)
        if told is None:
            raise
        raise told from error
    for box, live in live_boxes(elements, batch, heads, lengths):
        mask[box] = live
    return mask


def _sizes(B: Any, H: Any, Q_LEN: Any, KV_LEN: Any) -> tuple[int, int, tuple[int, int]]:
    batch = 1 if B is None else checked_length("B", B)
    heads = 1 if H is None else checked_length("H", H)
    return batch, heads, (checked_length("Q_LEN", Q_LEN), checked_length("KV_LEN", KV_LEN))
