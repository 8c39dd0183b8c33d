"""Launches by torch.mps's rules: tensors, ``P`` and ``F`` in a kernel's order, whole threadgroups.

torch doesn't count a kernel's arguments: what is missing would be read from the binding of an
earlier kernel. Here each buffer is looked up by its name, and a missing one is an error.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from anyflex.plugin import Call
from anyflex_mps.arguments import Entry, floats_of, integers_of
from anyflex_mps.shaders import Shaders
from anyflex_mps.text import Shader

__all__ = ["launch"]


def launch(
    shaders: Shaders,
    shader: Shader,
    call: Call,
    groups: tuple[int, int, int],
    tensors: Mapping[str, Tensor | None],
    entries: Mapping[Entry, int],
) -> None:
    """Launch a kernel; nothing is launched where there is no group.

    Args:
        groups: number of threadgroups in each dimension.
        tensors: by the names of the shader's buffers; captured tensors, ``P`` and ``F`` are added.
        entries: of `arguments.integers_of`.
    """
    if 0 in groups:
        return
    given: dict[str, object] = {
        **tensors,
        **{f"t{i}": tensor for i, tensor in enumerate(call.captured)},
        "P": integers_of(call, entries),
        "F": floats_of(call),
    }
    arguments = [given.get(name) for name in shader.buffers]
    missing = [
        name for name, value in zip(shader.buffers, arguments, strict=True) if value is None
    ]
    if missing:
        raise RuntimeError(f"the kernel {shader.name!r} lacks arguments: {', '.join(missing)}")
    threads = [groups[0] * shader.threads, groups[1], groups[2]]
    shaders.kernel(shader)(*arguments, threads=threads, group_size=[shader.threads, 1, 1])
