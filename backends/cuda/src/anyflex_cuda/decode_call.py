"""Launching decoding on Hopper: which calls its kernel takes, with which tiles and how many
programs."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import NamedTuple

import torch

from anyflex.plugin import Call, Outputs, Spec, TensorSpec
from anyflex_cuda import decode_parts, decode_steps, forward_call
from anyflex_cuda.forward_call import DESCRIBED, boxed_layouts
from anyflex_cuda.gluon_kernels import GluonPrograms, mod_constants
from anyflex_cuda.gluon_launch import boxes_of, descriptor_type
from anyflex_cuda.kernel_arguments import ROW_STRIDES, TYPES
from anyflex_triton.building import (
    BYTES,
    STORED_TYPES,
    FixedLaunch,
    Mods,
    Options,
    Program,
    Programs,
    call_sizes,
    compile_missing,
    layout_like,
    layout_of,
    mask_rows,
    output_values,
    padded,
    wanted_outputs,
)

__all__ = [
    "MARK",
    "DecodeFit",
    "DecodeTiles",
    "boxes_for",
    "decode_fit_of",
    "decode_program",
    "decode_tiles",
    "how_added",
    "launch_decode",
    "parts_workspace",
    "refused_decode",
    "refused_decode_spec",
    "sums_launch",
]

_LEAST_SHARE = 128
"""Minimum number of keys of a share. A shorter one costs more in combining parts than it saves."""
_FEW_PARTS, _MOST_PARTS = 16, 64
"""Number of a unit's parts that are added up at a time: what fits one warp, and what fits four.
There are only two because each is compiled separately."""
_MOST_ADDED = 320
"""Maximum number of rows of a unit's parts that one program adds up. With 128 columns it reads 160
KB in 2 to 3 us, the launch latency of another kernel."""
_ALIGNED_PROGRAMS = 15 / 16
"""Minimum fraction of the resident programs to launch, where with fewer of them fewer shares cross
the ends of units."""
MARK = secrets.randbelow(1 << 46) * decode_parts.MOST_COUNTED.value
"""Mark of `decode_parts.begin_count`. It is random, so that uninitialized memory practically never
holds it."""


class DecodeTiles(NamedTuple):
    """How the kernels are compiled.

    Args:
        block_n: keys of a step.
        stages: pipeline stages: steps whose keys and values are in shared memory or in flight.
        programs: number of programs per multiprocessor.
    """

    block_n: int
    stages: int
    programs: int

    @property
    def most_registers(self) -> int:
        """Registers per thread at launch: a program's 8 warps share its registers."""
        return min(255, (1 << 16) // (256 * self.programs)) // 8 * 8


def decode_tiles(spec: Spec) -> DecodeTiles:
    """Return the spec's tiles: two programs a multiprocessor. With 128 columns two stages were the
    fastest of nine settings on an H200, by 1 %; with 64 none was measured, and none of keys stored
    in 8 bits, which have as many bytes in flight."""
    if spec.kv_storage != "plain":
        return DecodeTiles(64, 4, 2)
    return DecodeTiles(64, 2 if _width(spec) > 64 else 6, 2)


def _width(spec: Spec) -> int:
    return _columns(max(spec.head_dim, spec.value_head_dim))


def _columns(dim: int) -> int:
    """Return the columns of a tile in shared memory, and of a product."""
    return 64 if dim <= 64 else 128


def refused_decode_spec(spec: Spec) -> str | None:
    """Return why no decoding call of a spec takes Hopper's kernel, or None."""
    if spec.dtype.itemsize != 2:
        return f"{spec.dtype}: wgmma takes bfloat16 and float16"
    if max(spec.head_dim, spec.value_head_dim) > 128:
        return "decoding with head dims above 128"
    return None


def refused_decode(spec: Spec, tiles: DecodeTiles, call: Call) -> str | None:
    """Return why a call takes the portable kernel although its spec doesn't have to and TMA loads
    its tensors, or None."""
    if call.mask is not None and call.mask.shape[1] > 1:
        return "each head has a mask of its own, and its tile is of all that share a key head"
    if _units(call) * _most_steps(spec, tiles, call) >= 1 << 31:
        return "more steps than 32 bits count"
    return None


def _units(call: Call) -> int:
    """Return the number of units: KV heads of all batch entries."""
    return call.query.shape[0] * call.key.shape[1]


def _most_steps(spec: Spec, tiles: DecodeTiles, call: Call) -> int:
    """Return the maximum number of a unit's steps, before the mask is read."""
    keys = call.key.shape[2]
    steps = -(-keys // tiles.block_n)
    if spec.mask_kind == "runs" and spec.block_size[1] % tiles.block_n:
        # Each run may end within a step, which adds one.
        steps += -(-keys // spec.block_size[1])
    return steps


class DecodeFit(NamedTuple):
    """Launch parameters that follow from a call's shapes and strides alone.

    Args:
        workspace: counts, values and sums of units' parts; edges and steps of a mask.
        plan: constant of `decode_steps`: which units share a list of steps.
        even: whether the number of keys and the mask's block size are multiples of a step's.
        programs: number of programs that share the steps.
        adds: whether these programs also add up the parts of units.
        at_once: number of a unit's parts added up at a time, where another kernel does that.
        rows: number of query rows of all heads.
        fixed: arguments of the kernels, but for the strides of out.
    """

    workspace: tuple[TensorSpec, ...]
    plan: int
    even: bool
    programs: int
    adds: bool
    at_once: int
    rows: int
    fixed: Mapping[str, object]


def decode_fit_of(made: GluonPrograms, tiles: DecodeTiles, call: Call) -> DecodeFit | None:
    """Return a call's `DecodeFit`, or None where `refused_decode` refuses it, or
    `forward_call.refusal` does for a reason other than alignment of pointers."""
    spec = made.spec
    size = spec.dtype.itemsize
    layouts = boxed_layouts(call)
    if layouts is None or refused_decode(spec, tiles, call) is not None:
        return None
    batch, heads, length, _ = call.query.shape
    kv_heads, keys = call.key.shape[1:3]
    units, most = _units(call), _most_steps(spec, tiles, call)
    plan, even = decode_steps.NONE.value, keys % tiles.block_n == 0
    if call.mask is not None:
        plan = decode_steps.EACH.value if call.mask.shape[0] > 1 else decode_steps.ALL.value
        even = even and spec.block_size[1] % tiles.block_n == 0
    room = forward_call.cores(call.query.device) * tiles.programs
    programs = max(1, min(room, units * most // -(-_LEAST_SHARE // tiles.block_n)))
    groups = 1
    if plan != decode_steps.EACH.value:
        programs = _aligned(programs, units, most)
        groups = math.gcd(programs, units)
    # Maximum number of a unit's parts. Where batch entries have their own step counts, one of them
    # may have nearly all steps.
    sharing = kv_heads if plan == decode_steps.EACH.value else units
    parts = programs // sharing + (0 if groups == units else 2)
    unit_rows = heads // kv_heads * length
    workspace = [parts_workspace(spec, units, programs, unit_rows)]
    boxes = boxes_for(spec, tiles)
    values: dict[str, object] = {
        **call_sizes(call),
        "k_desc": boxes_of(*layouts["key"], size, boxes["k_desc"]),
        "v_desc": boxes_of(*layouts["value"], size, boxes["v_desc"]),
        "q_strides": layout_like(*layouts["query"], size, BYTES).strides[:3],
        "k_strides": call.key.stride()[:3],
        "v_strides": call.value.stride()[:3],
        "unit_steps": most,
        "most": most,
        "most_rows": length,
        "programs": programs,
        "groups": groups,
        "mark": MARK,
    }
    if call.mask is not None:
        entries = call.mask.shape[0]
        workspace.append(TensorSpec((entries + 1 + entries * most * 2,), torch.int32))
        values["entries"] = entries
    return DecodeFit(
        tuple(workspace),
        plan,
        even,
        programs,
        *how_added(parts, unit_rows),
        batch * heads * length,
        values,
    )


def how_added(parts: int, unit_rows: int) -> tuple[bool, int]:
    """Return (adds, at_once) of `DecodeFit`.

    Args:
        parts: maximum number of a unit's parts. unit_rows: of a unit.
    """
    at_once = _FEW_PARTS if parts <= _FEW_PARTS else _MOST_PARTS
    return parts * unit_rows <= _MOST_ADDED, at_once


def parts_workspace(spec: Spec, units: int, programs: int, rows: int) -> TensorSpec:
    """Return the workspace of counts, values and sums of parts.

    Args:
        rows: maximum number of a unit's rows.
    """
    # Counts come first: see `decode_steps.counts_floats`. A program has two places for parts.
    return TensorSpec(
        (-(-units // 2) * 4 + 2 * programs * rows * (spec.value_head_dim + 3),), torch.float32
    )


def _aligned(programs: int, units: int, most: int) -> int:
    """Return how many of `programs` to launch: a multiple or a divisor of the number of units,
    where that is nearly as many.

    Args:
        most: maximum number of a unit's steps.
    """
    if units <= programs:
        # Take the fewest programs whose shares are no longer.
        longest = -(-most // (programs // units))
        found = -(-most // longest) * units
    else:
        found = -(-units // -(-units // programs))
    aligned = found % units == 0 or units % found == 0
    return found if aligned and found >= programs * _ALIGNED_PROGRAMS else programs


def decode_program(
    made: GluonPrograms, tiles: DecodeTiles, plan: int, mods: Mods, adds: bool, unit: int,
    wanted: Mapping[str, bool], alone: bool = False, rows: int = 64,
) -> Program:  # fmt: skip
    """Return the compiled kernel for a class of calls.

    Args:
        plan: constant of `decode_steps`: which units share a list of steps.
        mods: from `GluonPrograms.mods`.
        adds: as in `DecodeFit`. unit: as in out's `Layout`.
        wanted: from `wanted_outputs`.
        alone: whether the padding rows of a packed call are this kernel's.
        rows: rows of a tile.
    """
    spec = made.spec
    # Imported here because most processes don't decode, and Triton reads the source of each of its
    # functions.
    from anyflex_cuda import hopper_decode

    boxes, is_stored = boxes_for(spec, tiles), spec.kv_storage != "plain"
    is_simple = boxes["k_desc"][2] == tiles.block_n
    is_simple = is_simple and (spec.q_layout != "packed" or plan == decode_steps.NONE.value)
    of_keys = STORED_TYPES.get(spec.kv_storage, spec.dtype)
    return made.program(
        hopper_decode.decode_kernel,
        {
            **mod_constants(mods),
            "PLAN": plan,
            "D": boxes["k_desc"][3] if is_stored else _columns(spec.head_dim),
            "DV": boxes["v_desc"][3] if is_stored else _columns(spec.value_head_dim),
            "STORED": spec.kv_storage,
            "ROWS": rows,
            "UNIT": unit,
            "ADDS": adds,
            "ALONE": alone,
            **wanted,
            "STAGES": tiles.stages,
            "BLOCK_N": tiles.block_n,
            # Several pages a step take more of them, listed steps of a packed call, and places of
            # scales.
            "PRODUCER_REGISTERS": 56 if is_stored else 24 if is_simple else 40,
        },
        Options(4, 1, (("maxnreg", tiles.most_registers),)),
        types={
            **{name: descriptor_type(of_keys, box) for name, box in boxes.items()},
            **ROW_STRIDES,
            "o_strides": ("i64",) * 4,
        },
        aligned=dict.fromkeys(("query", "partial_out", "counts"), BYTES),
    )


def boxes_for(spec: Spec, tiles: DecodeTiles) -> dict[str, tuple[int, ...]]:
    """Return the boxes of keys and values: of a step, or of its part that no page ends within,
    which are as wide as the swizzle, as rows of 8 bits always are."""
    rows = math.gcd(tiles.block_n, spec.page_size)
    dims = {"k_desc": spec.head_dim, "v_desc": spec.value_head_dim}
    return {
        name: (1, 1, rows, _box_columns(spec, dim, rows == tiles.block_n))
        for name, dim in dims.items()
    }


def _box_columns(spec: Spec, dim: int, is_whole: bool) -> int:
    if spec.kv_storage != "plain":
        return 128
    return _columns(dim) if is_whole else 64


def launch_decode(
    portable: Programs, made: GluonPrograms, tiles: DecodeTiles, fit: DecodeFit, call: Call,
    out: Outputs,
) -> None:  # fmt: skip
    """Launch decoding on the current stream: with a mask the kernel that lists its steps, then the
    main kernel, then the kernel that adds up parts unless the main one does.

    Args:
        portable: the spec's programs in plain Triton.
        fit: the call's `DecodeFit`.
    """
    partial_out, result, device = out.workspace[0], out.out, call.query.device
    mods = made.mods(call, fit.even)
    # One dict serves all kernels: a name means the same in each of them.
    values = made.common_values(call, None if call.mask is None else mask_rows(call.mask))
    values.update(output_values(out, partial_out))
    values["query"], values["key"], values["value"] = call.query, call.key, call.value
    values["partial_out"] = values["counts"] = partial_out
    values["edges"] = out.workspace[-1]

    def make() -> list[FixedLaunch]:
        o_layout, wanted = layout_of(result), wanted_outputs(out)
        unit = o_layout.unit
        fixed = {**fit.fixed, "o_strides": o_layout.strides}
        signature = (fit.plan, mods.key, fit.adds, unit, *wanted.values())
        program = made.decoding(
            signature,
            lambda: decode_program(made, tiles, fit.plan, mods, fit.adds, unit, wanted),
        )
        main = FixedLaunch(program, fit.programs, fixed, DESCRIBED)
        found = [main]
        if not fit.adds:
            found.append(sums_launch(portable, fit, unit, mods, wanted, fixed))
        if call.mask is not None:
            constants = {"KV_BLOCK": portable.spec.block_size[1], "BLOCK_N": tiles.block_n}
            # One program for each entry, and one that counts.
            programs = call.mask.shape[0] + 1
            kernel, options = decode_steps.steps_kernel, Options(4, 1)
            steps = portable.fixed_launch(kernel, programs, constants, options, fixed, types=TYPES)
            found.insert(0, steps)
        compile_missing([each.program for each in found], device)
        return found

    # The key and the call's shapes determine the launches. Layouts would take longer to find.
    key = (
        "anyflex_cuda.decode", mods.key, out.lse is None, out.max_scores is None, len(out.saved),
        result.stride(), result.data_ptr() % BYTES,
    )  # fmt: skip
    for part in made.kept(call, key, make):
        part.run(device, values)


def sums_launch(
    made: Programs, fit: DecodeFit, unit: int, mods: Mods, wanted: Mapping[str, bool],
    fixed: Mapping[str, object],
) -> FixedLaunch:  # fmt: skip
    """Return the launch that adds up parts. Arguments are as in `decode_program`."""
    from anyflex_cuda import decode_sums  # here, as `hopper_decode` is

    return made.fixed_launch(
        decode_sums.combine_kernel,
        fit.rows,
        {
            "PLAN": fit.plan,
            "DV": padded(made.spec.value_head_dim),
            "PARTS": fit.at_once,
            "UNIT": unit,
            "SCORED": mods.score_mod is not None,
            **wanted,
        },
        # One warp adds up a few parts without barriers.
        Options(1 if fit.at_once <= _FEW_PARTS else 4, 1),
        fixed,
        types=TYPES,
        aligned={"partial_out": BYTES},
    )
