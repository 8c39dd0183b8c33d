"""Metal emulator: runs Metal source on a CPU and finds what it does wrong.

A source is rewritten a little, compiled as C++ by clang under a shim header and executed with one
fiber per GPU thread. `compile_shader` stands in for `torch.mps.compile_shader`.

| Module | Subject |
|---|---|
| `metal_source` | Metal source read as text, and the C++ that is compiled of it |
| `parts` | sources in parts, each compiled once for all sources that have it |
| `compiling` | clang, and the cache of libraries by content digest |
| `memory` | arguments as copies between pages that fault |
| `running` | launches; `runtime/` has the scheduler, its checks and the race build |
| `numerics` | schedules, and variants of what an Apple GPU may compute otherwise |
| `shaders` | torch's call, cast and dispatch rules |
| `lint` | what Apple's compiler refuses and clang doesn't |
| `shim/` | Metal's headers as C++ |

It says nothing of speed, registers, Apple's front end, or when one threadgroup sees what another
wrote.
"""

from __future__ import annotations

from .compiling import missing_compiler
from .faults import KernelFault
from .metal_source import Instance
from .numerics import LAYOUTS, SCHEDULES, Numerics
from .shaders import EmulatedKernel, EmulatedLibrary, compile_shader

__all__ = [
    "LAYOUTS",
    "SCHEDULES",
    "EmulatedKernel",
    "EmulatedLibrary",
    "Instance",
    "KernelFault",
    "Numerics",
    "compile_shader",
    "missing_compiler",
]
