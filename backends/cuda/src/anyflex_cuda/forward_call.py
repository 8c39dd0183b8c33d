"""Launching forward on Hopper: which calls its kernel takes, and with which tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from anyflex.plugin import Call, Outputs, Spec
from anyflex_cuda import hopper_forward
from anyflex_cuda.boxed_forward import boxed_constants, boxed_launch, boxed_types, width
from anyflex_cuda.gluon_programs import GluonPrograms
from anyflex_triton.launch import Options, Program
from anyflex_triton.mask_rows import mask_rows

__all__ = [
    "NEVER_RUN",
    "Tiles",
    "cores",
    "launch_forward",
    "program_for",
    "refused_spec",
    "tiles_for",
]

NEVER_RUN = "compiled, and never run by the project; the option unproven takes them"
_ROWS = 64
"""Of a consumer."""


@dataclass(frozen=True)
class Tiles:
    """How the kernel is compiled.

    Args:
        consumers: warpgroups that compute, of 64 query rows each.
        block_n: keys of a step.
        stages: steps whose keys and values are in shared memory.
        turns: two consumers take turns with the tensor cores.
        dynamic: programs ask for their next tile; else they take every n-th.
        registers: of a consumer's thread, of the producer's.
    """

    consumers: int
    block_n: int
    stages: int
    turns: bool
    dynamic: bool
    registers: tuple[int, int]

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return self.consumers * _ROWS


def tiles_for(spec: Spec, unproven: bool) -> Tiles:
    """Return the spec's tiles.

    Args:
        unproven: as the option.
    """
    dims = max(spec.head_dim, spec.value_head_dim)
    if dims <= 64:
        # Where the mask's blocks let them, three consumers are faster.
        thirds = spec.mask_kind == "none" or spec.block_size[0] % (3 * _ROWS) == 0
        if thirds and unproven:
            return Tiles(3, 128, 3, False, True, (160, 24))
        return Tiles(2, 128, 3, True, True, (240, 24))
    return Tiles(2, 128 if dims <= 128 else 64, 2, True, True, (240, 24))


def refused_spec(spec: Spec, tiles: Tiles, unproven: bool) -> str | None:
    """Return why no call of a spec takes Hopper's kernel, or None.

    Args:
        tiles, unproven: of and as in `tiles_for`.
    """
    if spec.dtype.itemsize != 2:
        return f"{spec.dtype}: wgmma takes bfloat16 and float16"
    if spec.value_head_dim > max(spec.head_dim, 128):
        return "values of more than 128 columns, and more than queries have"
    if spec.value_head_dim * spec.dtype.itemsize % 16:
        return "rows of out aren't multiples of 16 bytes"
    if max(spec.head_dim, spec.value_head_dim) > 128 and not unproven:
        return f"head dims above 128 are {NEVER_RUN}"
    if spec.mask_kind == "runs" and spec.block_size[0] % tiles.block_m:
        return f"the mask's blocks of {spec.block_size[0]} rows aren't made of whole tiles"
    return None


def program_for(
    made: GluonPrograms, tiles: Tiles, mods_of: object, score_mod: object, mask_mod: object,
    even: bool, lse: bool, max_scores: bool, rest: bool,
) -> Program:  # fmt: skip
    """Return the compiled kernel for a class of calls.

    Args:
        mods_of, score_mod, mask_mod: of `GluonPrograms.mods`.
        even: lengths of keys, and of the mask's blocks, are multiples of a step's.
        lse, max_scores, rest: which outputs beside out are wanted.
    """
    spec = made.spec
    key = ("hopper forward", tiles, mods_of, even, lse, max_scores, rest)
    program = made.existing.get(key)
    if program is not None:
        return program
    d, dv = width(spec.head_dim), width(spec.value_head_dim)
    return made.program(
        key,
        hopper_forward.forward_kernel,
        boxed_types(made, _boxes(tiles, d, dv)),
        {
            **boxed_constants(spec, score_mod, mask_mod, even, lse, max_scores, rest),
            "DYNAMIC": tiles.dynamic,
            "TURNS": tiles.turns,
            "SHARES_ROOM": d == dv == 256,
            "CONSUMERS": tiles.consumers,
            "STAGES": tiles.stages,
            "BLOCK_N": tiles.block_n,
            "CONSUMER_REGISTERS": tiles.registers[0],
            "PRODUCER_REGISTERS": tiles.registers[1],
        },
        (),
        Options(4, 1),
    )


def _boxes(tiles: Tiles, d: int, dv: int) -> dict[str, tuple[int, ...]]:
    return {
        "q_desc": (1, 1, _ROWS, d),
        "k_desc": (1, 1, tiles.block_n, d),
        "v_desc": (1, 1, tiles.block_n, dv),
        "o_desc": (1, 1, _ROWS, dv),
        "r_desc": (1, 1, _ROWS, dv),
    }


def launch_forward(made: GluonPrograms, tiles: Tiles, call: Call, out: Outputs) -> None:
    """Launch the kernel for a call without `refusal`, on the current stream."""
    spec = made.spec
    rest = out.saved[0] if out.saved else None
    rows = None if call.mask is None else mask_rows(call.mask)
    keys = call.key.shape[2]
    even = keys % tiles.block_n == 0 and (rows is None or rows.block_size[1] % tiles.block_n == 0)
    mods = made.mods(call, even)
    program = program_for(
        made, tiles, mods.key, mods.score_mod, mods.mask_mod, even, out.lse is not None,
        out.max_scores is not None, rest is not None,
    )  # fmt: skip
    boxes = _boxes(tiles, width(spec.head_dim), width(spec.value_head_dim))
    count = -(-call.query.shape[2] // tiles.block_m)
    launch = boxed_launch(made, program, boxes, call, out, rows, count, cores(call.query.device))
    launch.run(call.query.device)


@lru_cache
def cores(device: torch.device) -> int:
    """Multiprocessors, each of which holds one program."""
    return torch.cuda.get_device_properties(device).multi_processor_count
