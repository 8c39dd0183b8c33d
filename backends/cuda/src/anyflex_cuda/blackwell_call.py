"""Launch of forward on Blackwell: which specs its kernel takes, and with which tiles."""

from __future__ import annotations

from typing import NamedTuple

from anyflex.plugin import Call, Outputs, Spec
from anyflex_cuda import blackwell_forward
from anyflex_cuda.forward_call import Fit, boxed_program, launch_boxed, wanted_of
from anyflex_cuda.gluon_kernels import GluonPrograms
from anyflex_triton.building import Mods, Program

__all__ = [
    "BLOCK_M",
    "Tiles",
    "boxes_for",
    "launch_forward",
    "program_for",
    "refused_spec",
    "tiles_for",
]

_ROWS = 128
"""Query rows of a group of warps."""
BLOCK_M = 2 * _ROWS
"""Query rows of a tile."""


class Tiles(NamedTuple):
    """Compile-time configuration of the kernel.

    Args:
        block_n: keys of a step.
        piece: columns that a thread holds at a time.
        stages: pipeline stages: steps whose keys and values are in shared memory.
        registers: registers per thread of a group, and of the other warps.
    """

    block_n: int
    piece: int
    stages: int
    registers: tuple[int, int]


def tiles_for(spec: Spec) -> Tiles:
    """Return the spec's tiles. They are limited by a multiprocessor's 227 KB of shared memory and
    by a thread's registers, which also hold what mods read for each key."""
    wide = max(spec.head_dim, spec.value_head_dim) > 64
    return Tiles(128, 32 if spec.captured else 64, 2 if wide else 3, (240, 24))


def refused_spec(spec: Spec) -> str | None:
    """Return why no call of a spec takes Blackwell's kernel, or None."""
    if spec.dtype.itemsize != 2:
        return f"{spec.dtype}: it takes bfloat16 and float16"
    if max(spec.head_dim, spec.value_head_dim) > 128:
        return "head dims above 128: scores and sums don't fit tensor memory"
    if spec.value_head_dim * spec.dtype.itemsize % 16:
        return "rows of out aren't multiples of 16 bytes"
    if spec.mask_kind == "runs" and spec.block_size[0] % _ROWS:
        return f"the mask's blocks of {spec.block_size[0]} rows aren't multiples of {_ROWS}"
    return None


def program_for(
    made: GluonPrograms, tiles: Tiles, mods: Mods, even: bool, wanted: tuple[bool, bool, bool]
) -> Program:
    """Return the kernel for a class of calls. Arguments are as in `boxed_program`."""
    return boxed_program(
        made, blackwell_forward.forward_kernel, boxes_for(tiles, made.spec), mods, even, wanted,
        {
            "MASK_SCORES": mods.mask_scores,
            "STAGES": tiles.stages,
            "BLOCK_N": tiles.block_n,
            "PIECE": tiles.piece,
            "GROUP_REGISTERS": tiles.registers[0],
            "OTHER_REGISTERS": tiles.registers[1],
        },
    )  # fmt: skip


def _columns(dim: int) -> int:
    """Return a tile's columns. Tiles in two parts, as Hopper's of 96 columns, haven't been
    tried."""
    return 64 if dim <= 64 else 128


def boxes_for(tiles: Tiles, spec: Spec) -> dict[str, tuple[int, ...]]:
    """Return the boxes that one load or store moves, by names of descriptors."""
    d, dv = _columns(spec.head_dim), _columns(spec.value_head_dim)
    return {
        "q_desc": (1, 1, _ROWS, d),
        "k_desc": (1, 1, tiles.block_n, d),
        "v_desc": (1, 1, tiles.block_n, dv),
        "o_desc": (1, 1, _ROWS, tiles.piece),
        "r_desc": (1, 1, _ROWS, tiles.piece),
    }


def launch_forward(made: GluonPrograms, tiles: Tiles, fit: Fit, call: Call, out: Outputs) -> None:
    """Launch the kernel for a call that has a `Fit`, on the current stream."""

    def program_of(mods: Mods) -> Program:
        return program_for(made, tiles, mods, fit.even, wanted_of(out))

    launch_boxed(made, fit, call, out, program_of)
