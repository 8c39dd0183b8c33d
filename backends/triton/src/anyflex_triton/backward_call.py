"""Launches of backward: row values, dK and dV, then dQ and captured tensors' gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyflex.plugin import Call, GradInputs, Grads, Outputs, Saved, Spec, TensorSpec
from anyflex_triton import backward, backward_keys, backward_queries
from anyflex_triton.arguments import (
    BLOCK_BYTES,
    BYTES,
    Part,
    Types,
    alignment_of,
    descriptor_of_floats,
    is_described_whole,
    layout_of,
    pointer_type,
)
from anyflex_triton.configs import Config
from anyflex_triton.dependent_launch import overlapping
from anyflex_triton.kernel_signatures import (
    MaskRows,
    Programs,
    beside,
    call_sizes,
    columns_of_part,
    kept_of,
    key_head_group,
    layouts_of,
    or_else,
    padded,
    tile_count,
)
from anyflex_triton.launch import FixedLaunch, Launch
from anyflex_triton.mask_refinement import mask_rows
from anyflex_triton.mods import Sums
from anyflex_triton.program import Options

__all__ = [
    "backward_key",
    "backward_sizes",
    "backward_values",
    "expected_backward",
    "integer_specs",
    "key_columns",
    "key_sums_specs",
    "keys_launch",
    "queries_launch",
    "row_values_launch",
    "rows_launch",
    "split_arguments",
    "sums_launch",
    "total_launches",
]

_TOTALS_BLOCK = 1024
_FEW_TILES = 1.75
_TILES_A_CORE = 4
"""Tiles of keys per multiprocessor below which KV heads are split, and up to which. Under a causal
mask the longest tile takes twice the average, so with one tile per multiprocessor half of the time
is lost. With two no time is lost, and sums would take 4 % (GQA 32/8 of 4096 rows)."""
_MORE_TILES_A_CORE = 8
_ROWS_OF_SPLIT = 16384
"""Number of tiles up to which they are split further, and the fewest query rows that a tile then
takes. Under a causal mask tiles reach their second head at different times, and with many heads
those in use are more than the L2 cache holds: MQA of 32 heads of 8192 rows took 5 % longer with
half as many splits. Shorter tiles don't pay for their sums. All this was measured on an H200."""
_SUMMED_KEYS = 16
"""Keys whose sums one program of `backward_keys.sum_kernel` adds up; a divisor of 64."""


def expected_backward(
    spec: Spec, call: Call, out: Outputs, workspace: Sequence[TensorSpec]
) -> tuple[Saved, GradInputs, Grads]:
    """Return backward's arguments as they will be if dout is laid out as out. Their values must
    not be read: they tell which programs backward will launch, before it runs. Launches made of
    them must not be kept: the order of a gradient's dimensions is core's to choose.

    Args:
        out: of forward, with lse.
        workspace: of backward.
    """
    lse = out.lse
    assert lse is not None
    # As core allocates them, gradients are dense and aligned, whatever their inputs are.
    dq, dk, dv = (
        torch.empty_like(tensor, device="meta") if name in spec.gradients else None
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


def backward_key(made: Programs, call: Call, saved: Saved, grad: GradInputs) -> tuple[object, ...]:
    """Return the key that determines backward's launches together with a call's shapes and
    strides, where configs aren't timed.

    The gradients, what forward saved and the workspace are as aligned as core allocates tensors,
    and their strides follow from the shapes and the call's strides."""
    query, key, value, out, dout = call.query, call.key, call.value, saved.out, grad.dout
    pointers = query.data_ptr() | key.data_ptr() | value.data_ptr()
    pointers |= out.data_ptr() | dout.data_ptr()
    return (
        "anyflex_triton.backward",
        # The shapes tell whether tiles end where the lengths do.
        made.mods_key(call, True),
        grad.delta is None,
        None if grad.dlse is None else grad.dlse.stride(),
        out.stride(),
        dout.stride(),
        # Usually all are aligned, and no one needs to be looked at.
        None
        if pointers % BLOCK_BYTES == 0
        else tuple(map(alignment_of, (query, key, value, out, dout))),
    )


def backward_values(
    made: Programs,
    call: Call,
    saved: Saved,
    grad: GradInputs,
    grads: Grads,
    row_values: Tensor | None,
) -> dict[str, Any]:
    """Return the arguments of backward's kernels that differ from call to call, with the rows of
    the mask.

    Args:
        row_values: as in `rows_launch`; None where launches take it from elsewhere.
    """
    query, key, value, out, dout, extras = (
        call.query, call.key, call.value, saved.out, grad.dout, saved.extras,
    )  # fmt: skip
    dq, dk, dv, captured, _ = grads
    lse = saved.lse.contiguous()
    values = made.common_values(call, None if call.mask is None else mask_rows(call.mask))
    values |= {
        "query": query, "key": key, "value": value, "dout": dout, "out": out,
        "rest": extras[0] if len(extras) == 2 else out, "tops": extras[-1] if extras else lse,
        "lse": lse, "dlse": lse if grad.dlse is None else grad.dlse,
        "given": lse if grad.delta is None else grad.delta.contiguous(),
        "dq": query if dq is None else dq, "dk": key if dk is None else dk,
        "dv": value if dv is None else dv, "row_values": row_values,
        "totals": tuple([total for total in captured if total is not None]) if captured else (),
        # The same tensors under the names that they have beside descriptors.
        "query_rows": query, "key_rows": key, "value_rows": value, "dout_rows": dout,
        "values_by_row": row_values,
    }  # fmt: skip
    return values


def backward_sizes(call: Call, row_values: Tensor) -> dict[str, object]:
    """Return `call_sizes`, and those of row values."""
    return {
        **call_sizes(call), "values_of_head": row_values.shape[3],
        "padded_length": row_values.shape[3], "values_in_all": row_values.stride(0),
    }  # fmt: skip


def rows_launch(
    made: Programs, call: Call, saved: Saved, grad: GradInputs, row_values: Tensor
) -> FixedLaunch:
    """Return the launch that fills row_values [4, B, Hq, L or more], float32; [3, ...] where dV
    alone is wanted."""
    constants = {"WANT_DELTA": made.wants_delta, "LEADS": made.overlaps}
    return row_values_launch(
        made, call, saved, grad, row_values, backward.row_kernel, call.query.shape[2], constants
    )


def row_values_launch(
    made: Programs,
    call: Call,
    saved: Saved,
    grad: GradInputs,
    row_values: Tensor,
    function: Any,
    rows: int,
    constants: Mapping[str, object],
    types: Mapping[str, Types] | None = None,
    aligned: Mapping[str, int] | None = None,
    named: Mapping[str, str | Part] | None = None,
) -> FixedLaunch:
    """Return the launch of `row_kernel`, or of another kernel that fills row values.

    Args:
        rows: number of rows of a head that programs take, 32 each.
        constants, types, aligned: of arguments that only `function` has.
        named: as in `FixedLaunch`.
    """
    rest, _ = kept_of(saved.extras)
    layouts = {
        "out": layout_of(saved.out),
        "dout": layout_of(grad.dout),
        "rest": layout_of(or_else(rest, saved.out)),
    }
    constants = {
        **constants,
        "DV": padded(made.spec.value_head_dim),
        "SCORED": made.mods(call, False).score_mod is not None,
        "HAS_DLSE": grad.dlse is not None,
        "IS_GIVEN": grad.delta is not None,
        "HAS_REST": rest is not None,
        "BLOCK_M": 32,
    }
    fixed = {
        **backward_sizes(call, row_values),
        "dl_strides": (0, 0, 0) if grad.dlse is None else grad.dlse.stride(),
    }
    batch, heads = call.query.shape[:2]
    programs = batch * heads * -(-rows // 32)
    return made.fixed_launch(
        function, programs, constants, Options(4, 1), fixed, layouts, types, aligned, named
    )


def key_sums_specs(
    query: tuple[int, ...], key: tuple[int, ...], tile: int, padded: int, columns: int, cores: int
) -> tuple[TensorSpec, ...]:
    """Return the workspace of dK and dV of KV heads whose query heads are split over programs; it
    is empty where they aren't.

    A KV head is split where it has several query heads, and all KV heads together have fewer tiles
    than would keep all multiprocessors busy, or splits have `_ROWS_OF_SPLIT` rows. The splits
    follow from the shapes and the number of multiprocessors alone, and their sums are added up in
    order, so results repeat bit for bit.

    Args:
        query, key: shapes.
        tile: number of keys of a tile.
        padded: number of keys that the workspace has room for.
        columns: number of columns of dK and dV.
        cores: number of the device's multiprocessors.
    """
    units = key[0] * key[1]
    if not units or not key[2]:
        return ()
    heads = query[0] * query[1] // units
    tiles = units * -(-key[2] // tile)
    more = min(_MORE_TILES_A_CORE * cores // tiles, heads * query[2] // _ROWS_OF_SPLIT)
    wanted = _TILES_A_CORE * cores // tiles if tiles < _FEW_TILES * cores else 1
    splits = min(heads, max(wanted, more))
    if splits < 2:
        return ()
    # The last split may have fewer heads, but none is empty.
    splits = -(-heads // -(-heads // splits))
    return (TensorSpec((units, splits, padded, columns), torch.float32),)


def key_columns(spec: Spec) -> dict[str, int]:
    """Return D and DV of `sum_kernel` after `key_kernel`: the columns of all parts of a tile of
    dK and of dV; 0 where it isn't wanted."""
    columns = {}
    for name, gradient, dim in (("D", "k", spec.head_dim), ("DV", "v", spec.value_head_dim)):
        part = columns_of_part(dim)
        columns[name] = -(-dim // part) * part if gradient in spec.gradients else 0
    return columns


class SplitArguments(NamedTuple):
    """Arguments of a kernel that makes dK and dV of KV heads, split or not.

    Args:
        constants, fixed: constants, and arguments that calls of one shape share.
        aligned: bytes that divide pointers.
        number: number of splits of a KV head.
    """

    constants: Mapping[str, object]
    fixed: Mapping[str, object]
    aligned: Mapping[str, int]
    number: int


def split_arguments(call: Call, key_sums: Tensor | None) -> SplitArguments:
    """Return the arguments.

    Args:
        key_sums: tensor of `key_sums_specs`, or None where KV heads aren't split.
    """
    if key_sums is None:
        return SplitArguments(dict.fromkeys(("key_sums", "head_splits", "split_heads")), {}, {}, 1)
    units, splits = key_sums.shape[:2]
    heads = call.query.shape[0] * call.query.shape[1] // units
    fixed = {"head_splits": splits, "split_heads": -(-heads // splits)}
    return SplitArguments({}, fixed, {"key_sums": BYTES}, splits)


def sums_launch(
    made: Programs, call: Call, grads: Grads, key_sums: Tensor, columns: Mapping[str, int],
    odd_keys: Tensor | None = None, named: Mapping[str, str | Part] | None = None,
) -> FixedLaunch:  # fmt: skip
    """Return the launch that adds up the splits of KV heads and fills grads.dk and grads.dv.

    Args:
        columns: D and DV, the columns that dK and dV have in key_sums; 0 where it isn't wanted.
        odd_keys: argument of the kernel; the kernel before has set it to 0.
        named: as in `FixedLaunch`.
    """
    dk, dv = grads.dk, grads.dv
    units, splits, padded = key_sums.shape[:3]
    constants: dict[str, object] = {**columns, "BLOCK_N": _SUMMED_KEYS}
    if odd_keys is None:
        constants["odd_keys"] = None
    return made.fixed_launch(
        backward_keys.sum_kernel,
        units * -(-padded // _SUMMED_KEYS),
        constants,
        Options(4, 1),
        {**call_sizes(call), "padded_keys": padded, "head_splits": splits},
        {"dk": layout_of(or_else(dk, call.key)), "dv": layout_of(or_else(dv, call.value))},
        aligned={"key_sums": BYTES},
        named=named,
    )


def keys_launch(
    made: Programs,
    call: Call,
    dout: Tensor,
    row_values: Tensor,
    grads: Grads,
    key_sums: Tensor | None,
    rows: MaskRows | None,
    config: Config,
) -> FixedLaunch:
    """Return the launch that fills grads.dk and grads.dv, or key_sums instead; `rows` are the
    transposed mask's."""
    spec = made.spec
    dk, dv, block_m = grads.dk, grads.dv, config.block_m
    layouts = layouts_of(call, dout=dout, dk=or_else(dk, call.key), dv=or_else(dv, call.value))
    described = made.describer(call.query, dout)
    # A tile's first value must lie at a multiple of 16 bytes, and a stage, which follows another
    # one in shared memory, must fill a multiple of 128 bytes: otherwise TMA fails, and the process
    # can't use the GPU any more.
    if described == "host" and not (
        is_described_whole(row_values)
        and (rows is None or rows.block_size[1] % 4 == 0)
        and block_m % 32 == 0
    ):
        described = None
    even = made.is_even(call, config, "queries", rows)
    mods = made.mods(call, even)
    blocks = spec.block_size[::-1] if rows is None else rows.block_size
    tiles = tile_count(rows, call.key.shape[2], config.block_n)
    split = split_arguments(call, key_sums)
    fixed = {
        **backward_sizes(call, row_values),
        **made.described(described, block_m, query=call.query, dout=dout),
        **split.fixed,
        "tiles": tiles,
        "head_group": key_head_group(call, splits=split.number),
    }
    if described == "host":
        fixed["row_values"] = descriptor_of_floats(row_values, block_m)
    kv_batch, kv_heads = call.key.shape[:2]
    return made.fixed_launch(
        backward_keys.key_kernel,
        tiles * kv_batch * kv_heads * split.number,
        {
            **split.constants,
            **mods.reading(),
            "SCORE_MOD_BACKWARD": mods.score_mod_backward,
            "Q_BLOCK": blocks[1],
            "KV_BLOCK": blocks[0],
            "WANT_DK": dk is not None,
            "WANT_DV": dv is not None,
            "DESCRIBED": described,
            "BESIDE": beside(described, call.query, dout),
            "EVEN": even,
            "LOOPED": made.target == "blackwell",
            "FOLLOWS": made.overlaps,
            "LEADS": made.overlaps,
            "BLOCK_M": block_m,
            "BLOCK_N": config.block_n,
        },
        overlapping(config.options, made.overlaps),
        fixed,
        layouts,
        aligned=split.aligned,
    )


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
) -> FixedLaunch:
    """Return the launch that fills dq, and adds to the captured tensors' gradients.

    Args:
        totals, sums: as in `operations.accumulate`.
        follows_keys: the launch before it is `keys_launch`'s, and it may begin before that ends.
    """
    spec = made.spec
    layouts = layouts_of(call, dout=dout, dq=or_else(dq, call.query))
    described = made.describer(call.key, call.value)
    even = made.is_even(call, config, "keys", rows)
    mods = made.mods(call, even, sums)
    blocks = spec.block_size if rows is None else rows.block_size
    follows = follows_keys and made.overlaps
    batch, heads, length = call.query.shape[:3]
    tiles = tile_count(rows, length, config.block_m)
    fixed = {
        **backward_sizes(call, row_values),
        **made.described(described, config.block_n, key=call.key, value=call.value),
        "tiles": tiles,
        "head_group": made.head_group(batch * heads, call.key.shape[2]),
    }
    return made.fixed_launch(
        backward_queries.query_kernel,
        tiles * batch * heads,
        {
            **mods.reading(),
            "SCORE_MOD_BACKWARD": mods.score_mod_backward,
            "CAPTURED_GRADIENTS": mods.captured_gradients if totals else None,
            "Q_BLOCK": blocks[0],
            "KV_BLOCK": blocks[1],
            "WANT_DQ": dq is not None,
            "DESCRIBED": described,
            "BESIDE": beside(described, call.key, call.value),
            "EVEN": even,
            "FOLLOWS": follows,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
        },
        overlapping(config.options, follows),
        fixed,
        layouts,
        {"totals": tuple(pointer_type(total.dtype) for total in totals)},
    )


def integer_specs(made: Programs, call: Call) -> tuple[TensorSpec, ...]:
    """Return the workspace: for the elements of each tensor that needs a gradient an integer, then
    the largest addition, then the number of additions. It is empty where no gradient of a captured
    tensor has to be deterministic."""
    if made.spec.determinism == "off" or not made.learned:
        return ()
    return tuple(
        TensorSpec(tuple(call.captured[i].shape), dtype, zeroed=True)
        for dtype in (torch.int64, torch.int32, torch.int64)
        for i in made.learned
    )


def total_launches(
    made: Programs,
    totals: Sequence[Tensor],
    integers: Sequence[Tensor],
    parts: dict[object, FixedLaunch],
) -> list[Launch]:
    """Return the launches that turn integers into `totals`, float32: deterministic gradients of
    captured tensors, which repeat bit for bit.

    The rounding of a sum of floats depends on its order; integers are not rounded. So the query
    pass runs twice. First it finds the number of additions of each element, and the largest. Then
    it adds integers, multiples of a power of two that is as small for each element as its sum's 63
    bits allow. Non-finite additions are summed as floats: infinity and NaN are the same in any
    order.

    Args:
        integers: tensors of `integer_specs`.
        parts: as in `kept_launch`.
    """

    def launch(i: int, count: int) -> FixedLaunch:
        # A tensor may grow from call to call: the launch of its last size is kept alone.
        found = parts.get(("totals", i))
        if found is None or found.values["count"] != count:
            constants, programs = {"BLOCK": _TOTALS_BLOCK}, -(-count // _TOTALS_BLOCK)
            found = made.fixed_launch(
                backward.total_kernel, programs, constants, Options(4, 1), {"count": count}
            )
            parts["totals", i] = found
        return found

    return [
        launch(i, total.numel()).launch({
            "total": total, "integers": integers[i], "largest": integers[i + len(totals)],
            "counts": integers[i + 2 * len(totals)],
        })
        for i, total in enumerate(totals)
        if total.numel()
    ]  # fmt: skip
