"""Launching decoding on Hopper: which calls its kernel takes, with which tiles and how many
programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anyflex.plugin import Call, Outputs, Spec, TensorSpec
from anyflex_cuda import decode_steps, decode_sums, forward_call, hopper_decode
from anyflex_cuda.gluon_program import descriptor, descriptor_type
from anyflex_cuda.gluon_programs import GluonPrograms
from anyflex_triton.arguments import layout_of
from anyflex_triton.launch import Launch, Options, Program, launch_all
from anyflex_triton.mask_rows import mask_rows
from anyflex_triton.programs import (
    MaskRows,
    Programs,
    float_pointers,
    int32s,
    or_else,
    padded,
    strides,
)

__all__ = [
    "DecodeTiles",
    "decode_program",
    "decode_tiles",
    "decode_workspace",
    "launch_decode",
    "program_count",
    "refused_decode",
    "refused_decode_spec",
]

_LEAST_SHARE = 128
"""Keys: a shorter share isn't worth its place among a unit's sums."""
_MOST_PARTS = 64
"""Of a unit, that are added up at a time."""


@dataclass(frozen=True)
class DecodeTiles:
    """How the kernels are compiled.

    Args:
        block_n: keys of a step.
        stages: steps whose keys and values are in shared memory, or on their way there.
        programs: of a multiprocessor, which share its memory.
        early: the sums are launched before the programs end, which they wait for on their own.
    """

    block_n: int
    stages: int
    programs: int
    early: bool = False

    @property
    def most_registers(self) -> int:
        """Of a thread when a program begins: its 8 warps share what they are given."""
        return min(255, (1 << 16) // (256 * self.programs)) // 8 * 8


def decode_tiles(spec: Spec) -> DecodeTiles:
    """Return the spec's tiles: two programs a multiprocessor. With 128 columns two stages were the
    fastest of nine settings on an H200, by 1 %; with 64 none was measured."""
    return DecodeTiles(64, 2 if _width(spec) > 64 else 6, 2)


def _width(spec: Spec) -> int:
    return _columns(max(spec.head_dim, spec.value_head_dim))


def _columns(dim: int) -> int:
    """Of a tile in shared memory, and of a product."""
    return 64 if dim <= 64 else 128


def refused_decode_spec(spec: Spec) -> str | None:
    """Return why no decoding call of a spec takes Hopper's kernel, or None."""
    if spec.dtype.itemsize != 2:
        return f"{spec.dtype}: wgmma takes bfloat16 and float16"
    if max(spec.head_dim, spec.value_head_dim) > 128:
        return "decoding with head dims above 128"
    return None


def refused_decode(call: Call, tiles: DecodeTiles) -> str | None:
    """Return why a call takes the portable kernel although its spec doesn't have to and TMA loads
    its tensors, or None."""
    if call.mask is not None and call.mask.offsets.shape[1] > 1:
        return "each head has a mask of its own, and its tile is of all that share a key head"
    if _units(call) * _most_steps(call, tiles) >= 1 << 31:
        return "more steps than 32 bits count"
    return None


def _units(call: Call) -> int:
    """Key heads of all batch entries."""
    return call.query.shape[0] * call.key.shape[1]


def _most_steps(call: Call, tiles: DecodeTiles) -> int:
    """Of a unit: known before the mask is read."""
    keys = call.key.shape[2]
    steps = -(-keys // tiles.block_n)
    if call.mask is not None and call.mask.block_size[1] % tiles.block_n:
        # Each run may end within a step.
        steps += -(-keys // call.mask.block_size[1])
    return steps


def program_count(call: Call, tiles: DecodeTiles) -> int:
    """How many programs share a call's steps."""
    wanted = forward_call.cores(call.query.device) * tiles.programs
    least = -(-_LEAST_SHARE // tiles.block_n)
    return max(1, min(wanted, _units(call) * _most_steps(call, tiles) // least))


def decode_workspace(spec: Spec, call: Call, tiles: DecodeTiles) -> tuple[TensorSpec, ...]:
    """Values and sums of units' parts; the steps that a mask leaves, and how many."""
    heads, length = call.query.shape[1:3]
    rows = heads // call.key.shape[1] * length
    places = program_count(call, tiles) + _units(call)
    parts = (
        TensorSpec((places, rows, spec.value_head_dim), torch.float32),
        TensorSpec((places, rows, 3), torch.float32),
    )
    if call.mask is None:
        return parts
    entries = call.mask.offsets.shape[0]
    return (
        *parts,
        TensorSpec((entries + 1,), torch.int32),
        TensorSpec((entries, _most_steps(call, tiles), 2), torch.int32),
    )


def decode_program(
    made: GluonPrograms, tiles: DecodeTiles, plan: int, mods_of: object, score_mod: object,
    mask_mod: object, even: bool, max_scores: bool,
) -> Program:  # fmt: skip
    """Return the compiled kernel for a class of calls.

    Args:
        plan: whose the steps are, of `decode_steps`.
        mods_of, score_mod, mask_mod: of `GluonPrograms.mods`.
        even: lengths of keys, and of the mask's blocks, are multiples of a step's.
        max_scores: they are wanted.
    """
    spec = made.spec
    key = ("hopper decode", tiles, plan, mods_of, even, max_scores)
    program = made.existing.get(key)
    if program is not None:
        return program
    boxes = _boxes(spec, tiles)
    of_mods = ("tables", "ints", "floats", "shifts", "scale")
    return made.program(
        key,
        hopper_decode.decode_kernel,
        {
            **{name: descriptor_type(spec.dtype, box) for name, box in boxes.items()},
            **made.pointers("query", "key", "value"),
            **float_pointers("partial_out", "partial_sums"),
            **dict.fromkeys(("q_strides", "k_strides", "v_strides"), ("i64",) * 3),
            **dict.fromkeys(("edges", "steps"), "*i32"),
            **{name: made.common_types[name] for name in of_mods},
            **int32s("batch", "kv_heads", "q_length", "kv_length", "unit_steps", "most"),
        },
        {
            "SCORE_MOD": score_mod,
            "MASK_MOD": mask_mod,
            "PLAN": plan,
            "GROUP": spec.gqa_ratio,
            "KV_SHARED": spec.kv_broadcast,
            "DIM": spec.head_dim,
            "VALUE_DIM": spec.value_head_dim,
            "D": _columns(spec.head_dim),
            "DV": _columns(spec.value_head_dim),
            "WANT_MAX": max_scores,
            "EVEN": even,
            "EARLY": tiles.early,
            "STAGES": tiles.stages,
            "BLOCK_N": tiles.block_n,
            "PRODUCER_REGISTERS": 24,
        },
        ("query", "partial_out"),
        Options(4, 1, (("maxnreg", tiles.most_registers),)),
    )


def _boxes(spec: Spec, tiles: DecodeTiles) -> dict[str, tuple[int, ...]]:
    return {
        "k_desc": (1, 1, tiles.block_n, _columns(spec.head_dim)),
        "v_desc": (1, 1, tiles.block_n, _columns(spec.value_head_dim)),
    }


def launch_decode(
    portable: Programs, made: GluonPrograms, tiles: DecodeTiles, call: Call, out: Outputs
) -> None:
    """Launch what lists a mask's steps, if there is one, the programs that share the steps, and
    what adds up their sums, on the current stream.

    Args:
        portable: the spec's programs in plain Triton.
        call: neither `refused_decode` nor `forward_call.refusal` has a reason against it.
    """
    _, stand_in, *listed = out.workspace
    before = []
    plan, even = decode_steps.NONE.value, call.key.shape[2] % tiles.block_n == 0
    most = _most_steps(call, tiles)
    edges = steps = stand_in
    if call.mask is not None:
        edges, steps = listed
        rows = mask_rows(call.mask)
        each = steps.shape[0] > 1
        plan = decode_steps.EACH.value if each else decode_steps.ALL.value
        even = even and rows.block_size[1] % tiles.block_n == 0
        before.append(_steps_launch(portable, tiles, call, rows, edges, steps))
    launch_all(
        [
            *before,
            _parts_launch(made, tiles, call, plan, even, most, out, edges, steps),
            _sums_launch(portable, tiles, call, plan, most, out, edges),
        ],
        call.query.device,
    )


def _steps_launch(
    made: Programs,
    tiles: DecodeTiles,
    call: Call,
    rows: MaskRows,
    edges: torch.Tensor,
    steps: torch.Tensor,
) -> Launch:
    key = ("hopper decode steps", tiles.block_n)
    program = made.existing.get(key)
    if program is None:
        program = made.program(
            key,
            decode_steps.steps_kernel,
            {
                **dict.fromkeys(("offsets", "ends", "runs", "edges", "steps"), "*i32"),
                "mask_strides": ("i32", "i32"),
                **int32s("entries", "most", "kv_length"),
            },
            {"KV_BLOCK": rows.block_size[1], "BLOCK_N": tiles.block_n},
            (),
            Options(4, 1),
        )
    entries, most = steps.shape[:2]
    return Launch(
        program,
        entries + 1,
        {
            "offsets": rows.offsets, "ends": rows.ends, "runs": rows.runs,
            "mask_strides": rows.strides, "edges": edges, "steps": steps,
            "entries": entries, "most": most, "kv_length": call.key.shape[2],
        },
    )  # fmt: skip


def _parts_launch(
    made: GluonPrograms, tiles: DecodeTiles, call: Call, plan: int, even: bool, most: int,
    out: Outputs, edges: torch.Tensor, steps: torch.Tensor,
) -> Launch:  # fmt: skip
    mods = made.mods(call, even)
    boxes = _boxes(made.spec, tiles)
    q_strides = layout_of(call.query).strides
    partial_out, partial_sums = out.workspace[:2]
    values = made.common_values(call, None)
    of_mods = ("tables", "ints", "floats", "shifts", "scale")
    program = decode_program(
        made, tiles, plan, mods.key, mods.score_mod, mods.mask_mod, even,
        out.max_scores is not None,
    )  # fmt: skip
    return Launch(
        program,
        program_count(call, tiles),
        {
            **{name: values[name] for name in of_mods},
            "k_desc": descriptor(call.key, boxes["k_desc"]),
            "v_desc": descriptor(call.value, boxes["v_desc"]),
            "query": call.query, "key": call.key, "value": call.value,
            "partial_out": partial_out, "partial_sums": partial_sums,
            "q_strides": q_strides[:3], "k_strides": call.key.stride()[:3],
            "v_strides": call.value.stride()[:3], "edges": edges, "steps": steps,
            "batch": call.query.shape[0], "kv_heads": call.key.shape[1],
            "q_length": call.query.shape[2], "kv_length": call.key.shape[2],
            "unit_steps": most, "most": most,
        },
    )  # fmt: skip


def _sums_launch(
    made: Programs, tiles: DecodeTiles, call: Call, plan: int, most: int, out: Outputs,
    edges: torch.Tensor,
) -> Launch:  # fmt: skip
    spec = made.spec
    batch, heads, length = call.query.shape[:3]
    programs = program_count(call, tiles)
    o_layout = layout_of(out.out)
    partial_out, partial_sums = out.workspace[:2]
    rest = out.saved[0] if out.saved else None
    # As many as a unit has where all have equally many steps.
    parts = min(_MOST_PARTS, max(4, 1 << (programs // _units(call) + 1).bit_length()))
    key = (
        "hopper decode sums", tiles.early, plan, parts, o_layout.unit, out.lse is not None,
        out.max_scores is not None, rest is not None,
    )  # fmt: skip
    program = made.existing.get(key)
    if program is None:
        program = made.program(
            key,
            decode_sums.combine_kernel,
            {
                **float_pointers("partial_out", "partial_sums", "lse", "max_scores"),
                **made.pointers("out", "rest"),
                **strides("o_strides"),
                "edges": "*i32",
                **int32s("batch", "heads", "q_length", "unit_steps", "programs"),
            },
            {
                "GROUP": spec.gqa_ratio,
                "PLAN": plan,
                "VALUE_DIM": spec.value_head_dim,
                "DV": padded(spec.value_head_dim),
                "PARTS": parts,
                "UNIT": o_layout.unit,
                "WANT_LSE": out.lse is not None,
                "WANT_MAX": out.max_scores is not None,
                "WANT_REST": rest is not None,
                "EARLY": tiles.early,
            },
            ("partial_out",),
            # A warp adds up a few parts without waiting for others.
            Options(1 if parts <= 16 else 4, 1, (("launch_pdl", True),) if tiles.early else ()),
        )
    return Launch(
        program,
        batch * heads * length,
        {
            "partial_out": partial_out, "partial_sums": partial_sums, "out": out.out,
            "rest": or_else(rest, out.out), "lse": or_else(out.lse, partial_sums),
            "max_scores": or_else(out.max_scores, partial_sums),
            "o_strides": o_layout.strides, "edges": edges, "batch": batch, "heads": heads,
            "q_length": length, "unit_steps": most, "programs": programs,
        },
    )  # fmt: skip
