"""Backward's launches: row values, dK and dV, then dQ and captured tensors' gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.plugin import Call, GradInputs, Grads, Saved, Spec, TensorSpec
from anyflex_mps.arguments import Entry, strides_of
from anyflex_mps.forward_call import call_entries, mask_tensors, saved_tensors, tile_count
from anyflex_mps.keys import keys_shader
from anyflex_mps.launch import launch, pairs_of
from anyflex_mps.mods import Sums
from anyflex_mps.operations import EXACT_WORDS
from anyflex_mps.queries import queries_shader
from anyflex_mps.rows import ROWS_A_GROUP, rows_shader, totals_shader, wants_delta
from anyflex_mps.spec_shaders import SpecShaders
from anyflex_mps.tiles import tile_for

__all__ = ["backward_workspace", "launch_backward"]


def backward_workspace(spec: Spec, call: Call) -> tuple[TensorSpec, ...]:
    """Return row values and, where captured tensors' gradients have to repeat bit for bit, the
    words of their exact sums."""
    planes = 3 if wants_delta(spec) else 2
    rows = TensorSpec((planes, *call.query.shape[:3]), torch.float32)
    if spec.determinism == "off":
        return (rows,)
    words = (
        TensorSpec((*tensor.shape, EXACT_WORDS), torch.int32, zeroed=True)
        for facts, tensor in zip(spec.captured, call.captured, strict=True)
        if facts.needs_grad
    )
    return (rows, *words)


def launch_backward(
    made: SpecShaders, call: Call, saved: Saved, grad: GradInputs, grads: Grads
) -> None:
    """Fill the gradients."""
    spec = made.spec
    rows, *words = grads.workspace
    batch, heads, length = call.query.shape[:3]
    entries = {
        **call_entries(call),
        "row_plane": rows.stride(0),
        **strides_of(
            out=saved.out, dout=grad.dout, dlse=grad.dlse, dq=grads.dq, dk=grads.dk, dv=grads.dv
        ),
    }
    tensors: dict[str, Tensor | None] = {
        "query": call.query, "key": call.key, "value": call.value, "dout": grad.dout,
        "out": saved.out, "rows": rows, "dlse": grad.dlse,
        "dq": grads.dq, "dk": grads.dk, "dv": grads.dv,
        **saved_tensors(spec, saved.extras),
    }  # fmt: skip
    if grad.delta is not None:
        # Both come from another call, and may have any layout.
        tensors |= {"delta": grad.delta.contiguous(), "lse": saved.lse.contiguous()}
    shader = made.written(rows_shader, grad.delta is not None, grad.dlse is not None)
    launch(made, shader, call, (-(-length // ROWS_A_GROUP), heads, batch), tensors, entries)
    if grads.dk is not None or grads.dv is not None:
        _launch_keys(made, call, tensors, entries)
    totals = {i: total for i, total in enumerate(grads.captured) if total is not None}
    if grads.dq is None and not totals:
        return
    mask, numbers = mask_tensors(call.mask)
    tiles = tile_count(length, tile_for("queries", spec).rows, spec.block_size[0])
    given = {**tensors, **mask, **{f"g{i}": total for i, total in totals.items()}}
    given |= {f"s{i}": each for i, each in zip(totals, words, strict=False)}

    def launch_queries(sums: Sums | None, wants_dq: bool) -> None:
        launch(
            made,
            made.written(queries_shader, sums, wants_dq),
            call,
            (tiles, heads, batch),
            given,
            {**entries, **numbers},
            work=pairs_of(call) * (2 * spec.head_dim + spec.value_head_dim),
            axis=0,
        )

    if not words or not totals:
        launch_queries("floats" if totals else None, grads.dq is not None)
        return
    launch_queries("bounds", False)
    launch_queries("integers", grads.dq is not None)
    shader = made.written(totals_shader)
    for total, of_total in zip(totals.values(), words, strict=True):
        count = total.numel()
        given = {"total": total, "words": of_total}
        groups = (-(-count // shader.threads), 1, 1)
        launch(made, shader, call, groups, given, {"elements": count})


def _launch_keys(
    made: SpecShaders,
    call: Call,
    tensors: dict[str, Tensor | None],
    entries: dict[Entry, int],
) -> None:
    spec = made.spec
    mask, numbers = mask_tensors(None if call.mask is None else call.mask.transposed())
    tile = tile_for("keys", spec)
    batch, heads, length = call.key.shape[:3]
    tiles = tile_count(length, tile.rows, spec.block_size[1])
    groups = (tiles * tile.parts, heads, batch)
    launch(
        made,
        made.written(keys_shader),
        call,
        groups,
        {**tensors, **mask},
        {**entries, **numbers},
        work=pairs_of(call) * 2 * (spec.head_dim + spec.value_head_dim),
        axis=0,
    )
