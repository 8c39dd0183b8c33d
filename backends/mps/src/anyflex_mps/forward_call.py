"""Forward's launch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from anyflex.plugin import Call, MaskViews, Outputs, Spec
from anyflex_mps.arguments import Entry, strides_of
from anyflex_mps.forward import forward_shader
from anyflex_mps.forward_matmul import ROWS, forward_matmul_shader
from anyflex_mps.launch import launch, pairs_of
from anyflex_mps.options import wants_mpp
from anyflex_mps.sequences import BLOCK
from anyflex_mps.spec_shaders import SpecShaders
from anyflex_mps.tiles import tile_for

__all__ = [
    "call_entries",
    "launch_forward",
    "mask_tensors",
    "saved_tensors",
    "sequence_tensors",
    "tile_count",
]


_SHIFTS = ("batch_shift", "head_shift", "row_shift", "key_shift")


def tile_count(length: int, rows: int, block: int) -> int:
    """Return the number of tiles of a head; with a mask none crosses one of its blocks.

    Args:
        block: rows of a mask's block, which may be longer than all rows; 0 without a mask.
    """
    if not block or block >= length:
        return -(-length // rows)
    return -(-length // block) * -(-block // rows)


def call_entries(call: Call) -> dict[Entry, int]:
    """Return the numbers that every kernel takes: lengths, heads, strides of query, key, value."""
    return {
        "q_length": call.query.shape[2],
        "kv_length": call.key.shape[2],
        "batch": call.query.shape[0],
        "heads": call.query.shape[1],
        **strides_of(query=call.query, key=call.key, value=call.value),
        **dict(zip(_SHIFTS, call.index_offsets, strict=True)),
    }


def mask_tensors(views: MaskViews | None) -> tuple[dict[str, Tensor], dict[Entry, int]]:
    """Return the tensors and the numbers of a mask; without one there are none."""
    if views is None:
        return {}, {}
    offsets = views.offsets.contiguous()
    batch, heads, edges = offsets.shape
    numbers: dict[Entry, int] = {
        "mask_batch": heads * edges if batch > 1 else 0,
        "mask_head": edges if heads > 1 else 0,
    }
    return {"offsets": offsets, "runs": views.runs}, numbers


def sequence_tensors(call: Call) -> tuple[dict[str, Tensor | None], dict[Entry, int]]:
    """Return the tensors and the numbers of packed sequences; a dense call has none."""
    packed = call.packed
    if packed is None:
        return {}, {}
    tensors = {
        "blocks": packed.blocks,
        "q_offsets": packed.q_offsets,
        "q_starts": packed.q_starts,
        "kv_lengths": packed.kv_lengths,
        "slots": packed.slots,
        "kv_offsets": packed.kv_offsets,
    }
    numbers: dict[Entry, int] = {
        "sequences": packed.slots.shape[0],
        "most_rows": packed.max_q,
        "most_keys": packed.max_kv,
    }
    table = packed.page_table
    if table is not None:
        named = packed.table_rows is not None
        tensors["page_table"] = table
        tensors["table_rows"] = packed.table_rows if named else packed.slots
        numbers |= {
            "pages": call.key.shape[0],
            "table_height": table.shape[0],
            "table_stride": table.stride(0),
            "table_named": int(named),
        }
    return tensors, numbers


def saved_tensors(spec: Spec, saved: Sequence[Tensor]) -> dict[str, Tensor | None]:
    """Return what forward leaves for backward, by name."""
    if not spec.needs_backward:
        return {}
    *rest, tops = saved
    return {"rest": rest[0] if rest else None, "tops": tops}


def launch_forward(made: SpecShaders, call: Call, out: Outputs) -> None:
    """Fill the outputs."""
    spec = made.spec
    tensors, numbers = mask_tensors(call.mask)
    sequences, bounds = sequence_tensors(call)
    batch, heads, length = call.query.shape[:3]
    write, rows = forward_shader, tile_for("forward", spec).rows
    if wants_mpp(spec):
        write, rows = forward_matmul_shader, ROWS
    groups = tile_count(length, rows, spec.block_size[0]), heads, batch
    if call.packed is not None:
        groups = BLOCK // rows, heads, call.packed.blocks.shape[0]
    launch(
        made,
        made.written(write),
        call,
        groups,
        {
            "query": call.query,
            "key": call.key,
            "value": call.value,
            "out": out.out,
            "lse": out.lse,
            "max_scores": out.max_scores,
            "sinks": call.sinks,
            **saved_tensors(spec, out.saved),
            **sequences,
            **tensors,
        },
        {**call_entries(call), **bounds, **numbers, **strides_of(out=out.out)},
        work=pairs_of(call) * (spec.head_dim + spec.value_head_dim),
        axis=0 if call.packed is None else 2,
    )
