"""Launches by torch.mps's rules: tensors, ``P`` and ``F`` in a kernel's order, whole threadgroups.
Long ones are made in parts.

torch doesn't count a kernel's arguments: what is missing would be read from the binding of an
earlier kernel. Here each buffer is looked up by its name, and a missing one is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from anyflex.plugin import Call
from anyflex_mps.arguments import Entry, floats_of, integers_of
from anyflex_mps.command_buffers import part_of
from anyflex_mps.spec_shaders import SpecShaders
from anyflex_mps.text import Shader

__all__ = ["launch", "pairs_of"]


def pairs_of(call: Call) -> int:
    """Return the number of pairs of a query row and a key, dead or alive, at most."""
    keys = call.key.shape[2] if call.packed is None else call.packed.max_kv
    return call.query.shape[:3].numel() * keys


def launch(
    made: SpecShaders,
    shader: Shader,
    call: Call,
    groups: tuple[int, int, int],
    tensors: Mapping[str, Tensor | None],
    entries: Mapping[Entry, int],
    *,
    work: int = 0,
    axis: int | None = None,
) -> None:
    """Launch a kernel; nothing is launched where there is no group.

    Args:
        groups: number of threadgroups in each dimension.
        tensors: by the names of the shader's buffers; captured tensors, ``P`` and ``F`` are added.
        entries: of `arguments.integers_of`.
        work: multiply-adds of the kernel, where they grow with the number of pairs.
        axis: dimension of the grid to whose places the kernel adds ``first_group``, so that it can
            be launched in parts.
    """
    if 0 in groups:
        return
    given: dict[str, object] = {
        **tensors,
        **{f"t{i}": tensor for i, tensor in enumerate(call.captured)},
        "F": floats_of(call),
    }
    missing = [name for name in shader.buffers if name != "P" and given.get(name) is None]
    if missing:
        raise RuntimeError(f"the kernel {shader.name!r} lacks arguments: {', '.join(missing)}")
    kernel, places = made.compiled.kernel(shader), groups[axis or 0]
    part = places
    if axis is not None:
        part = part_of(work, places, math.prod(groups) // places, made.cores)
    for first in range(0, places, part):
        given["P"] = integers_of(call, {**entries, "first_group": first})
        grid = list(groups)
        grid[axis or 0] = min(part, places - first)
        threads = [grid[0] * shader.threads, grid[1], grid[2]]
        arguments = [given[name] for name in shader.buffers]
        kernel(*arguments, threads=threads, group_size=[shader.threads, 1, 1])
        made.buffered.add(work * grid[axis or 0] // places, call.query.device)
