"""Compiled kernels of a spec: each source is compiled once, at its first launch.

Specs share none: a kernel goes with its spec when core drops that.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anyflex.plugin import free_in_child
from anyflex_mps.text import Shader

__all__ = ["CompileShader", "Shaders"]

CompileShader = Callable[[str], Any]
"""``torch.mps.compile_shader``, or what stands in for it."""


class Shaders:
    """Kernels by source. torch's own cache has no lock before 2.15, so one is held here."""

    def __init__(self, compile_shader: CompileShader) -> None:
        self._compile = compile_shader
        self._kernels: dict[str, Any] = {}
        self._refusals: dict[str, str] = {}
        self._lock = threading.Lock()
        free_in_child(self, "_lock")

    def kernel(self, shader: Shader) -> Any:
        """Return a shader's kernel.

        Raises RuntimeError with the compiler's message and the path of the kept source, or where
        the GPU doesn't run as many threads of the kernel in a group as it needs. A source that was
        refused isn't compiled again.
        """
        found = self._kernels.get(shader.text)
        if found is not None:
            return found
        with self._lock:
            found = self._kernels.get(shader.text)
            if found is None:
                found = self._kernels[shader.text] = self._compiled(shader)
        return found

    def _compiled(self, shader: Shader) -> Any:
        if shader.text in self._refusals:
            raise RuntimeError(self._refusals[shader.text])
        try:
            # The library makes a new object at each access: it is kept.
            kernel = getattr(self._compile(shader.text), shader.name)
        except (SyntaxError, RuntimeError) as error:
            self._refusals[shader.text] = (
                f"Metal's compiler refuses the kernel {shader.name!r} of anyflex-mps, kept at "
                f"{_kept(shader)}; please report it with that file, and use backend='reference' "
                # In one line: core reports the first line of what a plugin raises.
                f"meanwhile. It says: {' '.join(str(error).split())}"
            )
            raise RuntimeError(self._refusals[shader.text]) from error
        most = kernel.max_threads_per_threadgroup
        if most < shader.threads:
            self._refusals[shader.text] = (
                f"this GPU runs at most {most} threads of the kernel {shader.name!r} of "
                f"anyflex-mps in a group, which needs {shader.threads}: it takes too many "
                f"registers. The source is kept at {_kept(shader)}; please report it with that "
                "file and the chip's name, and use backend='reference' meanwhile"
            )
            raise RuntimeError(self._refusals[shader.text])
        return kernel


def _kept(shader: Shader) -> str:
    """Write the source to a file that its digest names, and return the path: a text that is
    refused again leaves no other file."""
    digest = hashlib.sha256(shader.text.encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir(), f"anyflex-{shader.name}-{digest}.metal")
    # "x" follows no link that somebody else left there.
    with contextlib.suppress(FileExistsError), path.open("x", encoding="ascii") as file:
        file.write(shader.text)
    return str(path)
