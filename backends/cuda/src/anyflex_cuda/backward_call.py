"""Launches of Hopper's backward: row values, dK with dV and sums of dQ, conversion and repairs.

dQ and captured tensors' gradients are added up in float32 by atomic additions in no fixed order,
so that their last bits may differ from run to run. Where sums must repeat, the portable pass over
query rows makes them instead: one program per tile, in a fixed order. Above head dim 128 a
separate kernel makes dQ (`hopper_wide_backward`), whose sums always repeat.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from anyflex.plugin import Call, GradInputs, Grads, Outputs, Saved, Spec, TensorSpec
from anyflex_cuda import backward_rows, forward_call, hopper_backward
from anyflex_cuda.gluon_kernels import GluonPrograms, mod_constants
from anyflex_cuda.gluon_launch import (
    descriptor,
    row_descriptor,
)
from anyflex_cuda.kernel_arguments import TYPES
from anyflex_triton.building import (
    BYTES,
    Boxes,
    FixedLaunch,
    Launch,
    Mods,
    Options,
    Part,
    Program,
    Programs,
    backward_key,
    backward_sizes,
    backward_values,
    captured_additions,
    expected_backward,
    key_head_group,
    key_sums_specs,
    layout_of,
    layouts_of,
    mask_rows,
    or_else,
    padded,
    pointer_type,
    row_values_launch,
    split_arguments,
    sums_launch,
)

__all__ = [
    "BackwardFit",
    "backward_fit_of",
    "backward_programs",
    "hopper_launches",
    "is_wide",
    "makes_dq",
    "portable_gradients",
    "refused_backward",
]

Names = Mapping[str, str | Part]
"""Arguments' names -> what they take, as in `FixedLaunch`."""

_KEYS = hopper_backward.KEYS
_KEY_ROWS = {name: f"key_{name}" for name in ("offsets", "ends", "runs", "mask_strides")}
"""Names of values of the kernel that makes dK and dV, which takes the transposed mask's rows under
the names that other kernels have for the mask's rows."""
_ALIGNMENT = 128
"""Bytes that divide the position of each tensor in the workspace."""
_ROWS_PADDED = 128
_SUMMED_ROWS = 64
"""Number of query rows whose sums of dQ are contiguous, and are checked together."""
_REPAIRED_KEYS = 32
_LOOKED_AT = 128
"""Number of tiles that a program checks for non-finite values."""
_WIDTHS = (64, 128)
_WIDE_ROWS = 128
"""Query rows of a tile of wide heads' dQ, 64 for each consumer."""
_WIDE_STEP = 64
"""Query rows of a step, and keys of a tile, of wide heads."""
_WIDE_BLOCKS = (_WIDE_ROWS, _WIDE_STEP)
"""Block sizes of masks are multiples of these numbers of rows and keys, for wide heads."""
DYNAMIC = True
"""Whether programs take the next free tile; else each takes every n-th tile of n programs."""


def is_wide(spec: Spec) -> bool:
    """Return whether some head dim is above 128."""
    return max(spec.head_dim, spec.value_head_dim) > 128


def refused_backward(spec: Spec) -> str | None:
    """Return why no call of this spec takes Hopper's backward, in words for `explain`. None: calls
    take it unless `forward_call.refusal` refuses their tensors."""
    if spec.dtype.itemsize != 2:
        return "float32"
    dims = f"head dims {spec.head_dim} and {spec.value_head_dim}"
    wide = is_wide(spec)
    if not wide and {padded(spec.head_dim), padded(spec.value_head_dim)} - set(_WIDTHS):
        return f"{dims}, for it takes 33 to 128, or one of 129 to 256"
    if spec.head_dim % 8 or spec.value_head_dim % 8:
        return f"{dims}, for TMA takes multiples of 8"
    if not {"k", "v"} <= set(spec.gradients):
        return "gradients of key and value aren't both wanted"
    if wide and _handed_over(spec) > _HANDED_OVER_WIDE:
        return f"{len(spec.captured)} captured tensors, for which shared memory has no room"
    q_block, kv_block = spec.block_size if spec.mask_kind == "runs" else (_KEYS, _KEYS)
    rows, keys = _WIDE_BLOCKS if wide else (64, _KEYS)
    if q_block % rows or kv_block % keys:
        return f"mask blocks of {q_block} x {kv_block}, for it takes multiples of {rows} x {keys}"
    return None


def makes_dq(spec: Spec) -> bool:
    """Return whether Hopper's kernel makes dQ, and gradients of captured tensors with it: where
    sums needn't repeat, and `_adds_captured`. Above head dim 128, where a separate kernel makes dQ
    and sums always repeat, that is where no captured tensor learns."""
    if is_wide(spec):
        return "q" in spec.gradients and not any(facts.needs_grad for facts in spec.captured)
    return "q" in spec.gradients and spec.determinism == "off" and _adds_captured(spec)


def _adds_captured(spec: Spec) -> bool:
    """Return whether captured tensors' gradients are faster beside dQ than in the portable pass
    over query rows, which computes all scores again.

    Measured as a fraction of backward's time with the portable pass, on an H100
    (`bench/learning_tables.py`). Elements that the key or only the head decides: 0.69 to 0.87, but
    1.17 with head dim 128 if the score itself is a factor, because no register is left to keep it.
    Elements that the row decides, whose sums go through all warps: 1.3 to 2.1. Elements that query
    and key both decide, one address per pair: 2.2, and 1.4 on an H200. Dense biases there: 0.6 to
    0.9 in words, with head dim 128 if they have 16 bits.
    """
    of_128 = max(padded(spec.head_dim), padded(spec.value_head_dim)) == 128
    full = of_128 and any(f.needs_grad and f.dtype.itemsize > 2 for f in spec.captured)
    return not any(
        "score" in each.at
        or ("q_idx" in each.at and (full or not each.is_dense))
        or ("score" in each.of and (of_128 or each.is_dense))
        for each in captured_additions(spec)
    )


def portable_gradients(spec: Spec, want_dq: bool) -> tuple[str, ...]:
    """Return the gradients that the portable pass over query rows makes in a backward that is
    otherwise Hopper's: ``dq``, ``captured``, both or none.

    Args:
        want_dq: result of `makes_dq`.
    """
    if want_dq:
        return ()
    learns = any(facts.needs_grad for facts in spec.captured)
    return tuple(
        name for name, is_wanted in (("dq", "q" in spec.gradients), ("captured", learns))
        if is_wanted
    )  # fmt: skip


_HANDED_OVER, _HANDED_OVER_WIDE = 512, 2688
"""Maximum `_handed_over`, in bytes, with steps of 128 query rows, and with tiles of 256
columns."""


def _handed_over(spec: Spec) -> int:
    """Return the maximum number of bytes that a kernel passes to its partitions for captured
    tensors: a pointer, and length and stride of each dimension."""
    return sum(8 + 16 * facts.rank for facts in spec.captured)


def _rows_of_step(spec: Spec) -> int:
    """Return BLOCK_M: the most query rows that registers hold, and a divisor of the mask's
    block."""
    of_128 = max(padded(spec.head_dim), padded(spec.value_head_dim)) == 128
    # With a score mod 128 rows spill: 2.7 kB with ALiBi, 0.5 kB with a soft cap.
    if of_128 or spec.score_graph is not None:
        return 64
    # Arguments of partitions are passed through shared memory, and 128 rows leave 540 bytes of it.
    if _handed_over(spec) > _HANDED_OVER:
        return 64
    return 128 if spec.mask_kind == "none" or spec.block_size[0] % 128 == 0 else 64


class Work(NamedTuple):
    """Workspace of Hopper's backward.

    Args:
        row_values: float32 [4, B, Hq, L padded].
        odd_keys: int32 [Bkv * Hkv, `_key_tiles`].
        counter: int32 [1]: number of tiles taken; unused above head dim 128.
        key_sums: of `key_sums_specs`, or None where KV heads aren't split.
        dq_sums: float32 [B * Hq, L padded * D / 32, 32], or None where dQ isn't accumulated in
            memory.
        odd_rows: int32 [B * Hq, L padded / 64], or None where the portable pass makes dQ.
    """

    row_values: Tensor
    odd_keys: Tensor
    counter: Tensor
    key_sums: Tensor | None = None
    dq_sums: Tensor | None = None
    odd_rows: Tensor | None = None


class BackwardFit(NamedTuple):
    """Workspace of backward's calls of the same shapes and strides.

    Args:
        parts: the tensors of `Work` by name, as parts of the value "workspace".
        workspace: the one tensor that holds them: allocating five or six took the host a tenth of
            a small backward's time.
    """

    parts: Mapping[str, Part]
    workspace: tuple[TensorSpec, ...]


def _key_tiles(spec: Spec, keys: int) -> int:
    """Return the number of tiles of 64 keys that are checked for non-finite values."""
    return -(-keys // 64) if is_wide(spec) else -(-keys // _KEYS) * 2


def _key_columns(spec: Spec) -> dict[str, int]:
    """Return the columns D of dK and DV of dV in shared memory and in key_sums."""
    dims = {"D": spec.head_dim, "DV": spec.value_head_dim}
    if is_wide(spec):
        return {name: sum(forward_call.parts_of(dim)) for name, dim in dims.items()}
    return {name: padded(dim) for name, dim in dims.items()}


def backward_fit_of(spec: Spec, call: Call) -> BackwardFit:
    """Return the `BackwardFit` of a call that Hopper's backward takes."""
    query, key = call.query.shape, call.key.shape
    batch, heads, length = query[:3]
    kv_batch, kv_heads, keys = key[:3]
    rows = -(-length // _ROWS_PADDED) * _ROWS_PADDED
    specs = {
        "row_values": TensorSpec((4, batch, heads, rows), torch.float32),
        "odd_keys": TensorSpec((kv_batch * kv_heads, _key_tiles(spec, keys)), torch.int32),
        "counter": TensorSpec((1,), torch.int32),
    }
    tile = _WIDE_STEP if is_wide(spec) else _KEYS
    rows_of_keys = -(-keys // tile) * tile
    columns = sum(_key_columns(spec).values())
    cores = forward_call.cores(call.query.device)
    for sums in key_sums_specs(query, key, tile, rows_of_keys, columns, cores):
        specs["key_sums"] = sums
    if makes_dq(spec):
        specs["odd_rows"] = TensorSpec((batch * heads, rows // _SUMMED_ROWS), torch.int32)
        if not is_wide(spec):
            size = rows * padded(spec.head_dim) // 32
            specs["dq_sums"] = TensorSpec((batch * heads, size, 32), torch.float32)
    parts, end = {}, 0
    for name, each in specs.items():
        parts[name] = Part("workspace", end, each.shape, each.dtype)
        size = math.prod(each.shape) * each.dtype.itemsize
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return BackwardFit(parts, (TensorSpec((end,), torch.uint8),))


def hopper_launches(
    portable: Programs,
    gluon: GluonPrograms,
    fit: BackwardFit,
    call: Call,
    saved: Saved,
    grad: GradInputs,
    grads: Grads,
) -> list[Launch]:
    """Return the launches that fill grads.dk, grads.dv, and where `makes_dq` grads.dq and
    grads.captured.

    Args:
        fit: the call's.
        grad: gradients whose dout `is_boxed`.
        grads: with the tensor of `fit.workspace` first in its workspace.
    """
    key = ("anyflex_cuda.backward", backward_key(gluon, call, saved, grad))
    make = partial(_fixed_launches, portable, gluon, fit, call, saved, grad, grads)
    fixed = gluon.kept(call, key, make)
    values = backward_values(gluon, call, saved, grad, grads, None)
    values["workspace"] = grads.workspace[0]
    if "dq_sums" not in fit.parts:
        values["totals"] = ()
    mask = call.mask
    rows = values if mask is None else mask_rows(mask.transposed()).values()
    values["key_offsets"], values["key_ends"] = rows["offsets"], rows["ends"]
    values["key_runs"], values["key_mask_strides"] = rows["runs"], rows["mask_strides"]
    return [Launch(each, values) for each in fixed]


def backward_programs(
    portable: Programs, gluon: GluonPrograms, fit: BackwardFit, call: Call, out: Outputs
) -> list[Program]:
    """Return the programs that `hopper_launches` will launch for a call if dout is laid out as out
    is.

    Args:
        fit: the call's.
        out: outputs of the call's forward.
    """
    expected = expected_backward(portable.spec, call, out, fit.workspace)
    return [launch.program for launch in _fixed_launches(portable, gluon, fit, call, *expected)]


def _fixed_launches(
    portable: Programs,
    gluon: GluonPrograms,
    fit: BackwardFit,
    call: Call,
    saved: Saved,
    grad: GradInputs,
    grads: Grads,
) -> list[FixedLaunch]:
    """Return the parts of `hopper_launches` that calls of the same shapes, strides and alignment
    share."""
    parts, memory = fit.parts, grads.workspace[0]
    work = Work(**{name: part.within(memory) for name, part in parts.items()})
    # A pointer that is never used must still be valid.
    named = {"odd_rows": parts["odd_keys"], "dq_sums": parts["row_values"], **parts}
    if is_wide(gluon.spec):
        main = _wide_launches(gluon, call, grad.dout, grads, work, named)
    else:
        main = [_main(gluon, call, grad.dout, grads, work, {**named, **_KEY_ROWS})]
    return [
        _prepare(portable, call, saved, grad, work, named),
        *main,
        *_sums(portable, call, grads, work, named),
        *([] if work.dq_sums is None else [_convert(portable, call, grads, work, named)]),
        _repair(portable, call, grad.dout, grads, work, named),
    ]


def _totals(grads: Grads, work: Work) -> tuple[Tensor, ...]:
    """Return the totals of captured tensors' gradients that Hopper's kernel and the repair kernel
    add to; empty where the portable pass over query rows makes them."""
    if work.dq_sums is None:
        return ()
    return tuple(total for total in grads.captured if total is not None)


def _sums(made: Programs, call: Call, grads: Grads, work: Work, named: Names) -> list[FixedLaunch]:
    if work.key_sums is None:
        return []
    columns = _key_columns(made.spec)
    return [sums_launch(made, call, grads, work.key_sums, columns, work.odd_keys, named)]


def _prepare(
    made: Programs, call: Call, saved: Saved, grad: GradInputs, work: Work, named: Names
) -> FixedLaunch:
    constants = {"WANT_DQ": work.dq_sums is not None, "D": padded(made.spec.head_dim)}
    return row_values_launch(
        made, call, saved, grad, work.row_values, backward_rows.prepare_kernel,
        work.row_values.shape[3], constants, TYPES, {"dq_sums": BYTES}, named,
    )  # fmt: skip


def _of_dense(mods: Mods, totals: tuple[Tensor, ...]) -> dict[str, object]:
    """Return the constants of a kernel that reads dense biases by steps, and adds to their
    gradients."""
    if mods.read_dense is None:
        return {"READ_STEP": None}
    return {
        "SCORE_MOD": mods.score_mod_of_dense,
        "READ_STEP": mods.read_dense,
        "CAPTURED_GRADIENTS": mods.captured_gradients_of_dense if totals else None,
    }


def _main(
    made: GluonPrograms, call: Call, dout: Tensor, grads: Grads, work: Work, named: Names
) -> FixedLaunch:
    spec = made.spec
    dk, dv = grads.dk, grads.dv
    assert dk is not None and dv is not None
    blocks = (_KEYS, _KEYS) if call.mask is None else call.mask.block_size
    block_m = _rows_of_step(spec)
    length, keys = call.query.shape[2], call.key.shape[2]
    units = call.key.shape[0] * call.key.shape[1]
    tiles = -(-keys // _KEYS)
    ragged = bool(keys % _KEYS or length % block_m)
    mods = made.mods(call, not ragged)
    # Rows past the end count where a score mod may make their scores non-finite.
    ragged = bool(keys % _KEYS) or (mods.score_mod is not None and ragged)
    width, value_width = padded(spec.head_dim), padded(spec.value_head_dim)
    want_dq = work.dq_sums is not None
    totals = _totals(grads, work)
    queries, values = (1, 1, block_m, width), (1, 1, block_m, value_width)
    of_keys, of_values = (1, 1, 64, width), (1, 1, 64, value_width)
    split = split_arguments(call, work.key_sums)
    units *= split.number
    fixed = {
        **split.fixed,
        **backward_sizes(call, work.row_values),
        "query": descriptor(call.query, queries), "dout": descriptor(dout, values),
        "key": descriptor(call.key, of_keys), "value": descriptor(call.value, of_values),
        "dk": descriptor(dk, of_keys), "dv": descriptor(dv, of_values),
        "row_values": row_descriptor(work.row_values, block_m), "units": units, "tiles": tiles,
        # The cache also holds the float32 sums of dQ that tiles add to.
        "head_group": key_head_group(call, 4 * spec.head_dim, split.number),
    }  # fmt: skip
    if work.dq_sums is not None:
        fixed["dq_sums"] = descriptor(work.dq_sums, (1, 128, 32))
    return made.fixed_launch(
        hopper_backward.backward_kernel,
        min(tiles * units, forward_call.cores(call.query.device)),
        {
            **split.constants,
            **mod_constants(mods, totals),
            **_of_dense(mods, totals),
            "Q_BLOCK": blocks[0],
            "KV_BLOCK": blocks[1],
            "RAGGED": ragged,
            "WANT_DQ": want_dq,
            "BLOCK_M": block_m,
            "D": width,
            "DV": value_width,
            "DYNAMIC": DYNAMIC,
        },
        Options(4, 1),
        fixed,
        types={"totals": tuple(pointer_type(total.dtype) for total in totals)},
        aligned=split.aligned,
        named=named,
    )


def _wide_boxes(tensors: Mapping[str, Tensor | None]) -> dict[str, Boxes | None]:
    """Return descriptors by name; None for a missing tensor or second part."""
    found: dict[str, Boxes | None] = {}
    for name, tensor in tensors.items():
        found[name] = found[f"{name}_2"] = None
        if tensor is not None:
            for part, columns in zip(
                ("", "_2"), forward_call.parts_of(tensor.shape[3]), strict=False
            ):
                found[name + part] = descriptor(tensor, (1, 1, 64, columns))
    return found


def _wide_launches(
    made: GluonPrograms, call: Call, dout: Tensor, grads: Grads, work: Work, named: Names
) -> list[FixedLaunch]:
    """Return the launches that fill grads.dv, grads.dk, and, where there are `work.odd_rows`,
    grads.dq."""
    row_values = work.row_values
    splits = split_arguments(call, work.key_sums).number
    dq, dk, dv = grads.dq, grads.dk, grads.dv
    assert dk is not None and dv is not None
    given = {"query": call.query, "key": call.key, "value": call.value, "dout": dout}
    batch, heads, length = call.query.shape[:3]
    kv_batch, kv_heads, keys = call.key.shape[:3]
    even = length % _WIDE_STEP == 0 and keys % _WIDE_STEP == 0
    mods = made.mods(call, even)
    # Rows past the end count where a score mod may make their scores non-finite.
    ragged = bool(keys % _WIDE_STEP) or (mods.score_mod is not None and not even)
    launches = [
        _wide_launch(
            made, call, row_values, False, mods, ragged, {**given, "dq": None, "dk": dk, "dv": dv},
            kv_batch * kv_heads * splits, -(-keys // _WIDE_STEP),
            key_head_group(call, splits=splits), {**named, **_KEY_ROWS}, work.key_sums,
        )
    ]  # fmt: skip
    if work.odd_rows is not None:
        assert dq is not None
        units = batch * heads
        launches.append(
            _wide_launch(
                made, call, row_values, True, made.mods(call, even and length % _WIDE_ROWS == 0),
                bool(keys % _WIDE_STEP), {**given, "dq": dq, "dk": None, "dv": None},
                units, -(-length // _WIDE_ROWS), made.head_group(units, keys), named,
            )
        )  # fmt: skip
    return launches


def _wide_launch(
    made: GluonPrograms, call: Call, row_values: Tensor, of_queries: bool, mods: Mods,
    ragged: bool, tensors: Mapping[str, Tensor | None], units: int, tiles: int, head_group: int,
    named: Names, key_sums: Tensor | None = None,
) -> FixedLaunch:  # fmt: skip
    # Imported here because few processes need it, and Triton reads the source of each of its
    # functions.
    from anyflex_cuda import hopper_wide_backward

    spec = made.spec
    blocks = (_WIDE_ROWS, _WIDE_ROWS) if call.mask is None else call.mask.block_size
    split = split_arguments(call, key_sums)
    fixed: dict[str, object] = {
        **backward_sizes(call, row_values), **_wide_boxes(tensors), **split.fixed, "units": units,
        "tiles": tiles, "head_group": head_group,
    }  # fmt: skip
    if of_queries:
        fixed["odd_keys"] = None
    else:
        fixed.update(odd_rows=None, padded_length=None)
        fixed["row_values"] = row_descriptor(row_values, _WIDE_STEP)
    return made.fixed_launch(
        hopper_wide_backward.wide_kernel,
        tiles * units,
        {
            **{name: None for name, each in fixed.items() if each is None},
            **split.constants,
            **mod_constants(mods),
            "OF_QUERIES": of_queries,
            "Q_BLOCK": blocks[0],
            "KV_BLOCK": blocks[1],
            "RAGGED": ragged,
            "D": sum(forward_call.parts_of(spec.head_dim)),
            "DV": sum(forward_call.parts_of(spec.value_head_dim)),
        },
        Options(4, 1),
        {name: each for name, each in fixed.items() if each is not None},
        aligned=split.aligned,
        named={**named, **{f"{name}_2": name for name in tensors}},
    )


def _convert(made: Programs, call: Call, grads: Grads, work: Work, named: Names) -> FixedLaunch:
    dq, odd_rows = grads.dq, work.odd_rows
    assert dq is not None and odd_rows is not None
    layouts = {"dq": layout_of(dq)}
    return made.fixed_launch(
        backward_rows.convert_kernel,
        odd_rows.numel(),
        {"D": padded(made.spec.head_dim), "UNIT": layouts["dq"].unit},
        Options(4, 1),
        backward_sizes(call, work.row_values),
        layouts,
        TYPES,
        {"dq_sums": BYTES},
        named,
    )


def _repair(
    made: Programs, call: Call, dout: Tensor, grads: Grads, work: Work, named: Names
) -> FixedLaunch:
    dk, dv, odd_rows, odd_keys = grads.dk, grads.dv, work.odd_rows, work.odd_keys
    assert dk is not None and dv is not None
    totals = _totals(grads, work)
    layouts = layouts_of(call, dout=dout, dq=or_else(grads.dq, call.query), dk=dk, dv=dv)
    blocks = (_KEYS, _KEYS) if call.mask is None else call.mask.block_size
    mods = made.mods(call, False)
    row_tiles = 0 if odd_rows is None else odd_rows.numel()
    row_programs = -(-row_tiles // _LOOKED_AT)
    fixed = {
        **backward_sizes(call, work.row_values),
        "padded_keys": odd_keys.shape[1] * 64,
        "row_tiles": row_tiles,
        "key_tiles": odd_keys.numel(),
        "row_programs": row_programs,
    }
    return made.fixed_launch(
        backward_rows.repair_kernel,
        row_programs + -(-odd_keys.numel() // _LOOKED_AT),
        {
            **mod_constants(mods, totals),
            "Q_BLOCK": blocks[0],
            "KV_BLOCK": blocks[1],
            "WANT_DQ": odd_rows is not None,
            "TILES": _LOOKED_AT,
            "BLOCK_N": _REPAIRED_KEYS,
        },
        Options(4, 1),
        fixed,
        layouts,
        {**TYPES, "totals": tuple(pointer_type(total.dtype) for total in totals)},
        named=named,
    )
