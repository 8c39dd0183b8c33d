"""Forward on Blackwell, where the user opts in to it: which specs its kernel takes, with which
tiles. The portable kernels take other calls, and backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from anyflex.plugin import Call, Outputs, Spec, TensorSpec
from anyflex_cuda import blackwell_forward
from anyflex_cuda.forward_call import Fit, boxed_program, fit_of, launch_boxed, refusal
from anyflex_cuda.gluon_kernels import (
    FORWARD_FIT,
    FORWARD_OPTIONS,
    GluonPrograms,
    refused_options,
)
from anyflex_triton.building import KernelInputs, Mods, Program, TritonKernel, wanted_outputs

__all__ = ["BlackwellKernel", "program_for", "refused_spec", "tiles_for"]

_ROWS = 128
"""Query rows of a group of warps."""
_BLOCK_M = 2 * _ROWS
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
    made: GluonPrograms, tiles: Tiles, mods: Mods, even: bool, wanted: Mapping[str, bool]
) -> Program:
    """Return the kernel for a class of calls. Arguments are as in `boxed_program`."""
    return boxed_program(
        made, blackwell_forward.forward_kernel, _boxes_for(tiles, made.spec), mods, even, wanted,
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


def _boxes_for(tiles: Tiles, spec: Spec) -> dict[str, tuple[int, ...]]:
    """Return the boxes that one load or store moves, by names of descriptors."""
    d, dv = _columns(spec.head_dim), _columns(spec.value_head_dim)
    return {
        "q_desc": (1, 1, _ROWS, d),
        "k_desc": (1, 1, tiles.block_n, d),
        "v_desc": (1, 1, tiles.block_n, dv),
        "o_desc": (1, 1, _ROWS, tiles.piece),
        "r_desc": (1, 1, _ROWS, tiles.piece),
    }


class BlackwellKernel(TritonKernel):
    """Chooses and launches the kernels of one spec."""

    def __init__(self, given: KernelInputs) -> None:
        super().__init__(given)
        spec, overrides = given.spec, given.overrides
        self._tiles = tiles_for(spec)
        self._refused = refused_options(overrides, FORWARD_OPTIONS) or refused_spec(spec)
        # Backward is portable, and its tanh is exact, so forward's must be too.
        self._fast_tanh = bool(overrides.get("fast_tanh")) and not spec.needs_backward
        self._blackwell = GluonPrograms(spec, given.source, self._fast_tanh, given.files)

    def describe(self, call: Call) -> str:
        """Return ``blackwell 256x128, never run by the project``, with ``fast tanh`` where that is
        taken, or the portable kernels' description and why they are taken."""
        portable = super().describe(call)
        if self._decodes(call):
            return portable
        reason = self._refused or refusal(call)
        if reason is not None:
            return f"{portable} (not Blackwell's kernel: {reason})"
        backward = ", backward portable" if self.spec.needs_backward else ""
        tiles = f"{_BLOCK_M}x{self._tiles.block_n}"
        if self._fast_tanh and self._blackwell.is_coarse(call):
            tiles += " fast tanh"
        return f"blackwell {tiles}, never run by the project{backward}"

    def _fit(self, call: Call) -> Fit | None:
        """Return the call's fit for Blackwell's forward, or None where it doesn't take the
        call."""
        if self._refused is not None or self._decodes(call):
            return None
        return self._blackwell.kept_fit(call, FORWARD_FIT, self._fit_of)

    def _fit_of(self, call: Call) -> Fit | None:
        tiles = self._tiles
        return fit_of(self._blackwell, _BLOCK_M, tiles.block_n, _boxes_for(tiles, self.spec), call)

    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        """Return a counter or nothing for Blackwell's forward, else the portable kernels'."""
        fit = self._fit(call) if direction == "forward" else None
        if fit is not None:
            return fit.workspace
        return super().workspace(call, direction)

    def forward(self, call: Call, out: Outputs) -> None:
        """Fill `out`."""
        fit = self._fit(call)
        if fit is not None:
            made, tiles, even, wanted = self._blackwell, self._tiles, fit.even, wanted_outputs(out)
            launch_boxed(
                made, fit, call, out, lambda mods: program_for(made, tiles, mods, even, wanted)
            )
        else:
            super().forward(call, out)
