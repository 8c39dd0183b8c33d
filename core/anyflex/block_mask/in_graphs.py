"""The traced half of building a block mask: what torch.compile and export put into the graph, one
static op, where an eager call builds.

Dynamo inlines all of it, so it is plain Python on what is known while a program is recorded.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from anyflex.block_mask.mask_function import RebuiltMaskMod, captured_name
from anyflex.block_mask.mask_ops import built_op, checked_op, rows_op
from anyflex.block_mask.mask_request import Request, write_request
from anyflex.block_mask.mask_state import MaskContent
from anyflex.block_mask.offset_mask_mod import with_number
from anyflex.errors import BlockMaskError
from anyflex.mask_structure.run_checks import check_types, checked_device
from anyflex.mod_graph.graph import parse_graph
from anyflex.mod_graph.simplify import simplify
from anyflex.tensors.dynamo_errors import fail, fail_while_compiling
from anyflex.tensors.symbolic_numbers import INTS, fixed, number_tensors
from anyflex.tensors.torch_versions import dynamo_constant
from anyflex.tracing.mod_types import MaskMod
from anyflex.tracing.trace import TracedMod, trace_mod

__all__ = ["built_in_graph", "rows_in_graph", "runs_in_graph"]

Mask = TypeVar("Mask", bound=MaskContent)


def built_in_graph(
    cls: type[Mask],
    mask_mod: MaskMod,
    sizes: tuple[Any, Any, Any, Any],
    device: Any,
    block_size: Any,
    flags: tuple[bool, bool],
) -> Mask:
    """Return the mask of `create_block_mask`; raises as it does where that needs no values.

    Args:
        sizes: B, H, Q_LEN, KV_LEN.
        flags: separate_full_blocks and exact, checked.
    """
    batch = 1 if sizes[0] is None else _length("B", sizes[0])
    heads = 1 if sizes[1] is None else _length("H", sizes[1])
    lengths = _length("Q_LEN", sizes[2]), _length("KV_LEN", sizes[3])
    blocks = _block_size(block_size)
    traced = _traced(mask_mod)
    wanted = None if device is None else _device(device)
    for position, tensor in enumerate(traced.captured):
        if tensor.is_meta:
            fail(
                "BlockMaskError",
                f"mask_mod reads {captured_name(traced, position)}, which is on device meta and "
                "has no values: a mask is built from values",
            )
        if wanted is None and tensor.device.type != "cpu":
            wanted = tensor.device
    if wanted is None:
        wanted = torch.device("cpu")
    reads = _indices_read(traced.text)
    zero_alone: tuple[str, ...] = ()
    grid = [1, 1]
    for axis, (name, size) in enumerate((("b", batch), ("h", heads))):
        if name in reads:
            grid[axis] = size
            if size == 1:
                zero_alone = (*zero_alone, name)
    request = Request(traced.text, tuple(traced.names), *flags)
    offsets, runs, mark = built_op(
        # The 1 keeps the list from being empty.
        [*traced.captured, *number_tensors([1.0, *traced.floats])],
        [len(traced.captured), *grid, *lengths, *blocks, *traced.ints],
        write_request(request),
        device=wanted,
    )
    moved = _on(traced, wanted)
    outputs = offsets, runs, mark
    return _mask(cls, outputs, lengths, blocks, moved, zero_alone, (batch, heads))


def runs_in_graph(
    cls: type[Mask],
    offsets: Any,
    runs: Any,
    seq_lengths: Any,
    block_size: Any,
    mask_mod: MaskMod | None,
    capacity: int | None,
) -> Mask:
    """Return the mask of `BlockMask.from_runs`, whose runs the op checks."""
    if not isinstance(seq_lengths, (tuple, list)) or len(seq_lengths) != 2:
        fail("BlockMaskError", "seq_lengths must be a pair (Q_LEN, KV_LEN)")
    lengths = _length("Q_LEN", seq_lengths[0]), _length("KV_LEN", seq_lengths[1])
    blocks = _block_size(block_size)
    check_types(offsets, runs)
    room = -1 if capacity is None else _length("capacity", capacity)
    ints = [*lengths, *blocks, 0 if mask_mod is None else 1, room]
    outputs = checked_op(offsets, runs, ints)
    traced = None if mask_mod is None else _on(_traced(mask_mod), offsets.device)
    return _mask(cls, outputs, lengths, blocks, traced, None, None)


def rows_in_graph(mask: Mask, start: Any, stop: Any, kv_len: Any) -> Mask:
    """Return the mask of `BlockMask.row_slice`, whose range the op checks."""
    start, stop = _length("start", start), _length("stop", stop)
    kv_length = mask.seq_lengths[1] if kv_len is None else _length("kv_len", kv_len)
    traced = mask.traced
    if mask.opaque is not None:
        fail(
            "ModTraceError",
            "this block mask's mask_mod could not be traced, and a mask with such a mod can't be "
            "sliced inside of a compiled graph",
            operation="mask_mod",
            hint="Write it with the operations of the table in the documentation.",
        )
    structure = [mask.offsets, mask.runs]
    if mask.mark is not None:
        structure = [*structure, mask.mark]
    decided = 0 if mask._zero_alone is None else 1
    ints = [*mask.seq_lengths, *mask.BLOCK_SIZE, start, stop, kv_length, decided]
    outputs = rows_op(structure, ints)
    if traced is not None:
        text, slot = with_number(traced.text, "q_idx", len(traced.ints))
        numbers = list(traced.ints)
        if slot == len(numbers):
            numbers = [*numbers, start]
        elif slot is not None:
            numbers[slot] = numbers[slot] + start
        traced = TracedMod(
            text, traced.captured, numbers, traced.floats, traced.names, traced.depends_on_facts
        )
    lengths = stop - start, kv_length
    sizes = lengths, mask.BLOCK_SIZE
    return _mask(type(mask), outputs, *sizes, traced, mask._zero_alone, mask._asked)


def _mask(
    cls: type[Mask],
    outputs: tuple[Tensor, Tensor, Tensor],
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    traced: TracedMod | None,
    zero_alone: tuple[str, ...] | None,
    asked: tuple[int, int] | None,
) -> Mask:
    *structure, mark = outputs
    parts = traced, None, None, zero_alone, asked, mark
    return cls._unchecked(*structure, lengths, block_size, *parts)


def _traced(mask_mod: Any) -> TracedMod:
    """Trace a mask mod; raises as `trace_mask_mod`, and ModTraceError where only vmap can run
    it."""
    if isinstance(mask_mod, RebuiltMaskMod):
        return mask_mod.traced
    if not callable(mask_mod):
        fail("ArgumentTypeError", f"mask_mod must be a function, got {type(mask_mod).__name__}")
    traced = trace_mod(mask_mod, "mask")
    # A mask's bools have no gradient. A detached tensor shares its values.
    captured = [tensor.detach() if tensor.requires_grad else tensor for tensor in traced.captured]
    return TracedMod(
        traced.text, captured, traced.ints, traced.floats, traced.names, traced.depends_on_facts
    )


def _on(traced: TracedMod, device: torch.device) -> TracedMod:
    """Return the mod with its captured tensors on `device`."""
    captured = [t if t.device == device else t.to(device) for t in traced.captured]
    return TracedMod(
        traced.text, captured, traced.ints, traced.floats, traced.names, traced.depends_on_facts
    )


@dynamo_constant
def _indices_read(text: str) -> tuple[str, ...]:
    """Return the names of the indices that a graph reads, whatever its numbers."""
    return tuple(sorted(simplify(parse_graph(text)).inputs()))


def _length(name: str, value: Any) -> Any:
    """Return a length, batch or head count, which may be a symbol; the op checks the rest."""
    if isinstance(value, bool) or not isinstance(value, INTS):
        cure = ": inside of a compiled graph it can't be read from a tensor"
        fail(
            "BlockMaskError",
            f"{name} must be an int, got {type(value).__name__}"
            f"{cure if isinstance(value, Tensor) else ''}",
        )
    if value < 0:
        fail("BlockMaskError", f"{name} must be in 0..{2**31 - 1}, got {fixed(value)}")
    return value


def _block_size(value: Any) -> tuple[Any, Any]:
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    for size in pair:
        if len(pair) != 2 or isinstance(size, bool) or not isinstance(size, INTS):
            fail("BlockMaskError", "BLOCK_SIZE must be an int or a pair of ints (q, kv)")
        if size < 1:
            fail("BlockMaskError", f"BLOCK_SIZE must be in 1..{2**31 - 1}, got {fixed(size)}")
    return pair[0], pair[1]


def _device(value: Any) -> torch.device:
    return (
        _device_while_compiling(value)
        if torch.compiler.is_dynamo_compiling()
        else (checked_device(value))
    )


@dynamo_constant
def _device_while_compiling(value: Any) -> torch.device:
    try:
        return checked_device(value)
    except BlockMaskError as error:
        fail_while_compiling("BlockMaskError", str(error), {})
