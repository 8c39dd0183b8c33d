"""Launches of backward: row values, dK and dV, then dQ and captured tensors' gradients.

Deterministic gradients of captured tensors take more launches: deterministic_captured_grads.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anyflex.plugin import Call, GradInputs, Grads, Outputs, Saved, Spec, TensorSpec
from anyflex_triton import backward, backward_keys, backward_queries
from anyflex_triton.arguments import (
    Types,
    alignment_of,
    descriptor_of_floats,
    is_described_whole,
    layout_of,
    pointer_type,
    row_strides,
)
from anyflex_triton.configs import Config
from anyflex_triton.dependent_launch import overlapping
from anyflex_triton.kernel_signatures import (
    MaskRows,
    Programs,
    beside,
    classes,
    kept_of,
    key_head_group,
    or_else,
    padded,
    strides_of,
    tile_count,
)
from anyflex_triton.launch import FixedLaunch, Launch
from anyflex_triton.mask_refinement import mask_rows
from anyflex_triton.mods import Sums
from anyflex_triton.program import Options

__all__ = [
    "backward_key",
    "backward_values",
    "expected_backward",
    "fixed_launches",
    "keys_launch",
    "launches_again",
    "queries_launch",
    "row_values_launch",
    "rows_launch",
]

_OF_CALL = frozenset(
    ("tables", "ints", "floats", "totals", "shifts", "scale", "mask_strides", "key_mask_strides")
)
"""Arguments of backward's kernels, beside tensors, that don't follow from shapes, strides and
alignment."""


def expected_backward(
    spec: Spec, call: Call, out: Outputs, workspace: Sequence[TensorSpec]
) -> tuple[Saved, GradInputs, Grads]:
    """Return backward's arguments as they will be if dout is laid out as out, and the outgoing
    gradients as query, key, value and captured tensors. Their values must not be read: they tell
    which programs backward will launch, before it runs.

    Args:
        out: of forward, with lse.
        workspace: of backward.
    """
    lse = out.lse
    assert lse is not None
    dq, dk, dv = (
        tensor if name in spec.gradients else None
        for name, tensor in zip("qkv", (call.query, call.key, call.value), strict=True)
    )
    captured = tuple(
        torch.empty(tensor.shape, device="meta") if facts.needs_grad else None
        for facts, tensor in zip(spec.captured, call.captured, strict=True)
    )
    tensors = tuple(torch.empty(each.shape, dtype=each.dtype, device="meta") for each in workspace)
    return (
        Saved(out.out, lse, out.saved),
        GradInputs(out.out, lse if spec.dlse else None),
        Grads(dq, dk, dv, captured, tensors),
    )


def backward_key(
    made: Programs, call: Call, saved: Saved, grad: GradInputs, grads: Grads
) -> tuple[object, ...]:
    """Return the key that determines backward's launches together with a call's shapes and
    strides, where configs aren't timed and the workspace is row values alone."""
    layouts = [
        None if tensor is None else (tensor.stride(), alignment_of(tensor))
        for tensor in (saved.out, *saved.extras, grad.dout, grads.dq, grads.dk, grads.dv)
    ]
    return (
        "anyflex_triton.backward",
        # The shapes tell whether tiles end where the lengths do.
        made.mods_key(call, True),
        grad.delta is None,
        None if grad.dlse is None else grad.dlse.stride(),
        alignment_of(call.query),
        alignment_of(call.key),
        alignment_of(call.value),
        alignment_of(grads.workspace[0]),
        *layouts,
    )


def fixed_launches(launches: Sequence[Launch]) -> list[FixedLaunch]:
    """Return the part of backward's launches that calls of the same shapes, strides and alignment
    share."""
    return [FixedLaunch.of(launch, _OF_CALL) for launch in launches]


def backward_values(
    made: Programs, call: Call, saved: Saved, grad: GradInputs, grads: Grads, row_values: Tensor
) -> dict[str, object]:
    """Return the arguments of backward's kernels that differ from call to call. A name means the
    same in all of them except the mask's rows."""
    query = call.query
    rest, tops = kept_of(saved.extras)
    values = made.common_values(call, None if call.mask is None else mask_rows(call.mask))
    values.update(
        query=query, key=call.key, value=call.value, dout=grad.dout, out=saved.out,
        rest=or_else(rest, saved.out), tops=or_else(tops, row_values),
        lse=saved.lse.contiguous(), dlse=or_else(grad.dlse, row_values),
        given=row_values if grad.delta is None else grad.delta.contiguous(),
        row_values=row_values, dq=or_else(grads.dq, query), dk=or_else(grads.dk, call.key),
        dv=or_else(grads.dv, call.value),
    )  # fmt: skip
    return values


def launches_again(
    made: Programs,
    call: Call,
    saved: Saved,
    grad: GradInputs,
    grads: Grads,
    fixed: Sequence[FixedLaunch],
) -> list[Launch]:
    """Return the launches of the portable kernels that fill `grads`.

    Args:
        fixed: result of `fixed_launches` for an earlier call.
    """
    (row_values,) = grads.workspace
    values = backward_values(made, call, saved, grad, grads, row_values)
    values.update(
        query_rows=call.query, key_rows=call.key, value_rows=call.value, dout_rows=grad.dout,
        values_by_row=row_values,
        totals=tuple([total for total in grads.captured if total is not None]),
    )  # fmt: skip
    launches = []
    for each in fixed:
        given = values
        if call.mask is not None and each.program.function is backward_keys.key_kernel:
            rows = mask_rows(call.mask.transposed())
            given = {**values, **made.common_values(call, rows)}
        launches.append(each.launch(given))
    return launches


def _value_places(row_values: Tensor) -> dict[str, object]:
    return {"values_of_head": row_values.shape[3], "values_in_all": row_values.stride(0)}


def rows_launch(
    made: Programs, call: Call, saved: Saved, grad: GradInputs, row_values: Tensor
) -> Launch:
    """Return the launch that fills row_values [4, B, Hq, L or more], float32; [3, ...] where dV
    alone is wanted."""
    return row_values_launch(
        made, call, saved, grad, row_values, backward.row_kernel, call.query.shape[2],
        {"WANT_DELTA": made.wants_delta, "LEADS": made.overlaps}, {}, {}, {},
    )  # fmt: skip


def row_values_launch(
    made: Programs,
    call: Call,
    saved: Saved,
    grad: GradInputs,
    row_values: Tensor,
    function: Any,
    rows: int,
    constants: Mapping[str, object],
    values: Mapping[str, object],
    types: Mapping[str, Types],
    aligned: Mapping[str, int],
) -> Launch:
    """Return the launch of `row_kernel`, or of another kernel that fills row values.

    Args:
        rows: number of rows of a head that programs take, 32 each.
        constants, values, types, aligned: of arguments that only `function` has.
    """
    spec = made.spec
    rest, tops = kept_of(saved.extras)
    scored = made.mods(call, False).score_mod is not None
    layouts = {
        "out": layout_of(saved.out),
        "dout": layout_of(grad.dout),
        "rest": layout_of(or_else(rest, saved.out)),
    }
    constants = {
        **constants,
        "DV": padded(spec.value_head_dim),
        "SCORED": scored,
        "HAS_DLSE": grad.dlse is not None,
        "IS_GIVEN": grad.delta is not None,
        "HAS_REST": rest is not None,
        "BLOCK_M": 32,
    }
    key = ("rows", function, *constants.values(), *classes(layouts))
    program = made.existing.get(key)
    if program is None:
        program = made.program(key, function, constants, Options(4, 1), layouts, types, aligned)
    batch, heads, length = call.query.shape[:3]
    return Launch(
        program,
        batch * heads * -(-rows // 32),
        {
            **values,
            "out": saved.out, "rest": or_else(rest, saved.out), "tops": or_else(tops, row_values),
            "dout": grad.dout, "scale": call.scale,
            **strides_of(layouts), "dlse": or_else(grad.dlse, row_values),
            "given": row_values if grad.delta is None else grad.delta.contiguous(),
            "lse": saved.lse.contiguous(), "row_values": row_values,
            "dl_strides": (0, 0, 0) if grad.dlse is None else row_strides(grad.dlse),
            "heads": heads, **_value_places(row_values), "q_length": length,
        },
    )  # fmt: skip


def keys_launch(
    made: Programs,
    call: Call,
    dout: Tensor,
    row_values: Tensor,
    grads: Grads,
    rows: MaskRows | None,
    config: Config,
) -> Launch:
    """Return the launch that fills grads.dk and grads.dv; `rows` are the transposed mask's."""
    spec = made.spec
    dk, dv = grads.dk, grads.dv
    layouts = made.layouts(
        call,
        dout=layout_of(dout),
        dk=layout_of(or_else(dk, call.key)),
        dv=layout_of(or_else(dv, call.value)),
    )
    described = made.describer(call.query, dout)
    # A tile's first value must lie at a multiple of 16 bytes, and a stage, which follows another
    # one in shared memory, must fill a multiple of 128 bytes: otherwise TMA fails, and the process
    # can't use the GPU any more.
    if described == "host" and not (
        is_described_whole(row_values)
        and (rows is None or rows.block_size[1] % 4 == 0)
        and config.block_m % 32 == 0
    ):
        described = None
    even = made.is_even(call, config, "queries", rows)
    mods = made.mods(call, even)
    wanted = (dk is not None, dv is not None)
    blocks = spec.block_size[::-1] if rows is None else rows.block_size
    heads_beside = beside(described, call.query, dout)
    key = (
        "keys", config, blocks, even, mods.key, wanted, described, heads_beside,
        *classes(layouts),
    )  # fmt: skip
    program = made.existing.get(key)
    if program is None:
        program = made.program(
            key,
            backward_keys.key_kernel,
            {
                **mods.reading(),
                "SCORE_MOD_BACKWARD": mods.score_mod_backward,
                "Q_BLOCK": blocks[1],
                "KV_BLOCK": blocks[0],
                "WANT_DK": dk is not None,
                "WANT_DV": dv is not None,
                "DESCRIBED": described,
                "BESIDE": heads_beside,
                "EVEN": even,
                "LOOPED": made.target == "blackwell",
                "FOLLOWS": made.overlaps,
                "LEADS": made.overlaps,
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
            },
            overlapping(config.options, made.overlaps),
            layouts,
            {
                **made.descriptors(described, config.block_m, query="D", dout="DV"),
                "row_values": f"tensordesc<fp32[{config.block_m}]>"
                if described == "host"
                else "*fp32",
            },
        )
    batch, heads, length = call.query.shape[:3]
    kv_batch, kv_heads, keys = call.key.shape[:3]
    tiles = tile_count(rows, keys, config.block_n)
    return Launch(
        program,
        tiles * kv_batch * kv_heads,
        {
            **made.common_values(call, rows),
            "key": call.key, "value": call.value,
            **made.described(described, config.block_m, query=call.query, dout=dout),
            "row_values": descriptor_of_floats(row_values, config.block_m)
            if described == "host"
            else row_values,
            "query_rows": call.query, "dout_rows": dout, "values_by_row": row_values,
            "dk": or_else(dk, call.key), "dv": or_else(dv, call.value),
            **strides_of(layouts),
            **_value_places(row_values),
            "batch": batch, "heads": heads, "kv_batch_heads": kv_batch * kv_heads,
            "kv_heads": kv_heads, "q_length": length, "kv_length": keys,
            "tiles": tiles, "head_group": key_head_group(call),
        },
    )  # fmt: skip


def queries_launch(
    made: Programs,
    call: Call,
    dout: Tensor,
    row_values: Tensor,
    dq: Tensor | None,
    totals: Sequence[Tensor],
    rows: MaskRows | None,
    config: Config,
    sums: Sums = "floats",
    follows_keys: bool = False,
) -> Launch:
    """Return the launch that fills dq, and adds to the captured tensors' gradients.

    Args:
        totals, sums: as in `operations.accumulate`.
        follows_keys: the launch before it is `keys_launch`'s, and it may begin before that ends.
    """
    spec = made.spec
    layouts = made.layouts(call, dout=layout_of(dout), dq=layout_of(or_else(dq, call.query)))
    described = made.describer(call.key, call.value)
    even = made.is_even(call, config, "keys", rows)
    mods = made.mods(call, even, sums)
    blocks = spec.block_size if rows is None else rows.block_size
    follows = follows_keys and made.overlaps
    heads_beside = beside(described, call.key, call.value)
    key = (
        "queries", config, blocks, even, mods.key, dq is not None, described, heads_beside,
        follows, *classes(layouts),
    )  # fmt: skip
    program = made.existing.get(key)
    if program is None:
        program = made.program(
            key,
            backward_queries.query_kernel,
            {
                **mods.reading(),
                "SCORE_MOD_BACKWARD": mods.score_mod_backward,
                "CAPTURED_GRADIENTS": mods.captured_gradients if totals else None,
                "Q_BLOCK": blocks[0],
                "KV_BLOCK": blocks[1],
                "WANT_DQ": dq is not None,
                "DESCRIBED": described,
                "BESIDE": heads_beside,
                "EVEN": even,
                "FOLLOWS": follows,
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
            },
            overlapping(config.options, follows),
            layouts,
            {
                **made.descriptors(described, config.block_n, key="D", value="DV"),
                "totals": tuple(pointer_type(total.dtype) for total in totals),
            },
        )
    batch, heads, length = call.query.shape[:3]
    tiles = tile_count(rows, length, config.block_m)
    return Launch(
        program,
        tiles * batch * heads,
        {
            **made.common_values(call, rows),
            "query": call.query, "dout": dout,
            **made.described(described, config.block_n, key=call.key, value=call.value),
            "key_rows": call.key, "value_rows": call.value,
            "row_values": row_values, "dq": or_else(dq, call.query), "totals": tuple(totals),
            **strides_of(layouts),
            "batch_heads": batch * heads, "heads": heads, **_value_places(row_values),
            "q_length": length, "kv_length": call.key.shape[2],
            "tiles": tiles, "head_group": made.head_group(batch * heads, call.key.shape[2]),
        },
        totals,
    )  # fmt: skip
