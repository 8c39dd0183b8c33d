"""Building block masks from mask mods: every element is looked at, 2^20 at once at most."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from anyflex.block_mask.block_mask import BlockMask
from anyflex.block_mask.elements import Elements, elements_of
from anyflex.block_mask.mask_function import MaskMod, captured_name, trace_mask_mod
from anyflex.block_mask.run_checks import checked_block_size, checked_device, checked_length
from anyflex.block_mask.runs import FULL, PARTIAL, RunList, block_count, pack, runs_of_grid
from anyflex.errors import BlockMaskError, ModTraceError
from anyflex.mod_graph.trace import TracedMod, mod_kind, trace_mod

__all__ = ["create_block_mask", "create_mask"]

_ELEMENTS = 1 << 20
"""Elements evaluated at once: about 10 bytes each while a chunk is worked on."""


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
) -> BlockMask:
    """Return the block mask of a mask mod: torch's function, without the Q x KV tensor.

    A block all of whose elements inside the lengths are live is FULL, one without live elements
    is not listed, every other is PARTIAL. The work is done on the CPU; reading captured tensors
    from a device is the only synchronisation. Inside ``torch.compile`` it breaks the graph: call
    it outside of ``fullgraph=True``.

    >>> mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256)
    >>> mask.runs.tolist()  # [first block, end block, kind]; kind 1 is FULL, 2 PARTIAL
    [[0, 1, 2], [0, 1, 1], [1, 2, 2]]

    Args:
        mask_mod: ``f(b, h, q_idx, kv_idx) -> bool``.
        B, H: batch and head sizes, None for 1. The mask has size 1 where mask_mod doesn't
            read the index.
        Q_LEN, KV_LEN: lengths in elements, 0 included.
        device: where the mask and its captured tensors shall be; None means where the captured
            tensors are, or the CPU.
        BLOCK_SIZE: int, or (q, kv).
        separate_full_blocks: False lists FULL blocks as PARTIAL: the same mask, slower.
        _compile, compute_dq_write_order, dq_kv_order: accepted for torch's sake. Building needs
            no compiler, and deterministic gradients need nothing from the mask.

    Raises:
        BlockMaskError: a wrong argument, signature or result of mask_mod, or a captured tensor
            that requires grad.
        ModTraceError: mask_mod can't be a mask mod.
        ModIndexError: a live element reads outside of a captured tensor.
    """
    if torch.compiler.is_compiling():
        return _create_uncompiled(
            mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, separate_full_blocks, dq_kv_order
        )
    return _create(
        mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, separate_full_blocks, dq_kv_order
    )


def _create(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | int | None,
    BLOCK_SIZE: int | tuple[int, int],
    separate_full_blocks: bool,
    dq_kv_order: bool,
) -> BlockMask:
    batch, heads, lengths = _sizes(B, H, Q_LEN, KV_LEN)
    block_size = checked_block_size(BLOCK_SIZE)
    wanted = None if device is None else checked_device(device)
    if not isinstance(dq_kv_order, bool):
        raise BlockMaskError(
            f"dq_kv_order must be a bool in create_block_mask, got {type(dq_kv_order).__name__}"
        )
    traced, opaque = trace_mask_mod(mask_mod)
    if wanted is None:
        wanted = _captured_device(traced)
    # Tensors that an opaque function reads can't be moved, so it runs where the mask shall be.
    elements = elements_of(traced, opaque, torch.device("cpu") if traced is not None else wanted)
    batch = batch if "b" in elements.depends else 1
    heads = heads if "h" in elements.depends else 1
    parts = list(_chunks(elements, batch, heads, lengths, block_size))
    rows, columns = (block_count(*pair) for pair in zip(lengths, block_size, strict=True))
    runs = RunList(*(torch.cat(column) for column in zip(*parts, strict=True))) if parts else None
    if runs is None:
        runs = RunList(*torch.zeros(4, 0, dtype=torch.int64))
    if not separate_full_blocks:
        runs = runs._replace(kind=torch.full_like(runs.kind, PARTIAL))
    offsets, packed = pack(runs, batch, heads, rows, columns)
    mask = BlockMask._assembled(
        offsets, packed, lengths, block_size, traced, opaque, mask_mod, from_captured=True
    )
    mask.views()  # from here on a change of what the mask was built from is noticed
    return mask.to(wanted)


# Not torch.compiler.disable: that would import the compiler with this module.
_create_uncompiled = _disable_dynamo(_create)


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
    B and H default to 1; `device` as in `create_block_mask`. Raises as it does.
    """
    batch, heads, lengths = _sizes(B, H, Q_LEN, KV_LEN)
    wanted = None if device is None else checked_device(device)
    kind = mod_kind(mod_fn, "mod_fn")
    traced, opaque = trace_mask_mod(mod_fn) if kind == "mask" else _trace_score_mod(mod_fn)
    if wanted is None:
        wanted = _captured_device(traced)
    elements = elements_of(traced, opaque, wanted, kind)
    mask = torch.empty(batch, heads, *lengths, dtype=torch.bool, device=wanted)
    for b0, b1, h0, h1, q0, q1, k0, k1 in _boxes(batch, heads, lengths, (1, 1)):
        mask[b0:b1, h0:h1, q0:q1, k0:k1] = _live(elements, b0, b1, h0, h1, q0, q1, k0, k1)
    return mask


def _trace_score_mod(function: Any) -> tuple[TracedMod | None, Any]:
    try:
        return trace_mod(function, "score"), None
    except ModTraceError as error:
        if not error.pure:
            raise
        return None, function


def _sizes(B: Any, H: Any, Q_LEN: Any, KV_LEN: Any) -> tuple[int, int, tuple[int, int]]:
    batch = 1 if B is None else checked_length("B", B)
    heads = 1 if H is None else checked_length("H", H)
    return batch, heads, (checked_length("Q_LEN", Q_LEN), checked_length("KV_LEN", KV_LEN))


def _captured_device(traced: TracedMod | None) -> torch.device:
    if traced is not None:
        for position, tensor in enumerate(traced.captured):
            if tensor.device.type == "meta":
                raise BlockMaskError(
                    f"mask_mod reads {captured_name(traced, position)}, which is on device meta "
                    "and has no values: a mask is built from values"
                )
            if tensor.device.type != "cpu":
                return tensor.device
    return torch.device("cpu")


def _live(
    elements: Elements, b0: int, b1: int, h0: int, h1: int, q0: int, q1: int, k0: int, k1: int
) -> Tensor:
    ends = ((b0, b1), (h0, h1), (q0, q1), (k0, k1))
    return elements.live(*(torch.arange(*pair, device=elements.device) for pair in ends))


def _chunks(
    elements: Elements,
    batch: int,
    heads: int,
    lengths: tuple[int, int],
    block_size: tuple[int, int],
) -> Iterator[RunList]:
    """Yield the runs of rows of blocks, a few at a time."""
    rows, columns = (block_count(*pair) for pair in zip(lengths, block_size, strict=True))
    place: tuple[int, int, int] | None = None
    some = every = torch.empty(0)
    for b0, b1, h0, h1, q0, q1, k0, k1 in _boxes(batch, heads, lengths, block_size):
        live = _live(elements, b0, b1, h0, h1, q0, q1, k0, k1)
        some_here, every_here = _block_bounds(live, block_size)
        # Boxes that differ in kv only, or lie in one row of blocks, fill one grid.
        if place != (b0, h0, q0 // block_size[0]):
            if place is not None:
                yield from _grid_runs(place, some, every, heads, rows)
            place = (b0, h0, q0 // block_size[0])
            some = some_here.new_zeros(*some_here.shape[:3], columns)
            every = some_here.new_ones(*some_here.shape[:3], columns)
        first = k0 // block_size[1]
        some[..., first : first + some_here.shape[3]] |= some_here
        every[..., first : first + some_here.shape[3]] &= every_here
    if place is not None:
        yield from _grid_runs(place, some, every, heads, rows)


def _grid_runs(
    place: tuple[int, int, int], some: Tensor, every: Tensor, heads: int, rows: int
) -> Iterator[RunList]:
    kinds = torch.where(every, FULL, torch.where(some, PARTIAL, 0)).to(torch.int8).cpu()
    for b, grids in enumerate(kinds):
        for h, grid in enumerate(grids):
            first = ((place[0] + b) * heads + place[1] + h) * rows + place[2]
            yield runs_of_grid(grid, first)


def _boxes(
    batch: int, heads: int, lengths: tuple[int, int], block_size: tuple[int, int]
) -> Iterator[tuple[int, int, int, int, int, int, int, int]]:
    """Yield (b0, b1, h0, h1, q0, q1, k0, k1) of at most _ELEMENTS elements that cover all.

    Along q and kv a box is either whole blocks or a part of one block.
    """
    if not (batch and heads and lengths[0] and lengths[1]):
        return
    q_block, kv_block = min(block_size[0], lengths[0]), min(block_size[1], lengths[1])
    q_step = min(q_block, max(1, _ELEMENTS // kv_block), _ELEMENTS)
    kv_step = min(kv_block, _ELEMENTS)
    if q_step == q_block and q_block * kv_block <= _ELEMENTS:
        kv_step = _whole(_ELEMENTS // q_step, kv_block, lengths[1])
        if kv_step >= lengths[1]:
            q_step = _whole(_ELEMENTS // lengths[1], q_block, lengths[0])
    rest = max(1, _ELEMENTS // (min(q_step, lengths[0]) * min(kv_step, lengths[1])))
    h_step = min(heads, rest)
    b_step = min(batch, max(1, rest // h_step)) if h_step == heads else 1
    for b in range(0, batch, b_step):
        for h in range(0, heads, h_step):
            for q0, q1 in _intervals(lengths[0], q_block, q_step):
                for k0, k1 in _intervals(lengths[1], kv_block, kv_step):
                    yield b, min(b + b_step, batch), h, min(h + h_step, heads), q0, q1, k0, k1


def _whole(room: int, block: int, length: int) -> int:
    """Return the largest multiple of `block` within `room`, or one that covers `length`."""
    return min(max(room // block, 1), block_count(length, block)) * block


def _intervals(length: int, block: int, step: int) -> Iterator[tuple[int, int]]:
    if step >= block:
        for begin in range(0, length, step):
            yield begin, min(begin + step, length)
        return
    for start in range(0, length, block):
        for begin in range(start, min(start + block, length), step):
            yield begin, min(begin + step, start + block, length)


def _block_bounds(live: Tensor, block_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return (some element is live, every element is live) bool [b, h, rows, columns]."""
    # amax and amin of bytes are vectorised, 50 times as fast as any() and all() of bools.
    values = live.contiguous().view(torch.uint8)
    some, every = (
        _reduced(_reduced(values, 2, block_size[0], largest), 3, block_size[1], largest)
        for largest in (True, False)
    )
    return some.view(torch.bool), every.view(torch.bool)


def _reduced(values: Tensor, dim: int, block: int, largest: bool) -> Tensor:
    reduce = torch.amax if largest else torch.amin
    whole = values.shape[dim] // block * block
    parts = []
    if whole:
        head = values.narrow(dim, 0, whole)
        head = head.view(*head.shape[:dim], -1, block, *head.shape[dim + 1 :])
        parts.append(reduce(head, dim + 1))
    if whole < values.shape[dim]:
        tail = values.narrow(dim, whole, values.shape[dim] - whole)
        parts.append(reduce(tail, dim, keepdim=True))
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]
